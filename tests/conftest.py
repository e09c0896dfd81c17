"""Fixtures for all tests. Whole appliances are started with real processes; nothing is patched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.running import RunningAppliance


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
