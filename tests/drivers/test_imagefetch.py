"""Images by URL: only of listed hosts, only from public addresses, also behind redirects and changing names."""

import http.server
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.core.problems import Problem
from appliance.drivers import imagefetch
from appliance.drivers.imagefetch import ImageFetcher
from testing.certificates import Authority

PUBLIC = "93.184.215.14"


class Site(http.server.BaseHTTPRequestHandler):
    """Answers by the path: /image, /moved/N (N more redirects), /to?URL, /status/N, /large, /slow."""

    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        type(self).seen.append({"path": self.path, "host": self.headers["Host"], **dict(self.headers)})
        if self.path.startswith("/to?"):
            return self.move(self.path.partition("?")[2])
        if self.path.startswith("/moved/"):
            left = int(self.path.rpartition("/")[2])
            return self.move(f"/moved/{left - 1}" if left > 1 else "/image")
        if self.path.startswith("/status/"):
            return self.send(int(self.path.rpartition("/")[2]), b"")
        if self.path == "/large":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 2**20)
            except OSError:
                return None
        if self.path == "/dripping":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            except OSError:
                pass
            return None
        if self.path == "/slow":
            time.sleep(3)
            return None  # nobody is there any more
        return self.send(200, b"the image")

    def move(self, url: str) -> None:
        self.send_response(302)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Any]:
    Site.seen = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def secure_site(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same over https, with a certificate that this process trusts."""
    authority = Authority(tmp_path, "of images")
    issued = authority.issue("images.test", ["DNS:images.test"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.chain, issued.key_path)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.pem))
    return site


def local(site: Any, *more: str, deadline_secs: float = 10) -> ImageFetcher:
    """One that may ask this machine: in its tests the listed host is here."""
    port = site.server_port
    hosts = [f"images.test:{port}", *more]
    return ImageFetcher(hosts, lambda host, _: ["127.0.0.1"], lambda address: address.is_loopback, deadline_secs)


def test_a_listed_host_is_asked_by_its_name(site: Any) -> None:
    where = f"http://images.test:{site.server_port}"
    assert local(site).fetch(f"{where}/image?size=2") == b"the image"
    (seen,) = Site.seen
    assert (seen["path"], seen["host"]) == ("/image?size=2", f"images.test:{site.server_port}")
    assert not {"Authorization", "Cookie"} & set(seen)


def test_redirects_are_followed_three_times(site: Any) -> None:
    where = f"http://images.test:{site.server_port}/moved"
    assert local(site).fetch(f"{where}/3") == b"the image"
    with pytest.raises(Problem, match="more than 3 redirects"):
        local(site).fetch(f"{where}/4")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://other.test/image", "not a host of image_url_hosts"),
        ("http://127.0.0.1/image", "not a host of image_url_hosts"),
        ("file:///etc/passwd", "only http and https"),
        ("gopher://images.test/", "only http and https"),
        ("http://user@images.test/", "a user"),
        ("http://[bad/", "no URL"),
        ("//169.254.169.254/latest/meta-data", "not a host of image_url_hosts"),
        ("http://inner.test/image", "an address that is not public"),
    ],
)
def test_a_redirect_passes_the_same_checks(site: Any, target: str, words: str) -> None:
    fetcher = local(site, "inner.test")
    fetcher.resolve = lambda host, _: ["10.0.0.1" if host == "inner.test" else "127.0.0.1"]
    with pytest.raises(Problem, match=words):
        fetcher.fetch(f"http://images.test:{site.server_port}/to?{target}")
    assert len(Site.seen) == 1


def test_a_name_that_changes_between_look_and_call_changes_nothing(site: Any) -> None:
    """DNS rebinding: the name is resolved once for each request, and the connection goes to what was looked at."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    fetcher = local(site)
    fetcher.resolve = lambda host, _: next(answers)
    assert fetcher.fetch(f"http://images.test:{site.server_port}/image") == b"the image"
    assert next(answers) == ["10.0.0.1"]  # it was asked once


@pytest.mark.parametrize(
    ("path", "words"),
    [("status/404", "answers 404"), ("status/204", "answers 204"), ("large", "over 20971520 bytes")],
)
def test_what_is_no_image_is_refused(site: Any, path: str, words: str) -> None:
    with pytest.raises(Problem, match=words):
        local(site).fetch(f"http://images.test:{site.server_port}/{path}")


@pytest.mark.parametrize("path", ["slow", "dripping"])
def test_a_slow_host_is_given_up(site: Any, path: str) -> None:
    """Also one that sends a byte now and then: each would begin a socket's timeout anew."""
    began = time.monotonic()
    with pytest.raises(Problem, match="its host takes too long"):
        local(site, deadline_secs=0.5).fetch(f"http://images.test:{site.server_port}/{path}")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("path", ["slow", "dripping"])
def test_a_slow_host_with_tls_is_given_up(secure_site: Any, path: str) -> None:
    where = f"https://images.test:{secure_site.server_port}"
    assert local(secure_site).fetch(f"{where}/image") == b"the image"
    began = time.monotonic()
    with pytest.raises(Problem, match="its host takes too long"):
        local(secure_site, deadline_secs=0.5).fetch(f"{where}/{path}")
    assert time.monotonic() - began < 2


def test_a_host_that_does_not_begin_tls_is_given_up(site: Any) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    site.server_port = silent.getsockname()[1]
    began = time.monotonic()
    with silent, pytest.raises(Problem, match="its host takes too long"):
        local(site, deadline_secs=0.5).fetch(f"https://images.test:{site.server_port}/image")
    assert time.monotonic() - began < 2


def test_several_images_have_one_deadline(site: Any) -> None:
    with pytest.raises(Problem, match="its host"):
        local(site).fetch(f"http://images.test:{site.server_port}/slow", until=time.monotonic() + 0.3)


def test_nobody_listens(site: Any) -> None:
    port = site.server_port
    site.shutdown()
    site.server_close()
    with pytest.raises(Problem, match="does not answer as it should"):
        local(site).fetch(f"http://images.test:{port}/image")


# What a caller may try, the addresses that the name has, and the words of the refusal. Nothing of this opens a socket.
ATTEMPTS: tuple[tuple[str, list[str], str], ...] = (
    ("http://images.test/a", ["127.0.0.1"], "not public"),
    ("http://images.test/a", ["127.8.9.10"], "not public"),
    ("http://images.test/a", ["10.1.2.3"], "not public"),
    ("http://images.test/a", ["172.16.0.1"], "not public"),
    ("http://images.test/a", ["192.168.1.1"], "not public"),
    ("http://images.test/a", ["169.254.169.254"], "not public"),
    ("http://images.test/a", ["100.64.0.1"], "not public"),
    ("http://images.test/a", ["0.0.0.0"], "not public"),
    ("http://images.test/a", ["255.255.255.255"], "not public"),
    ("http://images.test/a", ["224.0.0.1"], "not public"),
    ("http://images.test/a", ["240.0.0.1"], "not public"),
    ("http://images.test/a", ["192.0.2.1"], "not public"),
    ("http://images.test/a", ["::1"], "not public"),
    ("http://images.test/a", ["::"], "not public"),
    ("http://images.test/a", ["fe80::1%eth0"], "not public"),
    ("http://images.test/a", ["fc00::1"], "not public"),
    ("http://images.test/a", ["ff02::1"], "not public"),
    ("http://images.test/a", ["::ffff:127.0.0.1"], "not public"),
    ("http://images.test/a", ["::ffff:10.0.0.1"], "not public"),
    ("http://images.test/a", ["::127.0.0.1"], "not public"),
    ("http://images.test/a", ["64:ff9b::7f00:1"], "not public"),
    ("http://images.test/a", ["2002:7f00:1::"], "not public"),
    ("http://images.test/a", [PUBLIC, "10.0.0.1"], "not public"),
    ("http://images.test/a", [], "no address"),
    ("http://127.0.0.1/a", [PUBLIC], "not a host"),
    ("http://2130706433/a", [PUBLIC], "not a host"),
    ("http://0x7f.1/a", [PUBLIC], "not a host"),
    ("http://[::1]/a", [PUBLIC], "not a host"),
    ("http://localhost/a", [PUBLIC], "not a host"),
    ("http://images.test.evil.test/a", [PUBLIC], "not a host"),
    ("http://evil.test/images.test", [PUBLIC], "not a host"),
    ("http://images.test:8080/a", [PUBLIC], "not a host"),
    ("http://images.test@evil.test/a", [PUBLIC], "a user"),
    ("http://evil.test#@images.test/", [PUBLIC], "not a host"),
    ("http://evil.test\\@images.test/", [PUBLIC], "letters that no URL has"),
    ("http://images.test/a b", [PUBLIC], "letters that no URL has"),
    ("http://images.test/\r\nHost: evil", [PUBLIC], "letters that no URL has"),
    ("http://\u0131mages.test/a", [PUBLIC], "letters that no URL has"),
    ("ftp://images.test/a", [PUBLIC], "only http and https"),
    ("file:///etc/passwd", [PUBLIC], "only http and https"),
    ("http:///a", [PUBLIC], "no host"),
    ("http://images.test:99999/a", [PUBLIC], "ort"),
    ("http://[::1/a", [PUBLIC], "Invalid IPv6"),
)


class Unable(ImageFetcher):
    """One that fails when it is about to ask."""

    def pool(self, place: Any, address: str) -> Any:
        raise AssertionError(f"{place} was asked at {address}")


@pytest.mark.parametrize(("url", "addresses", "words"), ATTEMPTS)
def test_nothing_else_can_be_reached(url: str, addresses: list[str], words: str) -> None:
    fetcher = Unable(["images.test"], lambda host, port: addresses)
    with pytest.raises(Problem, match=words) as refusal:
        fetcher.fetch(url)
    assert refusal.value.code == "IMAGE_URL"


def test_there_are_thirty_attempts_and_public_addresses_pass() -> None:
    assert len(ATTEMPTS) >= 30
    for address in (PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert imagefetch.is_public(imagefetch.embedded(ipaddress.ip_address(address)))


def test_without_listed_hosts_it_is_off() -> None:
    with pytest.raises(Problem, match=r"off \(setting image_url_hosts\)"):
        ImageFetcher([]).fetch("http://images.test/a")
