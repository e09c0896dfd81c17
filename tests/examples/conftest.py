"""A gateway that answers as a test says, and programs in the environment of the demonstration (`make demo`)."""

from collections.abc import Iterator
from typing import Any

import pytest

from testing import demo
from testing.fake_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    fake = FakeGateway()
    yield fake
    fake.close()


def program(module: str, *arguments: object) -> Any:
    """What a program of tests/examples prints as JSON."""
    return demo.program(f"tests.examples.{module}", *arguments)
