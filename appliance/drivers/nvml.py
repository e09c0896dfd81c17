"""NVIDIA GPUs through NVML; none without a driver. Only what CUDA_VISIBLE_DEVICES leaves to this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pynvml

from appliance.core.placement import Device, visible


def devices() -> list[Device]:
    """The GPUs that this process, and what it starts, may use, in NVML order."""
    with driver() as answers:
        found = [device(index) for index in range(count())] if answers else []
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def memory_by_process() -> list[tuple[int, int, int]]:
    """(GPU number, process id, bytes) of every process with memory on a GPU, as far as the driver tells.

    In a container without the host's process ids these are not ours, and nobody is found under them.
    """
    found = []
    with driver() as answers:
        for index in range(count()) if answers else ():
            listed = told(partial(running_on, index)) or []
            found += [(index, each.pid, int(each.usedGpuMemory)) for each in listed if each.usedGpuMemory is not None]
    return found


@contextmanager
def driver() -> Iterator[bool]:
    """Whether NVML answers, while the block runs. Opened anew each time: drivers get loaded and updated."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        told(pynvml.nvmlShutdown)


def count() -> int:
    return told(pynvml.nvmlDeviceGetCount) or 0


def running_on(index: int) -> Any:
    return pynvml.nvmlDeviceGetComputeRunningProcesses(handle(index))


def handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def device(index: int) -> Device:
    """One GPU. A GPU that fell off the bus keeps its number and says so."""
    memory, failure = None, None
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle(index))
    except pynvml.NVMLError as error:
        failure = str(error)
    return Device(
        index=index,
        uuid=told(lambda: pynvml.nvmlDeviceGetUUID(handle(index))) or f"unknown-{index}",
        name=told(lambda: pynvml.nvmlDeviceGetName(handle(index))),
        memory_total=int(memory.total) if memory else None,
        memory_used=int(memory.used) if memory else None,
        memory_free=int(memory.free) if memory else None,
        utilization=told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle(index)).gpu / 100),
        temperature=told(lambda: int(pynvml.nvmlDeviceGetTemperature(handle(index), pynvml.NVML_TEMPERATURE_GPU))),
        error=failure,
    )


def told(ask: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU has none: MIG parents and virtual GPUs do not report everything."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None
