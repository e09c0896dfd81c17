"""What is installed: locks with digests, everything of etc/ in the wheel, and a bill of materials."""

import configparser
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = sorted(ROOT.glob("requirements*.lock"))
PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.M)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_of_a_lock_has_its_digests(lock: Path) -> None:
    entries = re.split(r"\n(?=\S)", lock.read_text().strip())
    assert len(entries) > 20
    for entry in entries:
        assert PACKAGE.match(entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


def test_the_locks_agree() -> None:
    """What make run installs is what the tests run with."""
    ours, tests = (dict(PACKAGE.findall((ROOT / f"requirements{each}.lock").read_text())) for each in ("", "-dev"))
    assert ours
    assert {name: tests.get(name) for name in ours} == ours


@pytest.mark.parametrize("kind", ["", "-image", "-dev", "-ray"])
def test_what_the_package_asks_for_is_in_its_locks(kind: str) -> None:
    """A fresh clone lacked what everybody else had installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    asked = {re.split(r"[><=;\[ ]", line)[0] for line in setup["options"]["install_requires"].split("\n") if line}
    locked = {name.lower() for name, _ in PACKAGE.findall((ROOT / f"requirements{kind}.lock").read_text())}
    assert not {re.sub(r"[-_.]+", "-", name).lower() for name in asked} - locked


def test_the_wheel_has_all_of_etc() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packed = {line for files in setup["options.data_files"].values() for line in files.split()}
    assert packed == {str(path.relative_to(ROOT)) for path in (ROOT / "etc").rglob("*") if path.is_file()}


@pytest.mark.processes
def test_the_bill_of_materials_names_what_the_lock_installs() -> None:
    subprocess.run(["make", "--silent", "sbom"], cwd=ROOT, check=True, capture_output=True, timeout=100)
    bill = json.loads((ROOT / "build" / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(each["name"], each["version"]) for each in bill["components"]}
    assert listed == set(PACKAGE.findall((ROOT / "requirements.lock").read_text()))
