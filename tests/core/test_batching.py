"""The plan of a batch: every text once, slices bounded, and nothing lost or blamed wrongly when slices end early."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.core.batching import LARGEST, SMALLEST, Slice, WaitingSlices, after_bad_text, after_death, plan

LENGTHS = st.lists(st.integers(0, 5000), max_size=600)
TEXTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True).map(tuple)
PLAIN = st.builds(Slice, TEXTS, avoid=st.sampled_from([None, "a:1", "b:2"]))
CAREFUL = st.builds(Slice, TEXTS, st.just(True), st.sampled_from(["a:1", "b:2"]), st.booleans())
SLICES = PLAIN | CAREFUL


@given(LENGTHS, st.integers(0, 20))
def test_the_plan_holds_every_text_once_in_bounded_slices_longest_first(lengths: list[int], replicas: int) -> None:
    slices = plan(lengths, replicas)
    planned = [text for each in slices for text in each.texts]
    assert sorted(planned) == list(range(len(lengths)))
    costs = [lengths[text] for text in planned]
    assert costs == sorted(costs, reverse=True)
    assert all(1 <= len(each.texts) <= LARGEST for each in slices)
    assert all(len(each.texts) >= SMALLEST for each in slices[:-1])
    assert not any(each.careful or each.avoid for each in slices)


@given(st.integers(2, 400), st.integers(1, 8))
def test_a_batch_large_enough_gives_every_replica_work(per_replica: int, replicas: int) -> None:
    lengths = [10] * (per_replica * replicas)
    if per_replica >= 2 * SMALLEST:
        assert len(plan(lengths, replicas)) >= replicas


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300))
def test_texts_of_equal_cost_keep_their_order(lengths: list[int]) -> None:
    order = [text for each in plan(lengths, 2) for text in each.texts]
    assert order == sorted(order, key=lambda text: (-lengths[text], text))


@given(SLICES, st.data())
def test_a_bad_text_takes_only_itself_out(cut: Slice, data: st.DataObject) -> None:
    answered = data.draw(st.integers(0, len(cut.texts) - 1))
    failed, left = after_bad_text(cut, answered)
    texts = left.texts if left else ()
    assert (*cut.texts[:answered], failed, *texts) == cut.texts
    assert left is None or (left.texts and (left.careful, left.avoid) == (cut.careful, cut.avoid))


@given(SLICES, st.booleans(), st.data())
def test_a_death_blames_only_a_text_that_was_alone_before(cut: Slice, hung: bool, data: st.DataObject) -> None:
    answered = data.draw(st.integers(0, len(cut.texts) - 1))
    blamed, left = after_death(cut, answered, "c:3", hung)
    texts = left.texts if left else ()
    if cut.careful and (hung or (cut.suspect and not answered)):
        assert (*cut.texts[:answered], blamed, *texts) == cut.texts
        assert left is None or not left.suspect
    else:
        assert blamed is None
        assert (*cut.texts[:answered], *texts) == cut.texts
        assert left
        assert left.suspect is cut.careful
    assert left is None or (left.texts and left.careful and left.avoid == "c:3")


def test_a_text_is_blamed_at_the_third_death_in_a_row_and_another_one_clears_it() -> None:
    cut: Slice | None = Slice((7, 8, 9))
    blamed = []
    for answered in (0, 0, 1, 0):  # 7 is there at two deaths and is answered then; 8 is there at two more
        assert cut
        text, cut = after_death(cut, answered, "c:3")
        blamed.append(text)
    assert blamed == [None, None, None, 8]
    assert cut == Slice((9,), careful=True, avoid="c:3")


@given(SLICES)
def test_a_death_behind_the_last_answer_blames_no_text_and_leaves_none(cut: Slice) -> None:
    """The replica has answered every text and goes away before it says how the stream ended."""
    assert after_death(cut, len(cut.texts), "c:3") == (None, None)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 500), max_size=300), st.integers(1, 4), st.integers(0, 2**32), st.sets(st.integers(0, 299))
)
def test_any_order_of_deaths_and_bad_texts_answers_or_fails_every_text_exactly_once(
    lengths: list[int], replicas: int, seed: int, bad: set[int]
) -> None:
    choice = random.Random(seed)
    pending = plan(lengths, replicas)
    answered: list[int] = []
    failed: list[int] = []
    while pending:
        cut = pending.pop(choice.randrange(len(pending)))
        good = next((at for at, text in enumerate(cut.texts) if text in bad), len(cut.texts))
        stop = choice.randint(0, good)
        answered += cut.texts[:stop]
        if stop == len(cut.texts):
            continue
        if stop == good and choice.random() < 0.5:
            blamed: int | None
            blamed, left = after_bad_text(cut, stop)
        else:
            blamed, left = after_death(cut, stop, f"r:{choice.randrange(replicas)}")
        failed += [] if blamed is None else [blamed]
        pending += [left] if left else []
    assert sorted(answered + failed) == list(range(len(lengths)))


@given(st.lists(SLICES, max_size=20), st.lists(SLICES, max_size=20), st.data())
def test_every_waiting_slice_with_a_history_is_a_candidate_and_of_the_others_one(
    first: list[Slice], later: list[Slice], data: st.DataObject
) -> None:
    waiting = WaitingSlices([each for each in first if not (each.careful or each.avoid)])
    for each in later:
        waiting.put_back(each)
    left = [*waiting.mended, *waiting.plain]
    while found := list(waiting.candidates()):
        assert len(waiting) == len(left)
        assert waiting.text_count == sum(len(each.texts) for each in left)
        histories = [each for each in left if each.careful or each.avoid]
        assert found[: len(histories)] == histories
        assert len(found) <= len(histories) + 1
        taken = data.draw(st.sampled_from(found))
        waiting.remove(taken)
        left.remove(taken)
    assert not left
