"""Those who wait for room keep the order in which they came, as long as they ask."""

from appliance.node.waiting_line import ABSENT_SECS, GONE_SECS, WaitingLine


def test_a_line_has_the_order_in_which_they_came() -> None:
    line = WaitingLine()
    for now, name in enumerate("abc"):
        line.note(name, now / 10)
    line.note("a", 1.0)
    assert line.ahead_of("c", 1.0) == ("a", "b")
    assert line.ahead_of("a", 1.0) == line.ahead_of("unknown", 1.0) == ()
    line.leave("a")
    line.note("a", 1.1)
    assert line.ahead_of("a", 1.1) == ("b", "c")


def test_one_that_asks_no_more_is_passed_by_and_forgotten() -> None:
    line = WaitingLine()
    line.note("a", 0.0)
    line.note("b", 0.0)
    assert line.ahead_of("b", ABSENT_SECS - 0.1) == ("a",)
    assert line.ahead_of("b", ABSENT_SECS) == ()
    line.note("a", ABSENT_SECS)
    assert line.ahead_of("b", ABSENT_SECS) == ("a",), "it has its place again"
    line.note("b", ABSENT_SECS + GONE_SECS)
    line.note("a", ABSENT_SECS + GONE_SECS)
    assert line.ahead_of("b", ABSENT_SECS + GONE_SECS) == ()
