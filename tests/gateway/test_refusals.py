"""How a failed call to the multiplexer becomes a refusal: by its code, its status, or the words of TEI and grpc."""

import grpc
import pytest

from appliance.gateway.refusals import RETRY_UNKNOWN_MS, Reason, refusal_from_rpc
from appliance.wire.envelope import CODE_KEY, RETRY_KEY, ROW_KEY

STATUS = grpc.StatusCode


class Failed(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, details: str, **trailing: str) -> None:
        self.status, self.words, self.trailing = status, details, tuple(trailing.items())

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.words

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.trailing


@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [
        (STATUS.INVALID_ARGUMENT, "Input validation error: too long", Reason.VALIDATION),
        (STATUS.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty", Reason.EMPTY),
        (STATUS.FAILED_PRECONDITION, "Backend error: no", Reason.BACKEND),
        (STATUS.FAILED_PRECONDITION, "Tokenizer error: unknown id", Reason.TOKENIZER),
        (STATUS.UNIMPLEMENTED, "model is not a classifier", Reason.BACKEND),
        (STATUS.RESOURCE_EXHAUSTED, "Model is overloaded", Reason.OVERLOADED),
        (STATUS.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5 vs. 4)", Reason.LARGE),
        (STATUS.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (5 vs. 4)", Reason.INTERNAL),
        (STATUS.OUT_OF_RANGE, "message length too large", Reason.LARGE),
        (STATUS.DEADLINE_EXCEEDED, "late", Reason.TIMEOUT),
        (STATUS.DATA_LOSS, "lost", Reason.INTERNAL),
    ],
)
def test_a_failure_without_a_code_is_known_by_its_status_and_words(
    status: grpc.StatusCode, words: str, reason: Reason
) -> None:
    assert refusal_from_rpc(Failed(status, words)).reason is reason


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (STATUS.RESOURCE_EXHAUSTED, "TOO_LARGE", Reason.LARGE),
        (STATUS.FAILED_PRECONDITION, "NOT_RUNNING", Reason.UNAVAILABLE),
        (STATUS.ALREADY_EXISTS, "REPLACED", Reason.UNAVAILABLE),
        (STATUS.INVALID_ARGUMENT, "VALIDATION_ERROR", Reason.VALIDATION),
    ],
)
def test_a_code_counts_and_the_words_beside_it_do_not(status: grpc.StatusCode, code: str, reason: Reason) -> None:
    refusal = refusal_from_rpc(Failed(status, "it cannot be empty, nor larger than max", **{CODE_KEY: code}), 3, 0)
    assert (refusal.reason, refusal.code) == (reason, code)
    assert "(input" not in refusal.message


def test_the_row_of_the_trailing_metadata_is_counted_from_the_calls_first_input() -> None:
    error = Failed(STATUS.INVALID_ARGUMENT, "Row 2: Input validation error: too long", **{ROW_KEY: "2"})
    assert refusal_from_rpc(error, offset=10).message == "Input validation error: too long (input 12)"


@pytest.mark.parametrize(("trailing", "expected"), [({RETRY_KEY: "40"}, 40), ({}, RETRY_UNKNOWN_MS)])
def test_want_of_room_says_when_to_try_again(trailing: dict[str, str], expected: int) -> None:
    assert refusal_from_rpc(Failed(STATUS.RESOURCE_EXHAUSTED, "full", **trailing)).retry_after_ms == expected
    assert refusal_from_rpc(Failed(STATUS.INVALID_ARGUMENT, "wrong", **trailing)).retry_after_ms is None
