"""What a reader of the page sees and does, in a browser without windows. Run in .venv-demo; prints it as JSON.

python -m tests.examples.code_search_browser ROOM

Playwright drives the Chromium of the distribution. It waits for elements by itself, and with the headless shell
it takes no more room than selenium, which needs the whole browser and a driver of just its version.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import requests
from playwright.sync_api import Page, sync_playwright

from testing.fake_gateway import FakeGateway
from tests.examples.code_search_names import CHUNKS, EVIL, EVIL_NAME, IMAGE, SCRIPT

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
OURS = ".note, .problem, .progress, .head"
PATIENCE_SECS = 90


class Reader:
    """A person at the page. seen: dialogs, errors and strange hosts, of which there should be none."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.seen: list[str] = []
        page.set_default_timeout(PATIENCE_SECS * 1000)
        page.on("dialog", lambda dialog: (self.seen.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: self.seen.append(f"error {error}"))
        page.on("request", lambda request: request.url.startswith(url) or self.strange(request.url))
        page.goto(url)
        self.page.locator("#index").wait_for()

    def strange(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.seen.append(f"request {url}")

    def wait(self, place: str, text: str) -> str:
        """The words of a place as soon as it has this text."""
        self.page.locator(place).filter(has_text=text).wait_for()
        return self.words(place)

    def words(self, place: str) -> str:
        """Our own: gradio shows there for a moment that it waits."""
        return "\n".join(self.page.locator(f"{place} :is({OURS})").all_inner_texts())

    def type(self, place: str, text: str) -> None:
        self.page.locator(f"{place} textarea, {place} input").first.fill(text)

    def click(self, place: str, place_of_answer: str, text: str) -> str:
        self.page.locator(place).click()
        return self.wait(place_of_answer, text)

    def index(self, text: str = "are in the index:", button: str = "#index") -> str:
        return self.click(button, "#status", text)

    def search(self, question: str, path: str = "") -> list[str]:
        """The places of the results. No two questions are equal: so the results are those of this one."""
        self.type("#path", path)
        self.type("#question", question)
        self.page.locator("#search").click()
        self.wait("#results .head", f"for: {question}")
        return self.page.locator("#results .place b").all_inner_texts()

    def choose(self, language: str) -> None:
        self.page.locator("#language input").click()
        self.page.get_by_role("option", name=language, exact=True).click()


def story(reader: Reader, fake: FakeGateway, code: Path) -> Iterator[tuple[str, Any]]:
    """Each thing that is looked at, by its name."""
    yield "at first", reader.words("#status")
    reader.type("#source", str(code))
    reader.type("#question", "anything")
    yield "nothing indexed", reader.click("#search", "#results", "index it first")

    for refused, said in {"ext::sh -c x": "neither", "ftp://host/x": "must begin", IMAGE: "no folder"}.items():
        reader.type("#source", refused)
        yield refused, reader.index(said)

    reader.type("#source", str(code))
    fake.texts.clear()
    fake.plan = ["ok", "broken"]
    yield "broken", reader.index("The model failed")
    yield "goes on", reader.index()
    yield "asked", [len(fake.texts), len(set(fake.texts))]
    yield "left out", reader.page.locator("#status details").text_content()
    yield "computed", reader.page.locator("#numbers .tile b").all_inner_texts()
    reader.index("0 were there", "#rebuild")
    yield "rebuilt", reader.page.locator("#numbers .tile b").all_inner_texts()
    yield "formula", reader.page.locator("#numbers .small").inner_text()

    yield "found", reader.search("evil")[:1]
    yield (
        "text",
        reader.page.locator("#results pre").first.evaluate(
            "pre => [...pre.querySelectorAll('.line')].map(line => line.textContent)"
        ),
    )
    yield "marked", reader.page.locator("#results pre").first.locator("mark").all_inner_texts()
    yield "elements", reader.page.locator("#results, #status").locator("script, img").count()
    reader.search(f"{IMAGE} {SCRIPT}")
    yield "named", reader.search("of an image")[0]
    yield "in a folder", reader.search("a word", "sub")
    reader.choose("markdown")
    yield "of a language", reader.search("the word")
    reader.choose("all languages")
    reader.page.locator("#rerank input").check()
    yield "reranked", reader.search("this word", "sub")
    yield "head", reader.page.locator("#results .head").inner_text()

    before = len(fake.texts)
    fake.plan = ["halt"]
    reader.page.locator("#rebuild").click()
    assert fake.halted.wait(PATIENCE_SECS)
    yield "stopped", reader.click("#stop", "#status", "Stopped")
    fake.goes_on.set()
    yield "after a stop", reader.index()
    yield "asked after a stop", len(fake.texts) - before
    fake.close()
    yield "away", reader.index("No gateway answers", "#rebuild")
    yield "seen", reader.seen


def written(code: Path) -> None:
    (code / "sub").mkdir(parents=True)
    for at in range(CHUNKS - 4):
        (code / f"file{at:02}.py").write_text(f"number = {at}")
    (code / "evil.py").write_text(EVIL)
    (code / EVIL_NAME).write_text("name = 'of an image'")
    (code / "sub" / "long.py").write_text("word = 'a long text which the reranker likes best of all'")
    (code / "sub" / "short.md").write_text("word")
    (code / f"{SCRIPT.replace('/', '')}.bin").write_bytes(b"\0")


@contextmanager
def served(fake: FakeGateway, room: Path) -> Iterator[str]:
    """The URL of the page."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"gateway": fake.url, "model": "minilm", "reranker": "reranker", "data": room / "data", "port": port}
    command = [sys.executable, "-m", "examples.code_search", *(f"--{name}={value}" for name, value in options.items())]
    with open(room / "page.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield answering(f"http://127.0.0.1:{port}/", lambda: process.poll() is None, room / "page.log")
        finally:
            process.terminate()


def answering(url: str, lives: Callable[[], bool], log: Path) -> str:
    for _ in range(2000):
        try:
            requests.get(url, timeout=10)
            return url
        except requests.RequestException:
            assert lives(), log.read_text()
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer: {log.read_text()}")


def main(room: Path) -> None:
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser_path, "a browser is needed: make browser installs it, as make test does"
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    fake = FakeGateway()
    written(room / "code")
    with served(fake, room) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=arguments)
        print(json.dumps(dict(story(Reader(browser.new_page(), url), fake, room / "code"))))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
