"""The end of a process whose work is done."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process now, with what it has printed. Without it Python takes every module and object apart first,
    which nobody needs: 30 to 80 ms of CPU. Raises: OSError when what was printed cannot be written any more."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
