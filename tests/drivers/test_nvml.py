"""The stub of NVML does what is set, seen through the real nvidia-ml-py binding in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.nvml import Gpu, Machine

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
A = Gpu("GPU-aaaa", total_mib=81559, used_mib=1200, utilization=37, temperature=61, name="NVIDIA H100 80GB HBM3")
B = Gpu("GPU-bbbb")
# Every look of the child is one line of JSON; an error of NVML is its code. It looks again for every line of its stdin.
CHILD = """
import json, sys
from pynvml import *

def code(function, *arguments):
    try:
        function(*arguments)
    except NVMLError as error:
        return error.value
    return 0

def listed(processes):
    return [[process.pid, process.usedGpuMemory] for process in processes]

{before}
print("started", flush=True)
for line in sys.stdin:
    try:
        print(json.dumps({look}), flush=True)
    except NVMLError as error:
        print(json.dumps(error.value), flush=True)
"""


class Child:
    """A process that evaluates ``look`` against the machine whenever it is asked."""

    def __init__(self, machine: Machine, look: str, before: str = "nvmlInit(); gpu = nvmlDeviceGetHandleByIndex(0)"):
        command = [sys.executable, "-c", CHILD.format(before=before, look=look)]
        environ = {**os.environ, **machine.environ}
        self.process = subprocess.Popen(
            command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.answer() == "started\n"

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def look(self) -> Any:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def answer(self) -> str:
        assert self.process.stdout
        assert self.process.stderr
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line


def look(machine: Machine, look: str, **options: str) -> Any:
    with Child(machine, look, **options) as child:
        return child.look()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(compiled: Machine) -> Machine:
    """GPU A, which two processes use, and GPU B."""
    compiled.set([A, B], [(A.uuid, 41, 700), (A.uuid, 42, None), (B.uuid, 43, 1)])
    return compiled


AGREED = {
    "nvmlDeviceGetCount()": 2,
    "nvmlDeviceGetUUID(gpu)": A.uuid,
    "nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex(1))": B.uuid,
    "nvmlDeviceGetName(gpu)": A.name,
    "nvmlDeviceGetName(nvmlDeviceGetHandleByUUID('GPU-bbbb'))": B.name,
    "[(m.total, m.used, m.free) for m in [nvmlDeviceGetMemoryInfo(gpu)]]": [
        [81559 * MIB, 1200 * MIB, (81559 - 1200) * MIB]
    ],
    "[(m.total, m.used, m.free, m.reserved) for m in [nvmlDeviceGetMemoryInfo(gpu, nvmlMemory_v2)]]": [
        [81559 * MIB, 1200 * MIB, (81559 - 1200) * MIB, 0]
    ],
    "nvmlDeviceGetUtilizationRates(gpu).gpu": 37,
    "nvmlDeviceGetTemperature(gpu, NVML_TEMPERATURE_GPU)": 61,
    "nvmlDeviceGetTemperatureV(gpu, NVML_TEMPERATURE_GPU)": 61,
    "listed(nvmlDeviceGetComputeRunningProcesses(gpu))": [[41, 700 * MIB], [42, None]],
    "listed(nvmlDeviceGetComputeRunningProcesses_v2(gpu))": [[41, 700 * MIB], [42, None]],
    "nvmlDeviceGetGraphicsRunningProcesses_v3(gpu)": [],
    "code(nvmlDeviceGetHandleByIndex, 2)": 2,
    "code(nvmlDeviceGetHandleByUUID, 'GPU-cccc')": 6,
    "code(nvmlDeviceGetTemperature, gpu, 1)": 2,
    "code(nvmlDeviceGetMemoryInfo, gpu, 0x03000028)": 25,
    "code(nvmlDeviceGetName, None)": 2,
}


def test_every_function_agrees_with_what_was_set(machine: Machine) -> None:
    # One process for all of them; keyed by expression, so that a difference names its function.
    assert look(machine, f"dict((text, eval(text)) for text in {list(AGREED)})") == AGREED


def test_hardware_changes_under_a_running_process(machine: Machine) -> None:
    with Child(machine, "[nvmlDeviceGetCount(), nvmlDeviceGetMemoryInfo(gpu).used, nvmlDeviceGetUUID(gpu)]") as child:
        assert child.look() == [2, 1200 * MIB, A.uuid]
        machine.set([B, Gpu(A.uuid, used_mib=5), Gpu("GPU-cccc")])
        assert child.look() == [3, 5 * MIB, A.uuid], "a handle is a GPU, whichever index it has"
        machine.set([B])
        assert child.look() == 15, "a GPU that went is lost"
        machine.set([A])
        assert child.look() == [1, 1200 * MIB, A.uuid]


FAILS = {
    "nvmlInit": "nvmlInit",
    "nvmlShutdown": "nvmlShutdown",
    "nvmlDeviceGetCount": "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex": "nvmlDeviceGetHandleByIndex, 0",
    "nvmlDeviceGetHandleByUUID": "nvmlDeviceGetHandleByUUID, 'GPU-aaaa'",
    "nvmlDeviceGetUUID": "nvmlDeviceGetUUID, gpu",
    "nvmlDeviceGetName": "nvmlDeviceGetName, gpu",
    "nvmlDeviceGetMemoryInfo": "nvmlDeviceGetMemoryInfo, gpu",
    "nvmlDeviceGetMemoryInfo_v2": "nvmlDeviceGetMemoryInfo, gpu, nvmlMemory_v2",
    "nvmlDeviceGetUtilizationRates": "nvmlDeviceGetUtilizationRates, gpu",
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperature, gpu, 0",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperatureV, gpu, 0",
    "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses, gpu",
    "nvmlDeviceGetComputeRunningProcesses_v2": "nvmlDeviceGetComputeRunningProcesses_v2, gpu",
    "nvmlDeviceGetGraphicsRunningProcesses": "nvmlDeviceGetGraphicsRunningProcesses, gpu",
}


def test_a_function_fails_by_name_and_only_that_one(machine: Machine) -> None:
    # Many times initialised: an nvmlInit that fails leaves its nvmlShutdown one too many.
    before = "[nvmlInit() for _ in range(9)]; gpu = nvmlDeviceGetHandleByIndex(0)"
    with Child(machine, f"[{', '.join(f'code({call})' for call in FAILS.values())}]", before) as child:
        assert child.look() == [0] * len(FAILS)
        for function in FAILS:
            for code in (3, 15, 999):
                machine.set([A, B], fails={function: code})
                # A name without a version is every version of it.
                expected = [code if name in (function, f"{function}_v2") else 0 for name in FAILS]
                assert child.look() == expected, function


def test_a_function_that_the_stub_lacks_cannot_be_told_to_fail(machine: Machine) -> None:
    with pytest.raises(ValueError, match='"nvmlDeviceGetCuont" cannot fail'):
        machine.set([A], fails={"nvmlDeviceGetCuont": 3})


def test_the_binding_says_what_the_library_says(machine: Machine) -> None:
    codes = [*range(1, 19), 20, 999]  # those that the binding has texts for itself
    said, texts = look(machine, f"[[str(e(c)) for c in {codes}] for e in (NVMLError, nvmlErrorString)]")
    assert said == texts
    assert look(machine, "str(NVMLError(19))") == "In use by another client"


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_thirty_processes_are_sized_in_two_calls(machine: Machine, version: str) -> None:
    processes = [(A.uuid, 1000 + number, number) for number in range(30)]
    machine.set([A, B], [*processes, (B.uuid, 2000, 1)])
    function = f"nvmlDeviceGetComputeRunningProcesses_{version}"
    assert look(machine, f"listed({function}(gpu))") == [[pid, mib * MIB] for _, pid, mib in processes]
    # The protocol itself, which the binding hides: too little room is told, with the room needed.
    sized = """nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
def sized(room):
    count = c_uint(room)
    infos = (c_nvmlProcessInfo_t * room)() if room else None
    return [CDLL("libnvidia-ml.so.1").FUNCTION(gpu, byref(count), infos), count.value]
""".replace("FUNCTION", function)
    answers = look(machine, "[sized(room) for room in (0, 29, 30, 65)]", before=sized)
    assert answers == [[7, 30], [7, 30], [0, 30], [0, 30]]
    machine.set([A, B])
    assert look(machine, "sized(0)", before=sized) == [0, 0]


def test_without_a_file_there_is_no_driver(machine: Machine) -> None:
    with Child(machine, "code(nvmlInit)", before="") as child:
        assert child.look() == 0
        machine.remove_driver()
        assert child.look() == 9
        machine.set([A])
        assert child.look() == 0
    assert look(machine, "code(nvmlInit)", before="import os; del os.environ['NVML_STUB_FILE']") == 9


def test_a_driver_that_goes_fails_every_call_but_shutdown(machine: Machine) -> None:
    with Child(machine, "[code(nvmlDeviceGetCount), code(nvmlDeviceGetName, gpu), code(nvmlShutdown)]") as child:
        machine.remove_driver()
        assert child.look() == [9, 9, 0]
        assert child.look() == [1, 1, 1], "not initialised any more"


def test_a_file_that_cannot_be_understood_is_an_error(machine: Machine) -> None:
    machine.hardware.write_text("gpu GPU-aaaa 24000\n")
    assert look(machine, "code(nvmlInit)", before="") == 999


def test_the_folder_stands_before_an_inherited_path(machine: Machine) -> None:
    tell = f"from testing.nvml import *; print(Machine(Path({str(machine.folder)!r})).environ['LD_LIBRARY_PATH'])"
    for inherited, expected in {"/one:/two": f"{machine.folder}:/one:/two", "": f"{machine.folder}"}.items():
        environ = {**os.environ, "LD_LIBRARY_PATH": inherited}
        command = [sys.executable, "-c", tell]
        told = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert told.stdout.strip() == expected
