"""`python -m appliance.jobs.fetch MODEL`: a model's files into the hub cache, without an appliance around it.

It goes before an engine that downloads nothing by itself, or not as carefully: the files are chosen, continued and
compared as in a job. Several of these may have one cache: one fetches, the others wait for it. Exit status 0 when the
model is there, 1 when it cannot be had.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from appliance.core.problems import Problem
from appliance.drivers import hub, modelfiles, output

log = logging.getLogger("appliance.jobs")


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="appliance.jobs.fetch", description=__doc__, allow_abbrev=False)
    parser.add_argument("model_id", help="hub id")
    parser.add_argument("--revision", default="main", help="branch, tag or commit; default: main")
    parser.add_argument("--allow-pickle", action="store_true", help="as the setting of that name")
    parser.add_argument("--packages", action="store_true", help="a model package that is installed here will do")
    arguments = parser.parse_args(command_line)
    output.configure()
    try:
        fetch(arguments.model_id, arguments.revision, arguments.allow_pickle, arguments.packages)
    except Problem as problem:
        log.error("%s", problem.message)
        return 1
    return 0


def fetch(model_id: str, revision: str, allow_pickle: bool, packages: bool) -> None:
    """What is complete stays as it is, also where the hub has a newer commit: all replicas shall serve the same one.

    Raises: Problem.
    """
    if packages and revision == "main" and hub.packaged(model_id):
        log.info("%s is installed here as a package", model_id)
        return
    if is_there(model_id, revision):
        return
    from appliance.drivers import hubfetch  # only now: the hub's library is more than half of a start
    from appliance.jobs.download import chosen

    repository = hubfetch.Repository(model_id, hub.repository_folder(model_id))
    with repository.lock("appliance.fetch"):  # others who came first have fetched it meanwhile
        if is_there(model_id, revision):
            return
        listing = hubfetch.listing(model_id, revision)
        files = chosen(model_id, allow_pickle, listing)
        repository.refuse_without_room(files)
        for file in files:
            log.info("%s: %s bytes", file.name, file.size)
            repository.fetch(listing.commit, file, lambda growing: None)
        repository.publish(revision, listing.commit, files)
    log.info("%s downloaded: %s files, commit %s", model_id, len(files), listing.commit)


def is_there(model_id: str, revision: str) -> bool:
    """Whether the cache has all of it."""
    there = hub.cached(model_id, revision)
    if there is None or modelfiles.missing(there.folder):
        return False
    log.info("%s is there, commit %s", model_id, there.commit)
    return True


if __name__ == "__main__":
    sys.exit(main())
