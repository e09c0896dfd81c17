// What the pages need beside htmx: a stream that says when to look again, questions before what cannot be taken back,
// and copying.
"use strict";

const AGAIN_MS = 10000;  // where the stream was refused, or a proxy keeps it back
let stream = null;
let asked = null;  // the element whose question is open: it has to be there for the answer

// A page that nobody sees has no stream: a browser has six connections for all its pages of one server.
function listen() {
  const place = document.body.dataset.stream;
  if (!place) return;
  const log = document.getElementById("log");
  const address = new URL(log ? `${place}?${log.dataset.stream}` : place, location.href).href;
  const isOpen = stream && stream.readyState !== EventSource.CLOSED;
  if (isOpen && !document.hidden && stream.url === address) return;
  if (stream) stream.close();
  stream = null;
  if (document.hidden) return;
  stream = new EventSource(address);
  for (const word of ["tick", "log"]) stream.addEventListener(word, () => look(word));
}

function look(word) {
  const isTyping = document.activeElement && document.activeElement.closest("#log form");
  if (!isTyping && !asked) htmx.trigger(document.body, word);
}

setInterval(() => {
  if (stream && stream.readyState !== EventSource.OPEN && !document.hidden) look("tick");
  listen();
}, AGAIN_MS);
document.addEventListener("visibilitychange", listen);
document.addEventListener("DOMContentLoaded", listen);
document.addEventListener("htmx:afterSettle", listen);

document.addEventListener("htmx:confirm", (event) => {
  if (!event.detail.question) return;
  event.preventDefault();
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-words").textContent = event.detail.question;
  dialog.returnValue = "";
  asked = event.detail.elt;
  dialog.addEventListener("close", () => {
    asked = null;
    if (dialog.returnValue === "yes") event.detail.issueRequest(true);
  }, { once: true });
  dialog.showModal();
});

// Refusals are answers, too: the server says where they stand.
document.addEventListener("htmx:beforeSwap", (event) => {
  // A look that was on its way when the question was asked: htmx sends nothing for an element that is gone.
  if (asked && event.detail.target.contains(asked)) {
    event.detail.shouldSwap = false;
    return;
  }
  if (event.detail.xhr.status >= 400) {
    event.detail.shouldSwap = true;
    event.detail.isError = false;
  }
});

document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.requestConfig.verb === "post" && event.detail.successful) htmx.trigger(document.body, "acted");
});

document.addEventListener("htmx:sendError", (event) => {
  if (event.detail.requestConfig.verb === "post") notice("The appliance does not answer: is it up?");
});

function notice(words) {
  const paragraph = document.createElement("p");
  paragraph.className = "problem";
  paragraph.textContent = words;
  document.getElementById("notice").replaceChildren(paragraph);
}

function addCopyButtons(root) {
  for (const block of root.querySelectorAll("pre.copy:not(.has-button)")) {
    block.classList.add("has-button");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.firstChild.textContent);
      button.textContent = "Copied";
    });
    block.append(button);
  }
}

document.addEventListener("DOMContentLoaded", () => addCopyButtons(document));
document.addEventListener("htmx:afterSettle", (event) => addCopyButtons(event.detail.elt.parentElement || document));
