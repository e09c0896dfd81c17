"""Names of processes can be told apart and read back; no two files of a data folder share a path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.layout import Layout, instance_of, job_process, replica_of, replica_process, stem_of
from appliance.core.models import Job
from appliance.core.settings import parse

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(names, st.integers(1, 1000), st.integers(0, 1000))
def test_the_number_of_a_replica_is_read_back(name: str, series: int, replica: int) -> None:
    stem = stem_of(name, series)
    assert replica_of(name, replica_process(stem, replica)) == (stem, replica)
    assert instance_of(stem) == name


@pytest.mark.parametrize(
    ("group", "process"),
    [
        ("control", "control"),
        ("job.7", "job.7"),
        ("a", "b-1"),
        ("a", "a-1-2"),
        ("a", "a-"),
        ("a", "a-x"),
        ("7", "7"),
        ("a", "a@-1"),
        ("a", "a@x-1"),
    ],
)
def test_a_process_of_another_kind_has_no_replica(group: str, process: str) -> None:
    assert replica_of(group, process) is None


def test_a_job_has_one_name() -> None:
    assert Job(12, "load", "now").program == job_process(12) == "job.12"


def test_every_path_is_another_one_below_the_data_folder() -> None:
    layout = Layout("/data")
    paths = [getattr(layout, name) for name, kind in vars(Layout).items() if isinstance(kind, property)]
    paths += [layout.manifest("org/model", ""), layout.manifest("org/model", "main"), layout.manifest("org/other", "")]
    paths += [layout.group_lock(3), layout.load_lock("MIG-1/2"), layout.multiplexer_socket(0), layout.job_progress(3)]
    paths += [layout.log("control"), layout.log(job_process(3)), layout.backend_log(3)]
    assert len(set(paths)) == len(paths) > 25
    assert all(path.startswith("/data/") for path in paths)
    assert layout.load_lock("MIG-1/2") == "/data/locks/load-MIG-1_2.lock"


def test_logs_may_lie_elsewhere() -> None:
    settings = parse({"data_dir": "/data", "log_dir": "/var/log/tei"}, {}, {}, "")
    assert settings.layout.log("a-0") == "/var/log/tei/a-0.log"
    assert settings.layout.deleted_logs == "/var/log/tei/deleted"
    assert parse({"data_dir": "/data"}, {}, {}, "").layout.log("a-0") == "/data/logs/a-0.log"
