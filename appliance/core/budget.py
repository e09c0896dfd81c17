"""How many bytes one process keeps for its callers at once, all of them together.

Theory of operation. What grows with what a caller sends is booked before it is gathered, expanded or kept, and released
when it is freed:

    what                                            books
    a request or an answer of KEPT_BYTES and more   its size, until its call has ended
    a request that is long on its way               the size of the largest message: how much is there is unknown
    a message of a stream                           its size, until it is answered
    the texts of a RerankStream                     GATHERED times their size, until the ranking is sent
    Arrow                                           READ times what it states to be when expanded, and ROW for each row
    the vectors of a batch                          ANSWERED times their size, from the first of them on
    a body of the gateway                           BODY times its size, and ITEM for each thing in it
    answers in the gateway                          some times their size (`gateway.embedding`), until they are sent

What does not fit waits for a moment, and is then refused with the time after which it may be tried again. A call that
needs more than the whole budget is admitted when all others have next to nothing, because other limits bound its size;
but what has no other limit (streams, and answers of the gateway that grow reply by reply) ends there. The factors were
measured (peak of resident memory, glibc, pyarrow 26).
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.problems import Kind, Problem

MIB = 1024 * 1024
SLOWEST_BYTES = 1024 * 1024  # a second, of a gRPC message: what may be a large one has more time
KEPT_BYTES = 256 * 1024  # less than this is not booked: a thousand calls keep a quarter of a gigabyte
READ, ROW = 6, 160
GATHERED, MESSAGE = 4, 1024  # and bytes for each message, however short
ANSWERED = 4  # as collected, in the order of the rows, as Arrow, and in the reply
BODY, ITEM = 4, 40  # as sent, as values, and in the calls that they become; a number or a string without its content
RETRY_AFTER_MS = 1000
NEXT_TO_NOTHING = 1 / 8  # of the budget


def in_mib(size: int) -> str:
    return f"{max(1, round(size / MIB))} MiB"


def over_all(size: int, limit: int) -> Problem:
    """For what has grown over the whole budget: to try again would be in vain."""
    return Problem(
        Kind.EXHAUSTED,
        "TOO_LARGE",
        f"This call needs {in_mib(size)} of memory, and memory_budget_mb allows {in_mib(limit)} for all calls "
        "together: send less at once, or raise it",
    )


@dataclass
class Budget:
    """The account of one process, in bytes. Not thread-safe: the owner locks."""

    limit: int
    used: int = 0

    def book(self, size: int, reserved: int = 0, bounded: bool = True) -> bool:
        """Book ``size`` more, if it fits; whether it did. reserved: what the same call has booked before.

        bounded: another limit than this one bounds the call. Raises: Problem for what is not, and exceeds the budget.
        """
        if not bounded and reserved + size > self.limit:
            raise over_all(reserved + size, self.limit)
        gets_all = reserved + size > self.limit and self.used - reserved <= self.limit * NEXT_TO_NOTHING
        if self.used + size > self.limit and not gets_all:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        self.used -= size

    def refusal(self, size: int) -> Problem:
        return Problem(
            Kind.EXHAUSTED,
            "OUT_OF_MEMORY",
            f"This call needs {in_mib(size)} of memory, and {in_mib(self.used)} of {in_mib(self.limit)} are in use "
            f"(memory_budget_mb): try again in {RETRY_AFTER_MS} ms, or send less at once",
            RETRY_AFTER_MS,
        )
