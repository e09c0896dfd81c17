"""Suspects: who is one, for how long, who is convicted, and when a method is given up."""

from appliance.core.suspects import CONVICTED_SECS, MOST_REMEMBERED, SUSPECTED_SECS, Standing, Suspects

ONE, TWO = b"one", b"two"


def test_nothing_is_looked_up_while_nothing_has_died() -> None:
    known = Suspects()
    assert known.clean
    assert known.standing("Embed", ONE, 0) is Standing.FREE


def test_a_suspect_is_one_until_it_is_acquitted_or_forgotten() -> None:
    known = Suspects()
    known.suspect(ONE, 0)
    known.suspect(TWO, 0)
    assert not known.clean
    assert known.standing("Embed", ONE, 1) is Standing.SUSPECT
    known.acquit(ONE)
    assert known.standing("Embed", ONE, 1) is Standing.FREE
    assert known.standing("Embed", TWO, SUSPECTED_SECS) is Standing.FREE


def test_a_convicted_call_is_refused_for_a_while() -> None:
    known = Suspects()
    known.suspect(ONE, 0)
    known.convict("Embed", ONE, 5)
    assert known.standing("Embed", ONE, 5) is Standing.CONVICTED
    assert known.standing("Embed", TWO, 5) is Standing.FREE
    assert known.standing("Embed", ONE, 5 + CONVICTED_SECS) is Standing.FREE


def test_a_method_is_given_up_after_two_requests_unless_it_has_ever_answered() -> None:
    known = Suspects()
    known.convict("EmbedAll", ONE, 0)
    known.convict("EmbedAll", ONE, 0)
    assert known.standing("EmbedAll", b"other", 0) is Standing.FREE
    known.convict("EmbedAll", TWO, 0)
    assert known.standing("EmbedAll", b"other", 0) is Standing.METHOD_REFUSED
    assert known.standing("Embed", b"other", 0) is Standing.FREE
    known.answered.add("EmbedAll")
    assert known.standing("EmbedAll", b"other", 0) is Standing.FREE


def test_what_is_remembered_is_bounded() -> None:
    known = Suspects()
    for number in range(MOST_REMEMBERED + 10):
        known.suspect(str(number).encode(), 0)
    assert len(known.suspected) == MOST_REMEMBERED
    assert known.standing("Embed", b"0", 0) is Standing.FREE
