"""Busy or hung, as data: what was told, and what is made of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import busy
from appliance.core.busy import Running, Work
from appliance.core.health import DEADLINE_SECS, NEXT_DEADLINE_SECS, ProbeResult

B, M = ProbeResult.BUSY, ProbeResult.MISSED
SHORT, LONG = 0.0001, 0.0006  # seconds a token, measured in texts of 100 and of 8,192 tokens (384 wide, 2 cores)

# -- the embedded engine, which tells what is in progress -----------------------------------------------------------


def engine(secs: float, tokens: float, answered: float = 10, token_secs: float | None = SHORT) -> Work:
    return Work(answered=answered, token_secs=token_secs, running=Running(secs, tokens))


ENGINE: dict[str, tuple[Work, ProbeResult]] = {
    "nothing in progress": (engine(0, 0), M),
    "the probe's own batch, for as long as the probe waited": (engine(DEADLINE_SECS, 3), M),
    "the same at the shorter deadline": (engine(NEXT_DEADLINE_SECS, 3), M),
    "a full batch of short texts": (engine(DEADLINE_SECS, 384), M),
    "a short batch that has just begun": (engine(0.3, 384), B),
    "a long text, as measured": (engine(8192 * LONG, 8192), B),
    "three at once, as measured": (engine(19.5, 3 * 8192), B),
    "a long text on a slow machine": (engine(60, 8192), B),
    "a long text for much too long": (engine(90, 8192), M),
    "a long text of a large model": (engine(190, 8192, token_secs=0.01), B),
    "whatever it is, five minutes are the end": (engine(301, 8192, token_secs=0.01), M),
    "a long text before anything was measured": (engine(60, 8192, token_secs=None), B),
    "on a GPU a long text that takes 9 s hangs": (engine(9, 8192, token_secs=0.00001), M),
}


@pytest.mark.parametrize("name", ENGINE)
def test_what_an_engine_computes(name: str) -> None:
    now, wanted = ENGINE[name]
    outcome, why = busy.late(engine(0, 0), now, Work(), own=1, silent_secs=0)
    assert outcome is wanted
    assert bool(why) == (wanted is M and now.running != (0, 0))


def test_an_answer_to_anybody_is_busy_and_the_reason_of_a_miss_names_the_numbers() -> None:
    hung = engine(400, 8192)
    assert busy.late(replace(hung, answered=9), hung, Work(), 1, 0) == (B, "")
    outcome, why = busy.late(hung, hung, Work(), 1, 0)
    assert outcome is M
    assert why == "8192 tokens in progress for 400.0 s, at most 73.7 s expected"
    assert busy.late(None, hung, Work(), 1, 0)[0] is M


# -- TEI, of which it is inferred -------------------------------------------------------------------------------------


def made(*batches: int) -> dict[float, float]:
    """te_batch_next_tokens after these batches: TEI's bounds, cumulated."""
    bounds = [float(2**power) for power in range(21)] + [float("inf")]
    return {bound: float(sum(tokens <= bound for tokens in batches)) for bound in bounds}


# Told before a probe that was answered: 100 texts begun, and that probe. One has no end: its caller left.
CALM = Work(answered=99, begun=101, ended=99, batches=made(*[8192] * 3, *[300] * 97, 3), token_secs=SHORT)


def tei(begun: int, ended: int, *batches: int) -> Work:
    """Texts begun and ended, and batches made, since the probe of `CALM`; newer probes are among the begun."""
    counts = {bound: count + CALM.batches[bound] for bound, count in made(3, *batches).items()}
    return replace(CALM, answered=100 + ended, begun=101 + begun, ended=100 + ended, batches=counts)


def told_all(now: Work) -> Work:
    """The same with no text whose end was never told."""
    return replace(now, ended=now.ended + 1)


TEI: dict[str, tuple[Work, int, float, ProbeResult]] = {  # told, own probes without an answer, silent for, outcome
    "only our own probe": (tei(1, 0, 3), 1, 5, M),
    "only our own probes": (tei(3, 0, 3), 3, 11, M),
    "a long text": (tei(2, 0, 8192), 1, 5, B),
    "a long text, still": (tei(8, 0, 8192), 7, 60, B),
    "a long text, for much too long": (tei(30, 0, 8192), 29, 200, M),
    "short texts": (tei(40, 0, 300, 300), 1, 5, M),
    "short texts after a long one that was answered": (tei(40, 1, 8192, 300), 1, 5, B),
    "a long text that was answered, and only our probe since": (told_all(tei(2, 1, 8192, 3)), 1, 5, M),
    "the same, and a text whose end was never told": (tei(2, 1, 8192, 3), 1, 5, B),  # one may be in progress
    "the same, silent for longer than any long text": (tei(20, 1, 8192, 3), 19, 120, M),
    "a text that is in no batch": (tei(2, 0), 1, 5, M),
}


@pytest.mark.parametrize("name", TEI)
def test_what_tei_computes(name: str) -> None:
    now, own, silent_secs, wanted = TEI[name]
    outcome, _ = busy.late(now, now, CALM, own, silent_secs)
    assert outcome is wanted


def test_a_batch_in_progress_does_not_make_tokens_look_cheap() -> None:
    now = replace(tei(2, 0, 8192), token_secs=SHORT / 10)
    assert busy.late(now, now, CALM, 1, 60)[0] is B
    assert busy.late(now, now, replace(CALM, token_secs=None), 1, 60)[0] is M


def test_the_largest_batch_is_that_since_the_last_calm() -> None:
    assert busy.largest_since(tei(1, 0, 300, 17), CALM) == 512
    assert busy.largest_since(CALM, CALM) == 0
    assert busy.largest_since(CALM, Work()) == 8192  # nothing known of before: since the start


# -- laws -------------------------------------------------------------------------------------------------------------

COSTS = st.floats(0, 1, allow_subnormal=False)


@given(st.floats(0, 1e6), st.floats(0, 1e6), COSTS)
def test_what_is_allowed_is_bounded_and_grows_with_the_work(one: float, other: float, cost: float) -> None:
    less, more = sorted((one, other))
    assert busy.LEAST_SECS <= busy.allowed_secs(less, cost) <= busy.allowed_secs(more, cost) <= busy.MOST_SECS


def test_no_hang_of_short_texts_outlasts_a_probe() -> None:
    """384 tokens are the engine's largest batch of short texts; 1 ms a token is ten times what MiniLM takes."""
    assert busy.allowed_secs(384, SHORT) < NEXT_DEADLINE_SECS < DEADLINE_SECS
    assert busy.allowed_secs(3, 0.001) < NEXT_DEADLINE_SECS
