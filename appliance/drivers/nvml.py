"""NVIDIA GPUs through NVML, as far as CUDA_VISIBLE_DEVICES shows them to this process; none without a driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from appliance.core.placement import Device, visible


def library() -> Any:
    import pynvml  # only where there is a driver: it takes 2 MB of each program

    return pynvml


class ProcessMemory(NamedTuple):
    """Memory of one process on one GPU. gpu: its number; size: bytes."""

    gpu: int
    pid: int
    size: int


def devices() -> list[Device]:
    """The GPUs that this process and its children may use, in NVML order."""
    with driver() as answers:
        all_devices = [device(index) for index in range(count())] if answers else []
    return visible(all_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def memory_by_process() -> list[ProcessMemory]:
    """Every process with memory on a GPU, as far as the driver says.

    The process ids are the host's: in a container with ids of its own no process has them.
    """
    usage = []
    with driver() as answers:
        for index in range(count()) if answers else ():
            for process in unless_unsupported(partial(running_on, index)) or []:
                if process.usedGpuMemory is not None:
                    usage.append(ProcessMemory(index, process.pid, int(process.usedGpuMemory)))
    return usage


@contextmanager
def driver() -> Iterator[bool]:
    """Whether NVML answers, while the block runs. NVML is opened each time: a driver may be loaded or updated."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        library().nvmlInit()
    except OSError:
        yield False
        return
    except library().NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        unless_unsupported(library().nvmlShutdown)


def count() -> int:
    return unless_unsupported(library().nvmlDeviceGetCount) or 0


def running_on(index: int) -> Any:
    return library().nvmlDeviceGetComputeRunningProcesses(handle(index))


def handle(index: int) -> Any:
    return library().nvmlDeviceGetHandleByIndex(index)


def device(index: int) -> Device:
    """One GPU. A GPU that has fallen off the bus keeps its number, with an error."""
    memory, failure = None, None
    try:
        memory = library().nvmlDeviceGetMemoryInfo(handle(index))
    except library().NVMLError as error:
        failure = str(error)
    return Device(
        index=index,
        uuid=unless_unsupported(lambda: library().nvmlDeviceGetUUID(handle(index))) or f"unknown-{index}",
        name=unless_unsupported(lambda: library().nvmlDeviceGetName(handle(index))),
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        memory_free=int(memory.free) if memory else None,
        utilization=unless_unsupported(lambda: library().nvmlDeviceGetUtilizationRates(handle(index)).gpu / 100),
        temperature=unless_unsupported(
            lambda: int(library().nvmlDeviceGetTemperature(handle(index), library().NVML_TEMPERATURE_GPU))
        ),
        error=failure,
    )


def unless_unsupported(ask: Callable[[], Any]) -> Any:
    """The answer, or None when this GPU has none: MIG parents and virtual GPUs do not report everything."""
    try:
        return ask()
    except library().NVMLError:
        return None
