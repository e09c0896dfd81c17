"""The console as its user meets it: a real browser before a whole appliance."""

import shutil
from typing import Any

import pytest

from testing import demo
from testing.markup import HOSTILE
from testing.running import TINY, RunningAppliance

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each step found, by its name."""
    folder = tmp_path_factory.mktemp("console")
    hostile = folder / HOSTILE
    shutil.copytree(TINY, hostile)
    with RunningAppliance(folder, seeds="", cache=True) as box:
        url = box.url.replace("127.0.0.1", "localhost")
        gateway = url.replace(str(box.api_port), str(box.http_port))
        found: Any = demo.program("testing.console_browser", url, gateway, TINY, hostile)
        logs = "\n".join(path.read_text(errors="replace") for path in (box.folder / "logs").glob("control*.log"))
        found["control"] = [line for line in logs.splitlines() if "Traceback" in line]
        found["kept"] = found["key"]["key"] in logs
    return found


def test_nothing_of_what_others_wrote_is_executed_and_nothing_is_asked_elsewhere(seen: Any) -> None:
    assert seen["wrong"] == []
    assert seen["hostile"] == {"images": 0}
    assert seen["control"] == []


def test_an_instance_is_created_and_its_form_says_what_is_wrong(seen: Any) -> None:
    assert "No instance yet" in seen["creates"]["empty"]
    assert "replicas" in seen["creates"]["wrong"]
    assert "embedded, port" in seen["creates"]["fine"]
    assert seen["creates"]["url"].endswith("/console/instances/first")
    assert '"1bad"' in seen["refused"]["name"]


def test_texts_are_compared(seen: Any) -> None:
    cells = seen["compares"]["cells"]
    assert (len(cells), [cells[0], cells[4], cells[8]], seen["compares"]["points"]) == (9, ["1.00"] * 3, 3)
    assert "/v1/embeddings" in seen["compares"]["curl"]
    assert seen["compares"]["tokens"] > 6


def test_one_finds_out_why_a_replica_died(seen: Any) -> None:
    assert "ended" in seen["why"]["died"]
    assert "Ready after" in seen["why"]["log"]


def test_an_instance_is_changed_and_what_is_not_confirmed_is_not_done(seen: Any) -> None:
    assert "at once" in seen["changes"]["at_once"]
    assert seen["changes"]["kept"] == "running"


def test_a_button_works_from_the_moment_in_which_a_look_has_brought_it(seen: Any) -> None:
    assert seen["changes"]["is_asked"]


def test_a_model_is_proved(seen: Any) -> None:
    assert "verified" in seen["proves"]["row"]


def test_the_first_key_asks_its_maker_to_log_in(seen: Any) -> None:
    assert "me (admin)" in seen["key"]["who"]
    assert seen["out"]["afterwards"] == "Log in"
    assert not seen["kept"], "the key is in a log"


def test_what_others_do_is_seen_without_asking(seen: Any) -> None:
    live = seen["live"]
    assert (live["seen"], live["is_open"], live["wrong"]) == ("stopped", True, [])
    assert live["took"] < 8, "it is told, and does not wait for its next look in ten seconds"


def test_an_instance_is_measured(seen: Any) -> None:
    assert [row.split()[0] for row in seen["measures"]["rows"]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert (seen["measures"]["points"], seen["measures"]["best"]) == (7, 1)
    assert all(row.endswith("-") for row in seen["measures"]["rows"]), "nothing failed"


def test_the_doctor_says_what_is_well_and_what_is_not(seen: Any) -> None:
    assert set(seen["doctor"]["verdicts"]) <= {"ok", "warning", "wrong"}
    assert len(seen["doctor"]["verdicts"]) > 10


def test_the_gateway_is_tried_with_a_key_that_is_typed_in(seen: Any) -> None:
    found = seen["gateway"]
    assert (found["model"], found["wrong"]) == ("first", [])
    assert '"embedding"' in found["answer"]
    assert "x-tei-instance: first" in found["answer"]
    assert "curl -X POST http://localhost:" in found["curl"]
    assert seen["key"]["key"] not in found["curl"]
    assert found["routes"] > 15
    assert {look: words for look, words in found["looks"].items() if words} == {}


def test_every_page_can_be_read_by_everybody(seen: Any) -> None:
    """Light, dark, and as narrow as a phone: axe finds nothing, and nothing is wider than the screen."""
    assert len(seen["looks"]) == 33
    assert {page: words for page, words in seen["looks"].items() if words} == {}
