"""What a reader of the page of images sees. Run in .venv-demo; prints it as JSON.

python -m tests.examples.image_search_browser GATEWAY
"""

import json
import os
import shutil
import sys
from socket import socket
from typing import Any

from playwright.sync_api import Page, sync_playwright

from examples.image_search.__main__ import COLOURS, SHAPES, Search, build

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_MS = 60_000


def story(page: Page) -> dict[str, Any]:
    page.set_default_timeout(PATIENCE_MS)
    told: dict[str, Any] = {}
    page.locator("#words textarea, #words input").first.fill("red")
    page.locator("#search").click()
    told["nothing indexed"] = page.get_by_text("Nothing is indexed yet: press Index").first.inner_text()
    page.locator("#index").click()
    told["status"] = page.locator("#status").filter(has_text="are in the index").inner_text().strip()
    for colour in COLOURS:
        page.locator("#words textarea, #words input").first.fill(f"{colour} circle")
        page.locator("#search").click()
        captions = page.locator("#results .caption-label, #results figcaption")
        captions.first.filter(has_text=colour).wait_for()
        told[colour] = captions.all_inner_texts()
    told["images"] = page.locator("#results .grid-wrap img").count()
    return told


def main() -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    search = build(Search(sys.argv[1], "clip", ""), None)
    search.launch(server_name="127.0.0.1", server_port=port, quiet=True, ssr_mode=False, prevent_thread_lock=True)
    browser = next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        window = driver.chromium.launch(executable_path=browser, args=arguments)
        page = window.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#index").wait_for()
        told = story(page)
        window.close()
    search.close()
    print(json.dumps({**told, "shapes": len(SHAPES)}))


if __name__ == "__main__":
    main()
