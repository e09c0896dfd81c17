"""A machine with invented GPUs, for the real nvidia-ml-py binding: `libnvidia-ml.so.1` compiled from `nvml_stub.c`.

The binding loads the library by its bare name, so the loader must find ours first. It reads `LD_LIBRARY_PATH` only when
a process starts: give `environ` to a subprocess; it does nothing in the process that is already running.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STUB = Path(__file__).parent / "nvml_stub.c"
COMPILE = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]


@dataclass(frozen=True)
class Gpu:
    """Memory in MiB, utilisation in percent, temperature in degrees Celsius."""

    uuid: str
    total_mib: int = 24000
    used_mib: int = 0
    utilization: int = 0
    temperature: int = 40
    name: str = "Stub GPU"


class Machine:
    """The library and its hardware in ``folder``. Before the first ``set`` the machine has no driver."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.hardware = self.folder / "hardware.txt"
        library = self.folder / "libnvidia-ml.so.1"
        if not library.exists():
            subprocess.run([*COMPILE, "-o", str(library), str(STUB)], check=True, timeout=60)

    @property
    def environ(self) -> dict[str, str]:
        """What a process must be started with, beside what it inherits, to have this hardware."""
        # No colon without an inherited path: to the loader an empty part is the working directory.
        inherited = os.environ.get("LD_LIBRARY_PATH")
        path = f"{self.folder}:{inherited}" if inherited else str(self.folder)
        return {"LD_LIBRARY_PATH": path, "NVML_STUB_FILE": str(self.hardware)}

    def set(
        self,
        gpus: Sequence[Gpu],
        processes: Sequence[tuple[str, int, int | None]] = (),
        fails: Mapping[str, int] | None = None,
    ) -> None:
        """Change the hardware, at once for every process.

        ``processes`` are (uuid of the GPU, pid, MiB used, or None where the driver cannot tell). ``fails`` maps names
        of functions, as the binding has them, to the nvmlReturn code they return; a name is also its `_v2` and `_v3`.
        """
        for function in fails or {}:
            if not re.search(rf"\b{function}(_v\d)?\(", STUB.read_text()):
                raise ValueError(f'"{function}" cannot fail: the stub has no such function. Add it to {STUB.name}.')
        lines = [
            *(f"gpu {g.uuid} {g.total_mib} {g.used_mib} {g.utilization} {g.temperature} {g.name}" for g in gpus),
            *(f"process {uuid} {pid} {-1 if mib is None else mib}" for uuid, pid, mib in processes),
            *(f"fail {function} {code}" for function, code in (fails or {}).items()),
        ]
        fresh = self.hardware.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.hardware)

    def remove_driver(self) -> None:
        self.hardware.unlink(missing_ok=True)
