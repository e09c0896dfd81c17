"""Those who wait for room keep the order in which they came, as long as they ask."""

from appliance.node.waiting_line import ABSENT_SECS, WaitingLine


def test_a_line_has_the_order_in_which_they_came_and_not_that_in_which_they_asked() -> None:
    line = WaitingLine()
    for now, (name, since) in enumerate({"c": 0.2, "a": 0.0, "b": 0.1}.items()):
        line.note(name, since, 1.0 + now / 10)
    assert line.ahead_of("c", 1.3) == ("a", "b")
    assert line.ahead_of("b", 1.3) == ("a",)
    assert line.ahead_of("a", 1.3) == line.ahead_of("unknown", 1.3) == ()
    line.leave("a")
    line.note("a", 1.4, 1.4)
    assert line.ahead_of("a", 1.4) == ("b", "c")


def test_who_does_not_say_since_when_waits_since_the_first_question() -> None:
    line = WaitingLine()
    line.note("a", None, 0.0)
    line.note("b", 1.0, 1.0)
    line.note("a", None, 2.0)
    assert (line.ahead_of("a", 2.0), line.ahead_of("b", 2.0)) == ((), ("a",))
    line.note("b", -1.0, 2.0)
    assert (line.ahead_of("a", 2.0), line.ahead_of("b", 2.0)) == (("b",), ())


def test_one_that_asks_no_more_is_passed_by_and_forgotten() -> None:
    line = WaitingLine()
    line.note("a", 0.0, 0.0)
    line.note("b", 0.1, 0.1)
    assert line.ahead_of("b", ABSENT_SECS - 0.1) == ("a",)
    assert line.ahead_of("b", ABSENT_SECS) == ()
    line.note("b", 0.1, ABSENT_SECS)
    assert list(line.waiting) == ["b"]
    line.note("a", 0.0, ABSENT_SECS + 1)
    assert line.ahead_of("b", ABSENT_SECS + 1) == ("a",), "its call still came first"
