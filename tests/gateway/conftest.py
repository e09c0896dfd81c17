"""One appliance with an instance of every task, shared by the tests of the gateway."""

from collections.abc import Iterator

import pytest
import requests

from testing.engines import FAMILIES
from testing.fake_multiplexer import Faked
from testing.running import RunningAppliance


class Http:
    """The gateway's port of a running appliance."""

    def __init__(self, running: RunningAppliance) -> None:
        self.running = running
        self.url = f"http://127.0.0.1:{running.http_port}"

    def post(self, path: str, body: object = None, **options: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, **options)  # type: ignore[arg-type]

    def get(self, path: str, **options: object) -> requests.Response:
        return requests.get(self.url + path, timeout=60, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    """Instances `minilm`, `sparse`, `reranker` and `classifier`."""
    with RunningAppliance(tmp_path_factory.mktemp("zoo")) as running:
        running.create("sparse", model_id=str(FAMILIES / "bert-splade"), pooling="splade")
        running.create("reranker", model_id=str(FAMILIES / "bert-rerank"))
        running.create("classifier", model_id=str(FAMILIES / "bert-classify"))
        for name in ("minilm", "sparse", "reranker", "classifier"):
            running.wait_ready(name)
        yield Http(running)


@pytest.fixture(scope="session")
def faked_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faked]:
    running = Faked(tmp_path_factory.mktemp("faked"))
    yield running
    running.close()


@pytest.fixture
def faked(faked_once: Faked) -> Faked:
    """A gateway alone, and a multiplexer that answers as the test says."""
    faked_once.multiplexer.answers.clear()
    return faked_once
