"""NVIDIA GPUs through NVML; none without a driver."""

from __future__ import annotations

from dataclasses import dataclass

import pynvml


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it. Memory in bytes, utilisation 0 to 1, temperature in degrees Celsius."""

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    memory_free: int
    utilization: float | None
    temperature: int | None


def gpus() -> list[Gpu]:
    """All GPUs in NVML order; an empty list where no driver is installed."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        memory_free=int(memory.free),
        utilization=utilization(handle),
        temperature=temperature(handle),
    )


def utilization(handle: object) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:  # MIG parents and some virtual GPUs do not report it
        return None


def temperature(handle: object) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError:
        return None
