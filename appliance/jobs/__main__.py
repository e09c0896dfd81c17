"""`python -m appliance.jobs NUMBER`: do the job of that number, write its result into the registry, and end with 0.

A failure that has a name is a result. Anything else ends with 1, and supervisord starts the job again.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from appliance import registry
from appliance.box import Appliance, now
from appliance.core import models
from appliance.core.models import Job, Model, Verification
from appliance.core.problems import Problem
from appliance.drivers import configfile, manifests, output
from appliance.jobs.download import download
from appliance.jobs.load import load

log = logging.getLogger("appliance.jobs")


def main() -> int:
    output.configure()
    box = Appliance.at(configfile.load(os.environ))
    number = int(sys.argv[1])
    found = box.models.read().job(number)
    if found is None:
        log.info("Job %s is not wanted any more", number)
        return 0
    model, job = found
    log.info("Job %s: %s of %s", number, job.kind, model.model_id)
    try:
        {"download": download, "load": load}[job.kind](box, model, job)
    except Problem as problem:
        failed(box, model, job, problem.message)
    return 0


def failed(box: Appliance, model: Model, job: Job, why: str) -> None:
    """Write the failure down, as that of a download or of a verification."""
    log.error("%s", why)
    result: dict[str, Any] = {"download_error": why}
    if job.kind == "load":
        known = manifests.read(registry.manifest_path(box, model.model_id, model.revision))
        result = {"verification": Verification(now(), known.fingerprint if known else "", why)}
    box.models.update(lambda registry: models.end(registry, job.number, **result))
    box.journal.record("model_failed", None, why, model=model.model_id)


if __name__ == "__main__":
    sys.exit(main())
