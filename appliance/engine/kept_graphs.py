"""Graphs that were built, kept in the data folder for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

from appliance.drivers.modelfolder import Card
from appliance.engine.weights import Tensor
from appliance.files.replacement import replacement

log = logging.getLogger(__name__)
BUILDER_VERSION = 5  # raise it when `graph.build` makes another graph of the same model
UNREAD_SECS = 30 * 86_400  # after these a graph is deleted: its model was changed, or is gone, or the builder was


def kept_graph(folder: Path, key: str) -> bytes | None:
    """The graph that `keep_graph` wrote; None when there is none, or it cannot be read, or it has changed."""
    for path in folder.glob(f"{key}-*.onnx"):
        try:
            content = path.read_bytes()
        except OSError as error:
            log.warning("Cannot read the graph %s (%s); it is built anew", path, error)
            continue
        if path.name == graph_name(key, content):
            with contextlib.suppress(OSError):  # of a folder that is read-only, or of a graph that was just deleted
                os.utime(path)
            return content
        log.warning("The graph %s is damaged; it is built anew", path)
    return None


def keep_graph(folder: Path, key: str, content: bytes) -> None:
    """Write a graph under its name, and delete those that nobody reads any more. Several engines may do so at the same
    moment. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    delete_unread(folder)
    with replacement(folder / graph_name(key, content), durable=False, several_writers=True) as file:
        file.write(content)


def delete_unread(folder: Path) -> None:
    """The time of a graph is that of its last start."""
    oldest = time.time() - UNREAD_SECS
    for path in folder.iterdir():  # also what a killed engine has left
        with contextlib.suppress(OSError):  # another engine deletes the same
            if path.stat().st_mtime < oldest:
                path.unlink()


def graph_name(key: str, content: bytes) -> str:
    """It holds a digest: a power cut may leave an empty file, and a damaged graph may load and compute wrongly."""
    return f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.onnx"


def graph_key(card: Card, tensors: dict[str, Tensor], head: str, long: bool, computed: str, weights: bool) -> str:
    """A digest of everything that decides the graph: the builder, the config, and where each tensor lies.

    weights: whether they stand in the graph. Then it is of these very files: others of the same name, or what is
    written into one of them, have other status.
    """
    locations = {name: {**asdict(tensor), "file": tensor.file.name} for name, tensor in sorted(tensors.items())}
    decisive = [BUILDER_VERSION, card.config, locations, head, long, computed]
    for file in sorted({tensor.file for tensor in tensors.values()}) if weights else ():
        about = file.stat()
        decisive.append([str(file.resolve()), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns])
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:32]
