"""Connections to replicas: which are kept for the next call."""

from typing import Any

from appliance.core.routing import Replica
from appliance.multiplexer.connection_pool import ConnectionPool

OLD, NEW = (Replica("one", 0, f"127.0.0.1:{port}", "m", launch, 64) for port, launch in ((1, 1), (2, 2)))


class Line:
    """A connection on which another call may be made."""

    idle, closed = True, False

    def fresh(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def test_what_a_call_of_a_replica_that_is_gone_gives_back_is_closed() -> None:
    """64 of each replaced launch stayed open, until the table changed again."""
    made = list[Line]()

    def connect(replica: Replica) -> Any:
        made.append(Line())
        return made[-1]

    pool = ConnectionPool(connect, lambda replica, connection: True)
    pool.release(OLD, pool.acquire(OLD))
    before = pool.acquire(OLD)
    pool.keep_only({NEW})
    assert [line.closed for line in made] == [False]
    pool.release(OLD, before)
    assert [line.closed for line in made] == [True]
    assert not pool.idle[OLD]
    assert OLD not in pool.busy
    after = pool.acquire(NEW)
    pool.release(NEW, after)
    assert pool.acquire(NEW) is after
