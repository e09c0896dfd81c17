"""What a request has cost, as far as the fields of a reply can hold it."""

from appliance.engine.answers import Pending
from appliance.engine.worker import TextJob


def test_more_characters_than_the_field_holds_are_the_most_that_it_holds() -> None:
    """A long query is counted with each text that it ranks: the call ended as UNKNOWN when all was computed."""
    pending = Pending("predict", lambda rows, metadata: metadata, characters=2**32 + 5)
    pending.jobs.append(TextJob([1, 2], lambda row, _: row))
    pending.jobs[0].outcome.set_result(1)
    pending.reply()
    assert pending.times.compute_chars == 2**32 - 1
