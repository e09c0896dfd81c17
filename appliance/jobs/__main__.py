"""`python -m appliance.jobs NUMBER`: do the job of that number, write its result into the registry, and end with 0.

A failure that has a name is a result, and so is what the system refuses, such as a write to a full disk. Anything else
ends with 1, and supervisord starts the job again.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from appliance.core.events import Event
from appliance.core.models import Job, Model
from appliance.core.problems import Problem
from appliance.drivers import configfile, output
from appliance.jobs.load import load
from appliance.node.context import Node
from appliance.operations import models

log = logging.getLogger("appliance.jobs")
PAUSE_SECS = 5.0  # until a result that could not be written is written again


def main() -> int:
    output.configure()
    node = Node.at(configfile.load(os.environ))
    number = int(sys.argv[1])
    wanted = node.models.read().job(number)
    if wanted is None:
        log.info("Job %s is not wanted any more", number)
        return 0
    model, job = wanted
    log.info("Job %s: %s of %s", number, job.kind, model.model_id)
    try:
        if job.kind == "download":
            from appliance.jobs.download import download  # only now: the hub's library is more than half of a start

            download(node, model, job)
        else:
            load(node, model, job)
    except Problem as problem:
        end_failed(node, model, job, problem.message)
    except OSError as error:
        end_failed(node, model, job, f"The {job.kind} of {model.model_id} failed: {error}")
    return 0


def end_failed(node: Node, model: Model, job: Job, why: str) -> None:
    """Write the failure down, as that of a download or of a verification.

    A full disk may refuse that, too. Then it is tried until it succeeds: if this process ended, supervisord would start
    it again at once, without a pause.
    """
    log.error("%s", why)
    while True:
        try:
            record_failure(node, model, job, why)
            return
        except (Problem, OSError) as error:
            log.error("Cannot write down why: %s. Trying again in %g s", error, PAUSE_SECS)
            time.sleep(PAUSE_SECS)


def record_failure(node: Node, model: Model, job: Job, why: str) -> None:
    """Raises: Problem, OSError."""
    models.fail(node, model, job, why)
    node.journal.record(Event.MODEL_FAILED, None, why, model=model.model_id)


if __name__ == "__main__":
    sys.exit(main())
