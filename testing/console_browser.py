"""What a person does on the console, in a browser without windows. Run in .venv-demo; prints what was seen as JSON.

python -m testing.console_browser URL GATEWAY_URL MODEL HOSTILE_MODEL [FOLDER]

With a FOLDER, a picture of each page is kept there, light, dark and as wide as a phone.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, sync_playwright

from testing.markup import HOSTILE

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_SECS = 60
PAGES = {
    "fleet": "/console",
    "instance": "/console/instances/first",
    "create": "/console/create",
    "fields": "/console/instances/first/fields",
    "models": "/console/models",
    "gpus": "/console/gpus",
    "events": "/console/events",
    "bench": "/console/bench?instance=first",
    "doctor": "/console/doctor",
    "keys": "/console/keys",
    "playground": "/console/playground",
}
LOOKS = (("light", 1200), ("dark", 1200), ("light", 390))


class Person:
    """wrong: dialogs of scripts, errors, and requests elsewhere, of which there should be none."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.context = browser.new_context(viewport={"width": 1200, "height": 850})
        self.page = self.watched(self.context.new_page())

    def watched(self, page: Page) -> Page:
        page.set_default_timeout(PATIENCE_SECS * 1000)
        page.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: self.wrong.append(f"error {error}"))
        page.on("console", lambda line: line.type == "error" and self.hear(line.text))
        page.on("request", lambda request: request.url.startswith(self.url) or self.wrong.append(request.url))
        return page

    def hear(self, words: str) -> None:
        # Refusals that were provoked; 404: of a page whose instance has just been deleted.
        if not re.search(r"status of (401|403|404|409|422|503)", words):
            self.wrong.append(f"console {words}")

    def go(self, path: str) -> None:
        self.page.goto(self.url + path)

    def press(self, name: str, sure: bool | None = None) -> None:
        """sure: the answer to the question that comes."""
        self.page.get_by_role("button", name=name, exact=True).first.click()
        if sure is not None:
            self.page.locator("#confirm").get_by_role("button", name="Do it" if sure else "Cancel").click()

    def words(self, place: str) -> str:
        return self.page.locator(place).first.inner_text()

    def wait(self, place: str, text: str) -> str:
        found = self.page.locator(place).filter(has_text=text).first
        found.wait_for()
        return found.inner_text()

    def fill(self, name: str, text: str) -> None:
        self.page.locator(f"[name={name}]").first.fill(text)


def creates(person: Person, model: str) -> dict[str, Any]:
    person.go("/console")
    empty = person.words("main")
    person.page.get_by_role("link", name="Create the first one").click()
    person.fill("model_id", model)
    person.fill("name", "first")
    person.fill("replicas", "many")
    wrong = person.wait("#check .problem", "replicas")
    person.fill("replicas", "1")
    fine = person.wait("#check .note", "It can be created")
    person.press("Create")
    person.wait("h1", "first")
    person.wait("#state .title .badge", "running")
    return {"empty": empty, "wrong": wrong, "fine": fine, "url": person.page.url}


def compares(person: Person) -> dict[str, Any]:
    person.page.get_by_role("link", name="Try it").click()
    person.fill("texts", f"one text\nanother text\n{HOSTILE}")
    person.press("Compare")
    person.page.locator(".heat").wait_for()
    cells = person.page.locator(".heat tbody td").all_inner_texts()
    points = person.page.locator(".map circle").count()
    curl = person.words("#result pre.copy")
    person.page.get_by_role("link", name="tokens").click()
    person.fill("texts", f"hello world\n{HOSTILE}")
    person.press("Show")
    person.page.locator(".word").first.wait_for()
    return {"cells": cells, "points": points, "curl": curl, "tokens": person.page.locator(".word").count()}


def finds_out_why(person: Person) -> dict[str, Any]:
    """A replica is killed."""
    person.go("/console/instances/first")
    pid = int(person.page.locator("section table tbody td").nth(4).inner_text())
    os.kill(pid, signal.SIGKILL)
    died = person.wait(".events li", "died")
    person.wait("#state .title .badge", "running")
    person.page.locator("#log input[type=search]").fill("Ready after")
    person.page.keyboard.press("Enter")
    person.page.locator("#log .hint").filter(has_text="with this text").wait_for()
    return {"died": died, "log": person.words("pre.log")}


@contextmanager
def a_look_that_is_late(person: Person) -> Iterator[Callable[[], None]]:
    """The page asks for the state of its instance, and the answer, which is another one, comes when it is let."""
    held: list[Route] = []
    looks = re.compile(r"/state\?tag=")
    person.page.route(looks, lambda route: held.append(route))
    person.page.evaluate("htmx.trigger(document.body, 'tick')")
    deadline = time.monotonic() + 30
    while not held and time.monotonic() < deadline:
        person.page.wait_for_timeout(50)

    def let_it_come() -> None:
        with person.page.expect_response(looks):
            for route in held:
                route.continue_(url=re.sub("tag=[^&]*", "tag=another", route.request.url))
        person.page.unroute(looks)
        person.page.wait_for_timeout(200)  # until htmx has had it

    yield let_it_come


@contextmanager
def looks_that_bring_another(person: Person) -> Iterator[None]:
    """Every answer to a look at the instance replaces what is shown."""
    looks = re.compile(r"/state\?tag=")
    person.page.route(looks, lambda route: route.continue_(url=re.sub("tag=[^&]*", "tag=another", route.request.url)))
    yield
    person.page.unroute(looks)


# Whether a button that a look has just brought asks its question.
PRESSED_AFTER_A_LOOK = """() => new Promise((done) => {
  document.addEventListener("htmx:afterSwap", function heard(event) {
    if (!event.detail.pathInfo.requestPath.includes("/state")) return;
    document.removeEventListener("htmx:afterSwap", heard);
    setTimeout(() => {
      [...document.querySelectorAll("#state button")].find((each) => each.textContent === "Stop").click();
      done(document.getElementById("confirm").open);
    });
  });
  htmx.trigger(document.body, "acted");
})"""


def changes(person: Person) -> dict[str, Any]:
    person.go("/console/instances/first/fields")
    person.fill("replicas", "2")
    at_once = person.wait("#check .note", "Changes replicas")
    person.press("Change")
    person.page.locator("section table tbody tr").nth(1).wait_for()
    person.press("Stop", sure=False)
    kept = person.words("#state .title .badge")
    with looks_that_bring_another(person):
        is_asked = person.page.evaluate(PRESSED_AFTER_A_LOOK)
    if is_asked:
        person.page.locator("#confirm").get_by_role("button", name="Cancel").click()
    with a_look_that_is_late(person) as let_it_come:
        person.press("Stop")
        let_it_come()
        person.page.locator("#confirm").get_by_role("button", name="Do it").click()
    person.wait("#state .title .badge", "stopped")
    person.press("Start")
    person.wait("#state .title .badge", "running")
    return {"at_once": at_once, "kept": kept, "is_asked": is_asked}


def is_refused(person: Person) -> dict[str, Any]:
    """Two windows: what another one has deleted, this one cannot stop."""
    person.go("/console/create")
    person.fill("model_id", "first")
    person.fill("name", "1bad")
    person.press("Create")
    return {"name": person.wait("#notice .problem", "name")}


def proves_a_model(person: Person, model: str) -> dict[str, Any]:
    person.go("/console/models")
    person.fill("model_id", model)
    person.press("Add")
    row = person.page.locator("tr", has_text=model).first
    row.get_by_role("button", name="Prove that it loads").click()
    person.page.locator("tr", has_text=model).first.locator(".badge.verified").wait_for()
    return {"row": person.page.locator("tr", has_text=model).first.inner_text()}


def meets_hostile_words(person: Person, hostile: str) -> dict[str, Any]:
    """A model whose folder is called like markup, with a log and events that have its name."""
    person.go("/console/create")
    person.fill("model_id", hostile)
    person.fill("name", "hostile")
    person.wait("#check .note", "It can be created")
    person.press("Create")
    person.wait("#state .title .badge", "running")
    person.go("/console/playground?instance=hostile&task=similarity")
    person.press("Compare")
    person.page.locator(".heat").wait_for()
    for path in ("/console", "/console/models", "/console/events", f"/console/events?find={HOSTILE}"):
        person.go(path)
    images = 0
    for path in ("/console", "/console/models", "/console/events", "/console/instances/hostile"):
        person.go(path)
        images += person.page.locator("main img").count()
    person.press("Delete", sure=True)
    person.page.wait_for_url(f"{person.url}/console")
    return {"images": images}


def measures(person: Person) -> dict[str, Any]:
    person.go("/console/bench?instance=first")
    person.press("Measure")
    person.page.locator("#bench progress").wait_for()
    person.wait("#bench", "Saturated with")
    rows = person.page.locator("#bench tbody tr").all_inner_texts()
    points = person.page.locator("#bench circle").count()
    best = person.page.locator("#bench circle.best").count()
    return {"rows": rows, "points": points, "best": best}


def sees_what_others_do(person: Person, browser: Browser) -> dict[str, Any]:
    """Another window changes something; this one shows it without being touched."""
    person.go("/console")
    other = Person(browser, person.url)
    other.go("/console/instances/first")
    other.press("Stop", sure=True)
    other.wait("#state .title .badge", "stopped")
    began = time.monotonic()
    seen = person.wait("#fleet .badge", "stopped")
    took, is_open = time.monotonic() - began, person.page.evaluate("stream.readyState === EventSource.OPEN")
    other.press("Start")
    person.wait("#fleet .badge", "running")
    other.context.close()
    return {"seen": seen, "took": took, "is_open": is_open, "wrong": other.wrong}


def asks_the_doctor(person: Person) -> dict[str, Any]:
    person.go("/console/doctor")
    verdicts = person.page.locator("main tbody .badge").all_inner_texts()
    return {"summary": person.words("main p"), "verdicts": verdicts}


def tries_the_gateway(browser: Browser, url: str, key: str, folder: Path | None) -> dict[str, Any]:
    """Its page of routes, where keys are asked for."""
    person = Person(browser, url)
    person.go("/docs")
    person.page.locator("#problem").filter(has_text="401").wait_for()
    person.page.locator("#key").fill(key)
    person.press("Use")
    route = person.page.locator(".route", has=person.page.get_by_text("/v1/embeddings", exact=True))
    route.locator("summary").first.click()
    body = json.loads(route.locator("textarea").input_value())
    route.get_by_role("button", name="Run").click()
    output = route.locator("pre")
    output.filter(has_text="200 OK").wait_for()
    answer = output.inner_text()
    route.get_by_role("button", name="As curl").click()
    curl = output.inner_text()
    looks = {}
    for theme, width in LOOKS:
        person.page.emulate_media(color_scheme=theme)
        person.page.set_viewport_size({"width": width, "height": 850})
        if folder:
            person.page.screenshot(path=folder / f"gateway-{theme}-{width}.png")
        looks[f"{theme} {width}"] = violations_of(person.page, width)
    routes = person.page.locator(".route").count()
    person.context.close()
    return {
        "model": body["model"],
        "answer": answer,
        "curl": curl,
        "routes": routes,
        "looks": looks,
        "wrong": person.wrong,
    }


def makes_the_first_key(person: Person) -> dict[str, Any]:
    person.go("/console/keys")
    person.fill("name", "me")
    person.press("Create")
    person.page.locator("#new-key pre").wait_for()
    key = person.page.locator("#new-key pre").evaluate("element => element.firstChild.textContent")
    person.page.get_by_role("link", name="I have kept it").click()
    person.wait("h1", "Log in")
    person.fill("key", "tei-wrong")
    person.press("Log in")
    wrong = person.wait(".problem", "not known")
    person.fill("key", key)
    person.press("Log in")
    who = person.wait(".who", "me (admin)")
    return {"wrong": wrong, "who": who, "key": key}


def logs_out(person: Person) -> dict[str, Any]:
    person.press("Log out")
    person.wait("h1", "Log in")
    person.go("/console/events")
    return {"afterwards": person.words("h1")}


def looked_at(person: Person, browser: Browser, folder: Path | None) -> dict[str, list[str]]:
    """What axe finds on each page, in both themes and as narrow as a phone."""
    cookies, found = person.context.cookies(), dict[str, list[str]]()
    for theme, width in LOOKS:
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 850})
        context.add_cookies(cookies)
        page = person.watched(context.new_page())
        for name, path in PAGES.items():
            page.goto(person.url + path)
            if name == "playground":
                page.get_by_role("button", name="Compare").click()
                page.locator(".heat").wait_for()
            if folder:
                page.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=True)
            found[f"{name} {theme} {width}"] = violations_of(page, width)
        context.close()
    return found


def violations_of(page: Page, width: int) -> list[str]:
    """What axe finds, and whether it is wider than the screen."""
    wide = page.evaluate("document.documentElement.scrollWidth")
    violations = Axe().run(page).response["violations"]
    words = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in violations]
    return [*words, f"it is {wide} wide"] if wide > width else words


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        binary = next(path for path in map(shutil.which, BROWSERS) if path)
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    url, gateway, model, hostile = sys.argv[1:5]
    folder = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    with chromium() as browser:
        person = Person(browser, url)
        seen: dict[str, Any] = {}
        steps: dict[str, Callable[[], Any]] = {
            "creates": lambda: creates(person, model),
            "compares": lambda: compares(person),
            "why": lambda: finds_out_why(person),
            "changes": lambda: changes(person),
            "refused": lambda: is_refused(person),
            "proves": lambda: proves_a_model(person, model),
            "hostile": lambda: meets_hostile_words(person, hostile),
            "live": lambda: sees_what_others_do(person, browser),
            "measures": lambda: measures(person),
            "doctor": lambda: asks_the_doctor(person),
            "key": lambda: makes_the_first_key(person),
            "looks": lambda: looked_at(person, browser, folder),
            "gateway": lambda: tries_the_gateway(browser, gateway, seen["key"]["key"], folder),
            "out": lambda: logs_out(person),
        }
        for name, step in steps.items():
            try:
                seen[name] = step()
            except Exception as error:
                where = person.page.locator("body").inner_text()[:1500]
                raise AssertionError(f"{name}: {error}\n{person.page.url}\n{where}") from error
    print(json.dumps({**seen, "wrong": person.wrong}))


if __name__ == "__main__":
    main()
