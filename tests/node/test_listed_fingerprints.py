"""The fingerprint of replicas that run elsewhere: theirs, where they agree on it; the listing's, where it says one."""

from typing import Any

import pytest

from appliance.core import listing
from appliance.core.listing import Listed
from appliance.node.fingerprints import known_of_listed
from appliance.wire.tei.v1.tei_pb2 import InfoResponse

COMMIT = "0123456789abcdef" * 2 + "01234567"


def listed(**fields: object) -> Listed:
    one = {"name": "a", "model_id": "org/a", "addresses": ["10.0.0.1:80"], **fields}
    return listing.parse({"instances": [one]})[0]


def info(**fields: Any) -> InfoResponse:
    return InfoResponse(**{"version": "1.9.3", "model_id": "org/a", "model_dtype": "float32", **fields})


def test_the_listing_decides_where_it_says_one() -> None:
    one, same = listed(fingerprint={"model": "1"}), listed(fingerprint={"model": "1"}, pooling="cls")
    assert known_of_listed(one, []).digest == known_of_listed(same, [info(model_sha="x")]).digest
    assert known_of_listed(one, []).digest != known_of_listed(listed(fingerprint={"model": "2"}), []).digest


def test_replicas_that_agree_have_one_of_their_revision() -> None:
    known = known_of_listed(listed(), [info(model_sha=COMMIT)] * 2)
    assert known.digest
    assert known.digest == known_of_listed(listed(max_concurrent_requests=7), [info(model_sha=COMMIT)]).digest


@pytest.mark.parametrize(
    "other", [{"model_sha": COMMIT[::-1]}, {"version": "1.9.4"}, {"model_dtype": "float16"}, {"docker_label": "sha-1"}]
)
def test_what_differs_in_them_decides(other: dict[str, str]) -> None:
    one, another = info(model_sha=COMMIT), info(**{"model_sha": COMMIT, **other})
    assert known_of_listed(listed(), [one]).digest != known_of_listed(listed(), [another]).digest
    both = known_of_listed(listed(), [one, another])
    assert both.digest is None
    assert "different" in both.why
    assert known_of_listed(listed(pooling="cls"), [one]).digest != known_of_listed(listed(), [one]).digest


def test_without_a_revision_there_is_none_and_without_an_answer_it_is_awaited() -> None:
    assert known_of_listed(listed(), [info()]).digest is None
    assert not known_of_listed(listed(), [info()]).pending
    assert known_of_listed(listed(), []).pending
    assert known_of_listed(listed(), [info(model_sha=COMMIT), None]).pending


@pytest.mark.parametrize("revision", ["main", "v1.5", COMMIT[:7]])
def test_what_can_be_another_commit_tomorrow_is_none(revision: str) -> None:
    """TEI tells as `model_sha` what it was started with."""
    assert known_of_listed(listed(), [info(model_sha=revision)]).digest is None


def test_what_a_peer_loads_is_not_known_from_its_last_connection() -> None:
    known = known_of_listed(listed(fingerprint={"model": "1"}), [info(model_sha=COMMIT)], of_peers=True)
    assert known.digest is None
    assert not known.pending
    assert "peer" in known.why
