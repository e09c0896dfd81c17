// The page of `/docs`: every route of openapi.json, with an example that runs here, under the key in the form. The key
// stays in this page: it is kept nowhere, and leaves it only to this server.
"use strict";

const LONGEST_SHOWN = 20000;
const place = (id) => document.getElementById(id);
const BASE = location.pathname.replace(/\/docs\/?$/, "");  // a front may have put a prefix before it

const made = (name, parent, text, attributes = {}) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent.append(element);
  return element;
};

const withKey = (headers = {}) => (place("key").value ? { ...headers, Authorization: `Bearer ${place("key").value}` } : headers);

const read = async (path) => {
  const answer = await fetch(BASE + path, { headers: withKey() });
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 500)}`);
  return answer.json();
};

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const curl = (method, path, headers, body) => [
  `curl ${method === "GET" ? "" : "-X " + method + " "}${location.origin}${BASE}${path}`,
  ...(place("key").value ? [`-H "Authorization: Bearer $KEY"`] : []),
  ...Object.entries(headers).map(([name, value]) => `-H ${quoted(name + ": " + value)}`),
  ...(body === undefined ? [] : [`-d ${quoted(body)}`]),
].join(" \\\n  ");

const shown = (text) => {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
};

const run = async (method, path, headers, body, output) => {
  output.textContent = "…";
  const began = performance.now();
  try {
    const answer = await fetch(BASE + path, { method, headers: withKey(headers), body });
    const text = shown(await answer.text());
    const took = Math.round(performance.now() - began);
    const told = [...answer.headers].filter(([name]) => /^(x-|server-timing|retry)/.test(name));
    const head = [`${answer.status} ${answer.statusText}, ${took} ms`, ...told.map((pair) => pair.join(": "))].join("\n");
    const rest = text.length > LONGEST_SHOWN ? `\n… ${text.length - LONGEST_SHOWN} more characters` : "";
    output.textContent = `${head}\n\n${text.slice(0, LONGEST_SHOWN)}${rest}`;
  } catch (error) {
    output.textContent = `No answer: ${error.message}`;
  }
};

const fieldsOf = (schema) => Object.entries(schema.properties || {}).map(([name, field]) =>
  ({ name, about: field.description || "", isRequired: (schema.required || []).includes(name) }));

// Where a body has no field for the model, a header names it.
const exampleOf = (content, schema) => {
  const chosen = place("model").value;
  const model = chosen && "model" in (schema.properties || {}) ? { model: chosen } : {};
  return JSON.stringify({ ...content.example, ...model }, null, 2);
};

const headersOf = (schema) => ({
  ...(schema ? { "Content-Type": "application/json" } : {}),
  ...(place("model").value && schema && !("model" in (schema.properties || {})) ? { "X-TEI-Instance": place("model").value } : {}),
});

const addFields = (box, schema) => {
  const details = made("details", box);
  made("summary", details, "Fields");
  const list = made("dl", details);
  for (const field of fieldsOf(schema)) {
    made("dt", list, field.name + (field.isRequired ? " (required)" : ""));
    made("dd", list, field.about);
  }
};

const addRoute = (parent, described, path, method, operation) => {
  const box = made("details", parent, undefined, { class: "route" });
  const line = made("summary", box);
  made("b", line, method);
  made("code", line, path);
  made("span", line, operation.summary);
  const content = operation.requestBody?.content["application/json"];
  const schema = content && described.components.schemas[content.schema.$ref.split("/").pop()];
  let input;
  if (content) {
    addFields(box, schema);
    input = made("textarea", box, undefined, { rows: 7, spellcheck: "false", "aria-label": `Body for ${path}` });
    input.value = exampleOf(content, schema);
    input.addEventListener("input", () => { input.isEdited = true; });
    input.showExample = () => { input.value = exampleOf(content, schema); };
  }
  const bar = made("p", box, undefined, { class: "verbs" });
  const button = made("button", bar, "Run", { class: "strong", type: "button" });
  const asCurl = made("button", bar, "As curl", { type: "button" });
  const output = made("pre", box, "", { tabindex: "0", "aria-live": "polite", "aria-label": `Answer of ${path}` });
  button.onclick = () => run(method, path, headersOf(schema), input?.value, output);
  asCurl.onclick = () => { output.textContent = curl(method, path, headersOf(schema), input?.value); };
};

const addRoutes = (described) => {
  place("about").textContent = described.info.description;
  const routes = place("routes");
  routes.replaceChildren();
  const groups = new Map();
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const [group, ...rest] = operation.summary.split(": ");
      const name = rest.length ? group : "Others";
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push([path, method.toUpperCase(), { ...operation, summary: rest.join(": ") || group }]);
    }
  }
  for (const [name, found] of groups) {
    made("h2", routes, name);
    for (const [path, method, operation] of found) addRoute(routes, described, path, method, operation);
  }
};

const addModels = (listed) => {
  const chosen = place("model").value;
  place("model").replaceChildren(new Option("as in the example", ""), ...listed.data.map((each) => new Option(each.id, each.id)));
  place("model").value = listed.data.some((each) => each.id === chosen) ? chosen : listed.data[0]?.id || "";
};

const begin = async () => {
  const problem = place("problem");
  problem.hidden = true;
  try {
    addModels(await read("/v1/models"));
    addRoutes(await read("/openapi.json"));
  } catch (error) {
    problem.textContent = `This server did not tell its routes. ${error.message}`;
    problem.hidden = false;
  }
};

place("model").addEventListener("change", () => {
  for (const input of document.querySelectorAll("textarea")) if (!input.isEdited) input.showExample();
});
place("asked").addEventListener("submit", (event) => { event.preventDefault(); begin(); });
begin();
