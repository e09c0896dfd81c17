"""The counters of several processes: what they tell together, from when on, and of which instances."""

import errno
from collections.abc import Collection
from pathlib import Path

import pytest
from filelock import FileLock
from prometheus_client.parser import text_string_to_metric_families

from appliance.core.events import Cause, Event
from appliance.drivers.metrics import merged, totals
from testing.children import run

pytestmark = pytest.mark.processes

Samples = dict[tuple[str, ...], float]


def exported(folder: Path, instances: Collection[str] | None) -> Samples:
    """(name without prefix, label values in the order of their labels) -> value"""
    return {
        (sample.name.removeprefix("tei_manager_"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(merged(folder, instances))
        for sample in family.samples
    }


def names_of(samples: Samples, instance: str) -> set[str]:
    return {name for name, *labels in samples if instance in labels}


def test_events_restarts_and_failures_are_told_before_the_first_one(tmp_path: Path) -> None:
    run("begin", tmp_path, "control")
    run("begin", tmp_path, "monitor", "a")
    samples = exported(tmp_path, ["a"])
    assert {key: value for key, value in samples.items() if key[0] == "events_total"} == {
        ("events_total", event): 0 for event in Event
    }
    assert {key: value for key, value in samples.items() if "a" in key} == {
        ("health_check_failures_total", "a"): 0,
        ("instance_sleeps_total", "a"): 0,
        ("instance_wakes_total", "a"): 0,
        **{("instance_restarts_total", "a", cause): 0 for cause in Cause},
    }


def test_what_several_processes_count_adds_up_and_goes_on_after_their_restart(tmp_path: Path) -> None:
    for program in ("control", "monitor", "monitor"):
        run("count", tmp_path, program, "a")
    run("begin", tmp_path, "monitor", "a")
    samples = exported(tmp_path, ["a"])
    assert samples["events_total", "died"] == 3
    assert samples["events_total", "quarantined"] == 0
    assert samples["instance_restarts_total", "a", "crash"] == 3
    assert samples["grpc_requests_total", "OK", "a", "Embed"] == 3


def test_a_disk_that_takes_no_lock_has_its_page_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that became read-only was a 500."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run("count", tmp_path, "monitor", "a")
    (tmp_path / "gauge_all_monitor-0.db").touch()
    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert exported(tmp_path, ["a"])["events_total", "died"] == 1


def test_on_a_full_disk_new_series_are_left_out_until_there_is_room(small_disk: Path) -> None:
    """The library's file would be mapped beyond what the disk has, and the first write there ended the process, as did
    the same at each start after it."""
    run("count_on_a_full_disk", small_disk)
    samples = exported(small_disk, None)
    durations = {key: value for key, value in samples.items() if key[0] == "grpc_request_duration_seconds_count"}
    counted = sum("n599" not in key for key in durations)
    print(f"{counted} of 599 instances found room")
    assert 200 < counted < 599
    assert [value for key, value in durations.items() if "n599" in key] == [2.0]
    run("count", small_disk, "test", "a")
    assert exported(small_disk, None)["grpc_requests_total", "OK", "a", "Embed"] == 1


@pytest.mark.parametrize("left", [0, 3, 8192])
def test_what_a_disk_without_room_left_of_a_file_hides_nothing_of_the_others(tmp_path: Path, left: int) -> None:
    """A program that started there left an empty file, and no metrics of anybody were told any more."""
    run("count", tmp_path, "control", "a")
    run("count", tmp_path, "monitor", "a")
    for path in tmp_path.glob("*_monitor-0.db"):
        with path.open("r+b") as file:
            file.write((100_000).to_bytes(4, "little"))
            file.truncate(left)
    assert exported(tmp_path, None)["grpc_requests_total", "OK", "a", "Embed"] == 1
    assert totals(tmp_path, "cache_") == {}


def test_of_an_instance_that_is_gone_only_its_history_is_told(tmp_path: Path) -> None:
    run("count", tmp_path, "control", "a", "gone", "")
    everything, samples = exported(tmp_path, None), exported(tmp_path, ["a"])
    history = {"instances_created_total", "instances_deleted_total"}
    assert names_of(samples, "gone") == history
    assert names_of(samples, "a") == names_of(everything, "a") == names_of(everything, "gone")
    assert names_of(samples, "a") > history
    assert names_of(samples, "") == {
        "grpc_requests_total",
        "grpc_request_duration_seconds_bucket",
        "grpc_request_duration_seconds_sum",
        "grpc_request_duration_seconds_count",
    }
    assert samples["events_total", "died"] == 2  # events have no instance
    assert not names_of(exported(tmp_path, []), "a") - history
