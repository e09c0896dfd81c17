"""`status --watch`: rates and times between two looks; and how tables and times are written."""

import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from appliance.cli import terminal, top
from appliance.cli.top import Snapshot
from appliance.core.series import quantile

BEFORE = """
# TYPE tei_manager_texts_total counter
tei_manager_texts_total{instance="minilm",method="Embed"} 100
# TYPE tei_manager_grpc_request_duration_seconds histogram
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="0.01"} 90
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="0.1"} 100
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="+Inf"} 100
"""
NOW = """
# TYPE tei_manager_texts_total counter
tei_manager_texts_total{instance="minilm",method="Embed"} 300
tei_manager_texts_total{instance="minilm",method="EmbedArrow"} 4000
# TYPE tei_manager_queue_size gauge
tei_manager_queue_size{instance="minilm",lane="interactive"} 3
tei_manager_queue_size{instance="minilm",lane="bulk"} 4
# TYPE tei_manager_grpc_request_duration_seconds histogram
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="0.01"} 180
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="0.1"} 200
tei_manager_grpc_request_duration_seconds_bucket{instance="minilm",method="Embed",le="+Inf"} 200
"""
INSTANCE = {
    "name": "minilm",
    "status": "running",
    "replicas": 2,
    "replicas_ready": 1,
    "replica_list": [{"pid": os.getpid()}, {"pid": None}],
    "uptime_secs": 3725.9,
}


def event(name: str | None, kind: str, ago: timedelta) -> dict[str, Any]:
    return {"instance": name, "event": kind, "time": (datetime.now(UTC) - ago).isoformat()}


def test_a_row_has_what_happened_between_the_two_looks() -> None:
    before, now = Snapshot.at_page(BEFORE, 10.0), Snapshot.at_page(NOW, 12.0)
    events = [event("minilm", "ready", timedelta(hours=1)), event(None, "created", timedelta(0))]
    (row,) = top.rows([INSTANCE], [*events, event("minilm", "died", timedelta(seconds=62))], before, now)
    memory = row.pop("memory")
    assert row == {
        "name": "minilm",
        "status": "running",
        "ready": "1/2",
        "texts/s": "2,100",
        "p95": "55 ms",  # 90 of 100 calls took 10 ms at most, the 95th is half way to 100 ms
        "queue": "7",
        "up": "1 h 2 min",
        "last event": "died, 1 min ago",
    }
    assert memory.endswith(" MB")


def test_the_first_look_knows_no_rates_and_a_restarted_counter_is_no_negative_one() -> None:
    look = Snapshot.at_page(NOW, 10.0)
    (row,) = top.rows([INSTANCE], [], look, look)
    assert (row["texts/s"], row["p95"], row["queue"], row["last event"]) == (None, None, "7", None)
    (row,) = top.rows([INSTANCE], [], look, Snapshot.at_page(BEFORE, 12.0))
    assert (row["texts/s"], row["p95"]) == ("0", None)


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ({0.1: 0, 1.0: 0, float("inf"): 0}, None),
        ({}, None),
        ({0.1: 100, 1.0: 100, float("inf"): 100}, 0.095),
        ({0.1: 0, 1.0: 0, float("inf"): 10}, 1.0),  # beyond the last bound nothing is known
    ],
)
def test_quantiles_are_those_of_prometheus(counts: dict[float, float], wanted: float | None) -> None:
    assert quantile(0.95, counts) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("secs", "said"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
        (None, None),
    ],
)
def test_times_are_said_as_people_say_them(secs: float | None, said: str | None) -> None:
    assert terminal.duration(secs) == said


def test_the_last_column_gives_way_to_a_narrow_terminal() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "minilm", "model": "sentence-transformers/all-MiniLM-L6-v2"},
        {"name": "b", "model": None},
    ]
    assert terminal.table(rows, ("name", "model"), 28).splitlines() == [
        "NAME    MODEL",
        "minilm  sentence-transforme…",
        "b       -",
    ]
    assert "sentence-transformers/all-MiniLM-L6-v2" in terminal.table(rows, ("name", "model"))


def test_values_are_words_and_no_python() -> None:
    value = {"a": None, "b": True, "c": [1, 2], "d": [], "e": {"f": 0.5}}
    assert terminal.readable(value) == "a=- b=yes c=1, 2 d=- e=f=0.5"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert terminal.coloured("running") == "\x1b[32mrunning\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.coloured("running") == "running"
