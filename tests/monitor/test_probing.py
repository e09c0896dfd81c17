"""Who listens is looked at for many probes at once, and never by what was seen before one asked."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from appliance.monitor.probing import FreshListening


def test_those_who_asked_together_get_one_table_and_nobody_an_older_one() -> None:
    listening = FreshListening()
    before = listening.current()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, asked_at = listener.getsockname()[1], time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: listening.current(asked_at), range(8)))
        assert len(set(map(id, found))) == 1
        assert not before.on_loopback(port)
        assert found[0].on_loopback(port)
    assert not listening.current().on_loopback(port)
    assert listening.current(asked_at).on_loopback(port) == [], "the newest that was read since"
