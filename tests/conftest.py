"""Fixtures for all tests. Whole appliances are started with real processes; nothing is patched."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import values
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from appliance.drivers.metrics import Meters
from testing.hub import Hub
from testing.running import RunningAppliance

# Begun first, or the worker that gets one of them last keeps all others waiting.
TESTS = Path(__file__).parent
LONG_FILES = """
faults/test_status_truth operations/test_models e2e/test_sleep e2e/test_directories e2e/test_generations
multiplexer/test_relay faults/test_kills faults/test_strangers e2e/test_cache security/test_tls faults/test_monitor
express/test_security operations/test_supply security/test_roles express/test_lane control/console/test_in_a_browser
e2e/test_peers e2e/test_fronts operations/test_benchmarks multiplexer/test_arrow e2e/test_rolling express/test_appliance
multiplexer/test_poison e2e/test_gpus engine/test_minilm e2e/test_replacement control/test_openapi faults/test_turns
cli/test_follow_logs e2e/test_prometheus faults/test_swaps e2e/test_moving_in export/test_kubernetes gateway/test_budget
faults/test_machine faults/test_state_damage jobs/test_huggingface_hub test_image security/test_canary
e2e/test_contention cli/test_service
""".split()
# Fixtures of a session, each the same for all files that use it: they run in one worker, so that it is set up once.
SHARED = {
    "appliance": """
cli/test_cli e2e/test_main_job test_readme control/test_streaming e2e/test_bench_client e2e/test_hostile_rest
multiplexer/test_reflection test_docs test_docs_running
""".split(),
    "zoo": """
gateway/test_arrow_and_limits gateway/test_client_dialects gateway/test_review gateway/test_clients
gateway/test_doors gateway/test_openai_cohere
gateway/test_schema gateway/test_tei_routes gateway/test_token_ids
""".split(),
}
SHARED_BY = {name: fixture for fixture, names in SHARED.items() for name in names}
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
        for fixture in SHARED:
            if uses_shared(item, fixture) and SHARED_BY.get(name_of(item)) != fixture:
                raise pytest.UsageError(f"{item.nodeid} uses `{fixture}`: its file belongs into SHARED of {__file__}")
    items.sort(key=begins)  # stable: the order within a file stays


def name_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).with_suffix("").as_posix()


def begins(item: pytest.Item) -> int:
    name = name_of(item)
    if name in SHARED_BY:
        return -1
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)


def uses_shared(item: pytest.Item, fixture: str) -> bool:
    """And not a fixture of its own file that has the same name."""
    definitions = item.session._fixturemanager.getfixturedefs(fixture, item) or ()
    return fixture in getattr(item, "fixturenames", ()) and [each.scope for each in definitions][-1:] == ["session"]


class Scheduling(LoadFileScheduling):
    """Files that share a fixture are given out as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SHARED_BY.get(file.removeprefix("tests/").removesuffix(".py"), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


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
    except BaseException as error:  # pytest's own: without a name it would end a run of 20 minutes
        error.add_note(f"While {item.nodeid} was running")
        raise
    finally:
        QuickItem.item = None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed, where the tests are started by this process and run by others."""
    if report.failed and hasattr(report, "node"):
        print(f"\n{report.when} of {report.nodeid} failed", file=sys.__stderr__, flush=True)


@pytest.fixture
def meters(tmp_path: Path) -> Iterator[Meters]:
    """`Meters` in this process. They turn every counter that is made after them into a shared file, in which equal
    names go on counting: that is taken back."""
    before = values.ValueClass
    yield Meters(tmp_path / "metrics", "test")
    values.ValueClass = before
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
