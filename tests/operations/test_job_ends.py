"""How a job ends that has not ended by itself: what is written down of its model."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.core import models as registry
from appliance.core.models import Job, Verification
from appliance.core.status import Process
from appliance.node.context import Node, now
from appliance.operations import models
from testing.specs import configured

MODEL = "org/small"
WORKED = Verification("2026-01-01T00:00:00Z", "its fingerprint", dimensions=4)


class Jobs:
    """A supervisord with the processes that it is told."""

    def __init__(self) -> None:
        self.table: list[Process] = []

    def processes(self) -> list[Process]:
        return self.table


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def node(tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr("appliance.operations.supervision.reconcile", lambda *_: [])
    supervisor: Any = jobs
    node = replace(Node.at(configured(data_dir=str(tmp_path))), supervisor=supervisor)
    models.add(node, {"model_id": MODEL})
    begun = begin(node, "load")
    node.models.update(partial(registry.end, number=begun.number, verification=WORKED))
    return node


def begin(node: Node, kind: str) -> Job:
    model = node.models.read().get(MODEL)
    change = node.models.update(partial(models.begun, model=model, kind=kind, now=now(), fields="{}"))
    job = change.after.get(MODEL).job
    assert job
    return job


def test_a_load_that_is_cancelled_says_nothing_of_the_model(node: Node) -> None:
    before = node.models.read().get(MODEL)
    begin(node, "load")
    assert models.cancel(node, MODEL).download_error is None
    assert node.models.read().get(MODEL) == before, "also its last verification counts"


def test_a_download_that_is_cancelled_has_not_ended_well(node: Node) -> None:
    begin(node, "download")
    error = models.cancel(node, MODEL).download_error
    assert error
    assert error.startswith("Cancelled at ")


@pytest.mark.parametrize(("state", "words"), [("STOPPED", "stopped with supervisorctl"), ("FATAL", "Its process")])
def test_a_job_whose_process_is_given_up_has_failed_as_what_it_was(
    node: Node, jobs: Jobs, state: str, words: str
) -> None:
    for kind in ("load", "download"):
        job = begin(node, kind)
        jobs.table = [Process(job.program, job.program, state, exit_status=1, started=1.0)]
        models.settle(node)
        model = node.models.read().get(MODEL)
        assert model.verification
        assert model.job is None
        assert words in (model.verification.error if kind == "load" else model.download_error)
        assert bool(model.download_error) is (kind == "download"), "a load is no download"


@pytest.mark.parametrize(("state", "started"), [("STOPPED", 0.0), ("RUNNING", 1.0), ("STARTING", 1.0)])
def test_a_job_that_is_at_work_or_about_to_be_goes_on(node: Node, jobs: Jobs, state: str, started: float) -> None:
    job = begin(node, "load")
    jobs.table = [Process(job.program, job.program, state, started=started)]
    models.settle(node)
    assert node.models.read().get(MODEL).job == job


def test_to_clear_a_job_away_waits_for_no_work_on_others(
    node: Node, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that took its time to stop kept the monitor from looking at all others."""
    waited: list[Any] = []
    monkeypatch.setattr("appliance.operations.supervision.reconcile", lambda node, names=None: waited.append(names))
    jobs.table = [Process("job.7", "job.7", "EXITED", exit_status=0, started=1.0)]
    models.settle(node)
    assert waited == [()]
