"""Fetches images by URL for callers of the gateway, who must not reach anything else through us.

Only hosts of the setting `image_url_hosts` are asked, over http or https. Every address that a name has must be public,
and the connection goes to an address that was looked at: a name that changes meanwhile (DNS rebinding) changes nothing.
Each redirect is a new URL and passes the same checks. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from appliance.core.preprocessing import LARGEST_IMAGE
from appliance.core.problems import Kind, Problem, quoted

DEADLINE_SECS, CONNECT_SECS = 10.0, 3.0  # of the whole fetch, redirects included
MOST_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
REDIRECTS = (301, 302, 303, 307, 308)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def refused(url: str, why: str) -> Problem:
    return Problem(Kind.INVALID, "IMAGE_URL", f"The image {quoted(url)} is not fetched: {why}")


class Place(NamedTuple):
    """Where a URL leads: its parts, its host as it was named, its port."""

    parts: SplitResult
    host: str
    port: int


class ImageFetcher:
    """hosts: of which images may be fetched, each with its port where that is not 80 or 443; none: off.

    resolve(host, port): its addresses; is_permitted: whether an address may be asked; deadline_secs: of a fetch, its
    redirects included. Tests have others.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        resolve: Callable[[str, int], list[str]] | None = None,
        is_permitted: Callable[[Address], bool] | None = None,
        deadline_secs: float = DEADLINE_SECS,
    ) -> None:
        self.hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self.resolve = resolve or addresses_of
        self.is_permitted = is_permitted or is_public
        self.deadline_secs = deadline_secs

    def fetch(self, url: str, until: float | None = None) -> bytes:
        """until: of time.monotonic, where several images have one deadline.

        Raises: Problem IMAGE_URL that says why there is no image.
        """
        until = until or time.monotonic() + self.deadline_secs
        for _ in range(MOST_REDIRECTS + 1):
            place = self.place(url)
            content, moved = self.answer(url, place, self.address(url, place), until)
            if moved is None:
                return content
            try:
                url = urljoin(url, moved)
            except ValueError as error:
                raise refused(url, f"it redirects to what is no URL ({error})") from None
        raise refused(url, f"it is the end of more than {MOST_REDIRECTS} redirects")

    def place(self, url: str) -> Place:
        """Raises: Problem for a URL that is not of a listed host."""
        if not self.hosts:
            raise refused(url, "URLs of images are off (setting image_url_hosts); send its bytes as base64")
        if not url.isascii() or any(letter <= " " or letter in '\\"<>^`{|}' for letter in url):
            raise refused(url, "it has letters that no URL has")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise refused(url, str(error)) from None
        if parts.scheme not in PORTS:
            raise refused(url, "only http and https are fetched")
        if not host or parts.username is not None or parts.password is not None:
            raise refused(url, "it has no host, or a user")
        own = PORTS[parts.scheme]
        if not {host if port in (None, own) else "", f"{host}:{port or own}"} & self.hosts:
            raise refused(url, f"{quoted(host)} is not a host of image_url_hosts")
        return Place(parts, host, port or own)

    def address(self, url: str, place: Place) -> str:
        """One of its addresses. Raises: Problem unless all of them are public."""
        try:
            found = self.resolve(place.host, place.port)
        except OSError as error:
            raise refused(url, f"its host has no address: {error}") from None
        if not found:
            raise refused(url, "its host has no address")
        for each in found:
            if not self.is_permitted(embedded(ipaddress.ip_address(each.partition("%")[0]))):
                raise refused(url, "its host has an address that is not public")
        return found[0]

    def answer(self, url: str, place: Place, address: str, until: float) -> tuple[bytes, str | None]:
        """(the content, or where it has moved). Raises: Problem."""
        parts, deadline = place.parts, FetchDeadline(until)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = place.host if place.port == PORTS[parts.scheme] else f"{place.host}:{place.port}"
        connection = http.client.HTTPConnection(address, place.port)
        try:
            with deadline:
                connection.sock = self.connected(place, address, deadline)
                connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
                for name, value in (("Host", host), ("Accept", "image/*"), ("User-Agent", "tei-appliance")):
                    connection.putheader(name, value)
                connection.endheaders()
                response = connection.getresponse()
                if response.status in REDIRECTS and response.headers.get("Location"):
                    return b"", response.headers["Location"]
                if response.status != 200:
                    raise refused(url, f"its host answers {response.status}")
                content = response.read(LARGEST_IMAGE + 1)
        except (http.client.HTTPException, OSError, ValueError) as error:
            late = deadline.passed or isinstance(error, TimeoutError)
            why = "takes too long" if late else f"does not answer as it should: {type(error).__name__}"
            raise refused(url, f"its host {why}") from None
        finally:
            connection.close()
        if deadline.passed:  # what came is cut off
            raise refused(url, "its host takes too long")
        if len(content) > LARGEST_IMAGE:
            raise refused(url, f"it has over {LARGEST_IMAGE} bytes")
        return content, None

    def connected(self, place: Place, address: str, deadline: FetchDeadline) -> socket.socket:
        """To the address itself; the name is for the certificate alone. Raises: OSError."""
        plain = socket.create_connection((address, place.port), timeout=max(0.1, min(CONNECT_SECS, deadline.left())))
        deadline.ends(plain)
        if place.parts.scheme == "http":
            return plain
        secure = ssl.create_default_context().wrap_socket(plain, server_hostname=place.host)
        deadline.ends(secure)  # which has taken the connection over: ``plain`` has none any more
        return secure


class FetchDeadline:
    """A block that ends in time, whatever the other side sends: a timeout of a socket is one of each piece alone."""

    def __init__(self, until: float) -> None:
        self.until, self.passed = until, False
        self.timer = threading.Timer(max(0.0, self.left()), self.pass_)
        self.timer.daemon = True
        self.socket: socket.socket | None = None

    def left(self) -> float:
        return self.until - time.monotonic()

    def ends(self, connected: socket.socket) -> None:
        """This is shut down when the time is over. Raises: TimeoutError when it is already."""
        self.socket = connected
        connected.settimeout(max(0.1, self.left()))
        if self.passed:
            raise TimeoutError

    def pass_(self) -> None:
        self.passed = True
        with suppress(OSError):
            if self.socket:
                # The method of a socket with TLS would also forget its encryption, while another thread reads from it.
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()


def addresses_of(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does: it is what is reached in the end."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    if inner is None and (address in NAT64 or int(address) >> 32 == 0):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inner or address


def is_public(address: Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
