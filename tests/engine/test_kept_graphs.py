"""Graphs in the data folder: read back as they were, and deleted when nobody reads them."""

import os
import time
from pathlib import Path

from appliance.engine.kept_graphs import UNREAD_SECS, keep_graph, kept_graph

LATE = UNREAD_SECS + 60


def age(folder: Path, secs: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - secs,) * 2)


def test_a_graph_is_read_back_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    assert kept_graph(folder, "a") is None
    keep_graph(folder, "a", b"graph")
    assert kept_graph(folder, "a") == b"graph"
    next(folder.iterdir()).write_bytes(b"grap")
    assert kept_graph(folder, "a") is None


def test_what_nobody_has_read_for_long_is_deleted_when_another_is_kept(tmp_path: Path) -> None:
    keep_graph(tmp_path, "unread", b"1")
    keep_graph(tmp_path, "read", b"2")
    (tmp_path / "killed.onnx.1-1.new").write_bytes(b"3")
    age(tmp_path, LATE)
    assert kept_graph(tmp_path, "read") == b"2"
    keep_graph(tmp_path, "new", b"4")
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["new", "read"]


def test_what_is_not_so_old_stays(tmp_path: Path) -> None:
    keep_graph(tmp_path, "a", b"1")
    age(tmp_path, UNREAD_SECS - 60)
    keep_graph(tmp_path, "b", b"2")
    assert kept_graph(tmp_path, "a") == b"1"
