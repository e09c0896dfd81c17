"""Who comes in to the console, with what, and what is refused: keys, sessions, forged forms, other machines, roles."""

import gzip
import json
import os
import re
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from falcon.testing import Result, simulate_request

from appliance.control.app import create_app
from appliance.control.console.needs import NEEDS, OPEN_PATHS
from appliance.core import access
from appliance.core.access import MEETS, ROLES, Need
from appliance.core.settings import Settings
from appliance.core.state import with_instance
from appliance.node.authentication import Authenticator
from appliance.node.context import Node
from appliance.operations import keys
from testing.specs import instance, spec

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"
TOKEN = re.compile(r'X-CSRF-Token": "([0-9a-f]{64})"')


class Browser:
    """Keeps its cookie, and sends the token of the page that it was on last, as htmx does."""

    def __init__(self, app: Any, authenticator: Authenticator, peer: str = HERE, host: str = "localhost") -> None:
        self.app, self.authenticator, self.peer, self.host = app, authenticator, peer, host
        self.name = self.cookie = self.token = ""

    def get(self, path: str, **headers: str) -> Result:
        result = self.send("GET", path, headers)
        if "html" in result.headers.get("content-type", "") and (found := TOKEN.search(result.text)):
            self.token = found[1]
        return result

    def post(self, path: str, token: str | None = None, headers: Any = None, **fields: str) -> Result:
        sent = {"HX-Request": "true", "X-CSRF-Token": self.token if token is None else token, **(headers or {})}
        return self.send("POST", path, sent, params=fields, params_csv=False)

    def send(self, method: str, path: str, headers: dict[str, str], **options: Any) -> Result:
        self.authenticator.keys.looked_at = 0  # every request looks
        cookie = {"Cookie": f"{self.name}={self.cookie}"} if self.cookie else {}
        if method == "POST":
            body = "&".join(f"{name}={value}" for name, value in options.pop("params").items())
            options = {"body": body}
            headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        result = simulate_request(
            self.app, method, path, headers={**headers, **cookie}, remote_addr=self.peer, host=self.host, **options
        )
        if sent := result.headers.get("set-cookie"):
            ((self.name, morsel),) = SimpleCookie(sent).items()
            self.cookie = morsel.value
        return result

    def log_in(self, key: str) -> Result:
        self.get("/console/login")
        return self.post("/console/login", key=key)


class Box:
    def __init__(self, folder: Path) -> None:
        settings = Settings(data_dir=str(folder), state_file=f"{folder}/state.toml")
        self.folder = folder
        self.authenticator = Authenticator.of(settings)
        self.node = Node.at(settings)
        self.app: Any = create_app(self.node, self.authenticator)

    def browser(self, **options: str) -> Browser:
        return Browser(self.app, self.authenticator, **options)

    def key(self, role: str, name: str = "") -> str:
        made = keys.create(self.node, {"name": name or role, "role": role})
        return made["key"]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_without_keys_this_machine_comes_in_and_is_told_so(box: Box) -> None:
    page = box.browser().get("/console")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "this page is for this machine alone" in page.text
    assert box.browser().get("/", Accept="text/html,*/*").headers["location"] == "/console"
    assert box.browser().get("/").json["code"] == "NOT_FOUND", "it is no browser"


def test_a_secret_that_cannot_be_written_is_no_fault_of_the_program(box: Box) -> None:
    """On a full disk each page of the console was answered with 500."""
    (box.folder / "console.secret").mkdir()
    for page in (box.browser().get("/console"), box.browser().get("/console/login")):
        assert page.status_code == 507
        assert "STATE_WRITE_FAILED" in page.text or "free disk space" in page.text
    (box.folder / "console.secret").rmdir()
    assert box.browser().get("/console").status_code == 200


def test_a_log_of_a_gigabyte_opens_at_its_end(box: Box) -> None:
    one = instance(spec("a"))
    box.node.state.update(lambda state: with_instance(state, one))
    log = box.node.log_path(one, 0)
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(2**30)  # a hole, which is read as zeros
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d\n" % number for number in range(10_000)))
    page = box.browser().get("/console/instances/a/log").text
    assert "line 9999" in page
    assert "line 9800" in page
    assert "line 9799\n" not in page
    found = box.browser().get("/console/instances/a/log?find=line+77").text
    assert "line 7799" in found
    kept = box.browser().send("GET", "/console/instances/a/log.txt", {}).text
    assert kept.splitlines() == [f"line {number}" for number in range(5_000, 10_000)]
    assert "There is no replica 7" in box.browser().get("/console/instances/a/log?replica=7").text


def test_large_pages_are_compressed_for_those_who_can_read_that(box: Box) -> None:
    plain = box.browser().get("/console/create")
    sent = box.browser().send("GET", "/console/create", {"Accept-Encoding": "gzip, br"})
    assert (sent.headers["content-encoding"], sent.headers["vary"]) == ("gzip", "Accept-Encoding")
    page = gzip.decompress(sent.content).decode()
    assert TOKEN.sub("", page) == TOKEN.sub("", plain.text)
    assert len(sent.content) < len(page) / 3
    for headers in ({"Accept-Encoding": "gzip;q=0, br"}, {}):
        assert "content-encoding" not in box.browser().send("GET", "/console/create", headers).headers
    with_words = box.browser().send("GET", "/console/create?find=a", {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in with_words.headers, "its size would tell its token to who chooses the words"
    asked_by_page = {"Accept-Encoding": "gzip", "HX-Request": "true"}
    assert box.browser().send("GET", "/console/create?find=a", asked_by_page).headers["content-encoding"] == "gzip"
    small = box.browser().get("/console/events/table", **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in small.headers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"peer": ELSEWHERE}, "for this machine alone"),
        ({"host": "evil.example"}, "not to &#34;evil.example&#34;"),  # a name that leads here: DNS rebinding
    ],
)
def test_without_keys_nobody_else_does(box: Box, options: dict[str, str], words: str) -> None:
    refused = box.browser(**options).get("/console")
    assert refused.status_code == 403
    assert words in refused.text


def test_a_key_begins_a_session_which_ends_with_it(box: Box) -> None:
    secret = box.key("operator")
    browser = box.browser(peer=ELSEWHERE, host="gpu.example")
    assert browser.get("/console").headers["location"] == "/console/login"
    wrong = browser.log_in("tei-nonsense")
    assert (wrong.status_code, "This key is not known" in wrong.text) == (401, True)
    begun = browser.log_in(secret)
    assert (begun.status_code, begun.headers["location"]) == (303, "/console")
    for word in ("HttpOnly", "SameSite=Lax", "Path=/console", "Max-Age=43200"):
        assert word in begun.headers["set-cookie"]
    assert secret not in begun.headers["set-cookie"]
    page = browser.get("/console")
    assert (page.status_code, "operator (operator)" in page.text) == (200, True)
    keys.revoke(box.node, "operator")
    assert browser.get("/console").headers["location"] == "/console/login"
    part = browser.get("/console/fleet", **{"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-redirect"]) == (401, "/console/login"), "it would stand in the page"


def test_log_out_ends_it(box: Box) -> None:
    browser = box.browser()
    browser.log_in(box.key("admin"))
    browser.get("/console")
    ended = browser.post("/console/logout")
    assert (ended.status_code, browser.cookie) == (303, "")
    assert browser.get("/console").status_code == 303


@pytest.mark.parametrize("with_key", [False, True])
def test_a_forged_form_changes_nothing(box: Box, with_key: bool) -> None:
    browser = box.browser()
    if with_key:
        browser.log_in(box.key("admin"))
    browser.get("/console")
    other = box.browser()
    other.get("/console/login" if with_key else "/console")
    for token in ("", "0" * 64, other.token or "x"):
        refused = browser.post("/console/keys/create", token=token, name="evil", role="admin")
        assert (refused.status_code, "another session" in refused.text) == (403, True)
    crossed = browser.post("/console/keys/create", headers={"Sec-Fetch-Site": "cross-site"}, name="evil", role="admin")
    assert crossed.status_code == 403
    stranger = box.browser()  # a form of another site: the browser sends no cookie with it
    refused = stranger.post("/console/keys/create", token=browser.token, name="evil", role="admin")
    assert refused.status_code == (401 if with_key else 403)
    assert "evil" not in [key["name"] for key in keys.listed(box.node)]
    assert browser.post("/console/keys/create", name="good", role="admin").status_code == 200


def filled(path: str) -> str:
    return path.replace("{name}", "nobody").replace("{verb}", "stop").replace("{task}", "similarity")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_decides_on_the_server(box: Box, role: str) -> None:
    """Each path with each role: what it may not do is 403, whatever the page shows."""
    browser = box.browser()
    browser.log_in(box.key(role))
    browser.get("/console/playground" if role == "inference" else "/console")
    for path, need in NEEDS.items():
        if path in OPEN_PATHS:
            continue
        for answer in (browser.get(filled(path)), browser.post(filled(path), model_id="m", name="n", role="none")):
            allowed = need in MEETS[role]
            assert (answer.status_code == 403) is not allowed, (path, answer.status_code, answer.text[-300:])
    assert keys.listed(box.node) == [{"name": role, "role": role, "from": f"{box.folder}/keys.toml"}]


@pytest.mark.parametrize("role", ROLES)
def test_a_page_shows_only_what_may_be_done(box: Box, role: str) -> None:
    browser = box.browser()
    browser.log_in(box.key(role))
    page = browser.get("/console/playground" if role == "inference" else "/console").text
    shown = set(re.findall(r'<a href="(/console[a-z/]*)"', page)) & set(NEEDS)
    assert all(NEEDS[path] in MEETS[role] for path in shown)
    assert ("/console/create" in page) == (role in ("admin", "operator"))


def test_every_path_has_a_need(box: Box) -> None:
    assert all(isinstance(need, Need) for need in NEEDS.values())
    assert box.browser().get("/console/nonsense").status_code == 404


def test_every_answer_lets_nothing_else_run(box: Box) -> None:
    browser = box.browser()
    for path in ("/console", "/console/nonsense", "/console/login", "/console/static/console.js"):
        policy = browser.get(path).headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
    assert browser.get("/console").headers["cache-control"] == "no-store"


def test_files_of_the_pages_are_small_and_kept(box: Box) -> None:
    page = box.browser().get("/console").text
    total = 0
    for url in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page):
        file = box.browser().get(url, **{"Accept-Encoding": "gzip"})
        assert (file.status_code, file.headers["content-encoding"]) == (200, "gzip")
        assert "immutable" in file.headers["cache-control"]
        total += len(file.content)
    assert 10_000 < total + len(page) < 100_000
    assert box.browser().get("/console/static/../app.py").status_code == 404
    assert box.browser().get("/console/static/nothing.js").status_code == 404


def test_what_was_changed_and_refused_is_written_down(box: Box) -> None:
    browser = box.browser()
    browser.get("/console")
    browser.post("/console/keys/create", name="first", role="admin")
    browser.post(
        "/console/keys/create", name="second", role="admin"
    )  # there is a key now, and this is nobody's session
    lines = [json.loads(line) for path in box.folder.glob("audit*.jsonl") for line in path.read_text().splitlines()]
    assert sorted((each["event"], each["who"], each["status"]) for each in lines) == [
        ("POST /console/keys/create", "anonymous", 200),
        ("POST /console/keys/create", "anonymous", 401),
    ]


def test_the_rest_api_is_as_it_was(box: Box) -> None:
    assert box.browser().get("/console-ish").json["code"] == "NOT_FOUND"
    assert box.browser().get("/openapi.json").json["openapi"]
    assert not [path for path in box.browser().get("/openapi.json").json["paths"] if "console" in path]


def test_a_form_that_is_too_large_or_none_is_refused(box: Box) -> None:
    browser = box.browser()
    browser.get("/console")
    assert browser.post("/console/models/add", model_id="x" * 300_000).status_code == 413
    assert browser.post("/console/login", key="x" * 5000).status_code == 413
    for kind in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
        refused = browser.post("/console/models/add", headers={"Content-Type": kind}, model_id="m")
        assert refused.status_code == 415
    assert browser.post("/console/create/check", name="a", model_id="m", gpu_ids="9" * 5000).status_code == 200
    nothing = browser.post("/console/models/add")
    assert (nothing.status_code, "Say which model" in nothing.text) == (422, True)
    assert access.loopback(HERE)


def test_strangers_push_nobody_out_of_the_audit(box: Box) -> None:
    box.key("admin")
    stranger = box.browser(peer=ELSEWHERE)
    for path in ("/console/keys/create", "/console/login", "/console/static/x", "/console/nonsense"):
        assert stranger.post(path, key="x").status_code >= 400
    assert not (box.folder / "audit.jsonl").exists()
    turned_away = (box.folder / "audit-401.jsonl").read_text()
    assert "/console/keys/create" in turned_away
    assert "/console/login" in turned_away


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ({}, "localhost", 503),  # a program: there is no supervisord in this test
        ({}, "gpu.example", 503),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:9000"}, "localhost:9000", 503),
        ({"Sec-Fetch-Site": "cross-site"}, "localhost", 403),
        ({"Origin": "http://evil.example"}, "localhost", 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"}, "evil.example", 403),
    ],
)
def test_without_keys_rest_changes_nothing_for_a_page_of_another_site(
    box: Box, headers: dict[str, str], host: str, status: int
) -> None:
    path = "/instances/x/stop"
    asked = simulate_request(box.app, "POST", path, headers={**headers, "Host": host}, remote_addr=HERE)
    assert asked.status_code == status, asked.text


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ({}, "gpu.example", 401),  # a program, which has no certificate in this test
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://gpu.example"}, "gpu.example", 401),
        ({"Sec-Fetch-Site": "cross-site"}, "gpu.example", 403),
        ({"Sec-Fetch-Site": "same-site"}, "gpu.example", 403),
        ({"Origin": "https://evil.example"}, "gpu.example", 403),
    ],
)
def test_a_page_of_another_site_changes_nothing_with_the_browser_s_certificate(
    box: Box, headers: dict[str, str], host: str, status: int
) -> None:
    """A browser shows it unasked: where one was needed, and no key, any page could stop instances."""
    settings = box.authenticator.settings
    box.authenticator.settings = replace(settings, tls=replace(settings.tls, require_client_cert=True))
    asked = simulate_request(
        box.app, "POST", "/instances/x/stop", headers={**headers, "Host": host}, remote_addr=ELSEWHERE
    )
    assert asked.status_code == status, asked.text


def test_a_session_is_no_certificate(box: Box) -> None:
    """Where one is required, a key in the form is not enough."""
    secret = box.key("admin")
    strict = replace(box.authenticator.settings, tls=replace(box.authenticator.settings.tls, require_client_cert=True))
    box.authenticator.settings = strict
    browser = box.browser()
    assert browser.get("/console/login").status_code == 401
    assert browser.log_in(secret).status_code == 401
    assert browser.get("/console").status_code == 401
