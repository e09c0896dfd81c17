"""When a replica counts as ready: by its line, and by the proof of who listens."""

from collections.abc import Callable

from appliance.core.routing import Replica
from appliance.drivers.tei import Backend, Observe

REPLICA = Replica("a", 0, "127.0.0.1:8080", "org/model", launch=1, capacity=1)


class Port:
    """A port as a backend sees it: whether a line to it is there, and whether the replica itself listens."""

    def __init__(self) -> None:
        self.proved = False
        self.watched = True
        self.changes: list[bool] = []
        self.backend = Backend(REPLICA, lambda: self.proved, self.change, self.watch)

    def change(self) -> None:
        self.changes.append(self.backend.ready)

    def watch(self, address: str, tell: Observe) -> Callable[[], None]:
        assert address == REPLICA.address
        self.tell = tell

        def end() -> None:
            self.watched = False

        return end


def test_a_replica_is_ready_while_its_line_is_there() -> None:
    port = Port()
    port.proved = True
    for there in (True, False, True):
        port.tell(there)
    assert port.changes == [True, False, True]


def test_a_stranger_is_looked_at_until_the_replica_has_its_port() -> None:
    port = Port()
    port.tell(True)
    port.backend.prove_again()
    assert port.changes == []
    port.proved = True
    port.backend.prove_again()
    assert port.changes == [True]


def test_what_was_found_before_the_line_was_there_is_looked_at_again() -> None:
    port = Port()
    port.proved = True
    assert port.backend.look(), "a call that follows the answer `running` of REST finds its replica"
    port.proved = False  # it ended before the line was there, which so tells nothing
    port.backend.prove_again()
    assert not port.backend.ready


def test_a_replica_that_was_cut_stays_so() -> None:
    port = Port()
    port.proved = True
    port.backend.cut()
    port.backend.prove_again()
    assert not port.backend.look()
    assert not port.watched


def test_a_stream_that_begins_after_the_cut_ends_too() -> None:
    """It was chosen a moment before."""
    port, ended = Port(), list[int]()
    with port.backend.ending_with(lambda: ended.append(1)):
        assert ended == []
        port.backend.cut()
        assert ended == [1]
    with port.backend.ending_with(lambda: ended.append(2)):
        assert ended == [1, 2]
