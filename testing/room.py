"""How much memory an appliance may use, so that no more than so many instances of the tiny model are loaded at once."""

from pathlib import Path

from testing.running import RunningAppliance, eventually

SPARE = 0.7  # of one instance: the next one does not fit, and nobody is turned away for what a load takes more or less


def setting_for(folder: Path, room: int) -> str:
    """A line of a configuration with room for so many. One is loaded in ``folder``, to see what it takes."""
    folder.mkdir()
    with RunningAppliance(folder, seeds="") as measuring:
        measuring.create("first")
        measuring.wait_ready("first")
        eventually(measuring.node().memory_needs.read)
        (taken,) = measuring.node().memory_needs.read().values()
    return f"memory_limit_mb = {int(taken / 1024**2 * (room + SPARE))}"
