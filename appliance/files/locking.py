"""A lock on a file, which processes share: whoever does not get it is told why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from appliance.core.problems import Problem


@contextmanager
def locked(
    path: str | Path, longest_secs: float, taken: Problem, refused: Callable[[OSError], Problem], mode: int = 0o777
) -> Iterator[None]:
    """Held while the block runs. The kernel gives it back when a process dies.

    mode: of its folder, where that has to be made. Raises: ``taken`` when another has it for so long; ``refused`` of
    the error where the disk refuses.
    """
    lock = FileLock(path, timeout=longest_secs)
    try:
        Path(path).parent.mkdir(mode=mode, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise taken from None
    except OSError as error:
        raise refused(error) from error
    try:
        yield
    finally:
        lock.release()
