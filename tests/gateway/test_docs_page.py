"""The page of `/docs`: it has the console's colours, and everything that it is made of is served."""

import re
from pathlib import Path

from appliance.gateway import docs

CONSOLE = Path(docs.__file__).parents[1] / "control" / "console" / "static" / "console.css"


def colours(css: str) -> str:
    """The part that names them, for light and for dark."""
    return css[css.index(":root {") : css.index("* { box-sizing")]


def test_it_has_the_colours_of_the_console() -> None:
    assert colours(docs.content("page.css").decode()) == colours(CONSOLE.read_text())


def test_what_it_asks_for_is_served_and_nothing_else_is_there() -> None:
    page = docs.content("index.html").decode()
    assert set(re.findall(r'"docs/([^"]+)"', page)) == set(docs.FILES)
    assert {path.name for path in docs.FOLDER.iterdir()} == {"index.html", *docs.FILES}
    assert not re.search(r"<script>|<style|\bon[a-z]+=|style=", page), "the policy would not run it"
