"""Fixtures for all tests. Whole appliances are started with real processes; nothing is patched."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import values

from appliance.drivers.metrics import Meters
from testing.hub import Hub
from testing.running import RunningAppliance

# Begun first, or the worker that gets one of them last keeps all others waiting.
TESTS = Path(__file__).parent
LONG_FILES = """
operations/test_models faults/test_kills faults/test_status_truth faults/test_monitor faults/test_strangers cli/test_cli
e2e/test_main_job security/test_tls multiplexer/test_poison gateway/test_arrow_and_limits multiplexer/test_relay
faults/test_machine e2e/test_contention gateway/test_review multiplexer/test_arrow engine/test_minilm
security/test_canary test_image cli/test_service gateway/test_clients e2e/test_gpus control/test_metrics
faults/test_state_damage test_readme engine/test_limits jobs/test_huggingface_hub faults/test_workers
express/test_security express/test_lane drivers/test_sqlitestore
""".split()
# What has one of these marks or fixtures has the mark `processes` as well.
MARKS = ("e2e", "faults")
FIXTURES = {"appliance", "own_appliance", "zoo", "faked", "image"}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub on loopback, of one module."""
    with Hub() as running:
        yield running


@pytest.fixture(scope="session")
def appliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAppliance]:
    """One running appliance with the instance `minilm`, shared by tests that leave it as they found it."""
    with RunningAppliance(tmp_path_factory.mktemp("shared")) as running:
        running.wait_ready("minilm")
        yield running


@pytest.fixture
def own_appliance(tmp_path: Path) -> Iterator[RunningAppliance]:
    """An appliance of the test's own, without instances, to be broken."""
    with RunningAppliance(tmp_path, seeds="") as running:
        yield running


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(map(item.get_closest_marker, MARKS)) or FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.processes)
    items.sort(key=begins)  # stable: the order within a file stays


def begins(item: pytest.Item) -> int:
    name = item.path.relative_to(TESTS).with_suffix("").as_posix()
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)


class QuickItem:
    """The test that runs now, where it said that it starts no process of ours."""

    item: pytest.Item | None = None


def refuse_process(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: a test without the mark `processes` may start no Python."""
    if event == "subprocess.Popen" and QuickItem.item and str(arguments[0]).startswith(sys.prefix):
        raise AssertionError(f"{QuickItem.item.nodeid} starts a process of ours: mark it with pytest.mark.processes")


sys.addaudithook(refuse_process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    QuickItem.item = None if item.get_closest_marker("processes") else item
    try:
        return (yield)
    finally:
        QuickItem.item = None


@pytest.fixture
def meters(tmp_path: Path) -> Iterator[Meters]:
    """`Meters` in this process. They turn every counter that is made after them into a shared file, in which equal
    names go on counting: that is taken back."""
    before = values.ValueClass
    yield Meters(tmp_path / "metrics", "test")
    values.ValueClass = before
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
