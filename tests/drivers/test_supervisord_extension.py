"""What supervisord loads from us reads the include file as supervisord itself does, whoever has changed it how."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from appliance.drivers.supervisord_extension import IncludeFile

MAIN = """[supervisord]
environment=OF_ALL="1",LANG="C"
[program:control]
command=/bin/true
[include]
files=instances.conf
"""


def options_in(folder: Path) -> ServerOptions:
    options = ServerOptions()
    options.realize(["-c", str(folder / "supervisord.conf")])
    return options


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "supervisord.conf").write_text(MAIN)
    (tmp_path / "instances.conf").write_text("; nothing yet\n")
    return tmp_path


def group(name: str, replicas: int, seed: int) -> str:
    sections = "".join(
        f'[program:{name}-{index}]\ncommand=/bin/sleep {seed} %(here)s \'%%\'\nenvironment=SEED="{seed}",LANG="de"\n\n'
        for index in range(replicas)
    )
    return f"[group:{name}]\nprograms={','.join(f'{name}-{index}' for index in range(replicas))}\n\n{sections}"


def said(options: ServerOptions) -> dict[str, object]:
    return {each.name: each for each in options.process_group_configs}


# What a person may write into the file, and of which the next reading of an edit that was taken back knows nothing.
EDITS = (
    "[program:control]\ncommand=/bin/other\n",
    "[group:control]\nprograms=control\n",
    "[group:twins]\nprograms=control,alone\n[program:alone]\ncommand=/bin/true\n",
    "[program:alone]\ncommand=/bin/sleep 1\n",
    '[supervisord]\nenvironment=FOO="1"\n',
    "[eventlistener:listens]\ncommand=/bin/true\nevents=TICK_5\n",
    "[group:a]\nprograms=a-9\n[program:a-9]\ncommand=/bin/true\n",
)


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_changes_is_read_as_supervisord_reads_it(folder: Path, seed: int) -> None:
    choose = random.Random(seed)
    ours = options_in(folder)
    file = IncludeFile(str(folder / "instances.conf"), ours)
    groups: dict[str, str] = {}
    for _ in range(40):
        for name in choose.sample("abcdef", choose.randint(0, 3)):
            if choose.random() < 0.3:
                groups.pop(name, None)
            else:
                groups[name] = group(name, choose.randint(1, 3), choose.randint(0, 3))
        written = list(groups.values())
        if choose.random() < 0.3:
            written.insert(choose.randint(0, len(written)), choose.choice(EDITS))
        (folder / "instances.conf").write_text("; written by a test\n" + "\n".join(written))
        if choose.random() < 0.2:
            ours.process_config(do_usage=False)  # supervisorctl update
        if choose.random() < 0.1:
            (folder / "supervisord.conf").write_text(MAIN.replace("OF_ALL=", f"OF_ALL_{choose.randint(1, 3)}="))
            ours.process_config(do_usage=False)
        file.read()
        assert said(ours) == said(options_in(folder))
        assert set(groups) <= said(ours).keys()


def test_an_edit_that_supervisord_has_read_itself_and_that_was_taken_back_is_gone(folder: Path) -> None:
    path = folder / "instances.conf"
    path.write_text(group("a", 1, seed=1))
    ours = options_in(folder)
    file = IncludeFile(str(path), ours)
    file.read()
    path.write_text(group("a", 1, seed=2))
    ours.process_config(do_usage=False)
    path.write_text(group("a", 1, seed=1))
    file.read()
    assert said(ours) == said(options_in(folder))


def test_only_a_group_that_has_changed_is_parsed_again(folder: Path) -> None:
    path = folder / "instances.conf"
    ours = options_in(folder)
    file = IncludeFile(str(path), ours)
    path.write_text(group("a", 2, 1) + group("b", 2, 1))
    file.read()
    before = said(ours)
    path.write_text(group("a", 2, 1) + group("b", 2, 2))
    file.read()
    after = said(ours)
    assert after["a"] is before["a"]
    assert after["b"] != before["b"]
    assert after["control"] is before["control"]


@pytest.mark.parametrize(
    "wrong", ["nonsense\n", "[group:b]\nprograms=nobody\n", "[program:b]\ncommand=%(x)s\n", "[x\n"]
)
def test_a_file_that_cannot_be_read_changes_nothing(folder: Path, wrong: str) -> None:
    path = folder / "instances.conf"
    path.write_text(group("a", 1, 1))
    ours = options_in(folder)
    file = IncludeFile(str(path), ours)
    file.read()
    path.write_text(wrong + group("a", 1, 2))
    before = said(ours)
    with pytest.raises(ValueError):
        file.read()
    assert said(ours) == before
    path.write_text(group("a", 1, 2))
    file.read()
    assert said(ours) == said(options_in(folder)) != before


def test_a_file_that_is_gone_has_no_groups(folder: Path) -> None:
    path = folder / "instances.conf"
    path.write_text(group("a", 1, 1))
    ours = options_in(folder)
    file = IncludeFile(str(path), ours)
    file.read()
    path.unlink()
    file.read()
    assert said(ours).keys() == {"control"}
