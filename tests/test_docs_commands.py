"""Every command, flag, target of make and extra that a page names exists, also within sentences.

A check takes the text of a page and returns complaints: so a test can plant an error in a page, and see it found.
"""

import argparse
import configparser
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from appliance.cli.instances import parse_field
from appliance.cli.main import parser
from appliance.core import engine_flags
from appliance.core.instance import OWNED_FLAGS, InstanceSpec, extra_arg
from appliance.core.problems import Problem
from tests.pages import PAGES, ROOT, blocks, paragraphs, planted, spans

PARSER = parser()
OURS = re.compile(r"(?:^|[\s($`])(?:[\w./-]*/bin/)?appliance((?: +(?:'[^']*'|\"[^\"]*\"|[^\s`'\")|&>]+))+)")
EXEC = re.compile(r"command: \[appliance, ([^\]]+)\]")
MAKE = re.compile(r"\bmake ([a-z0-9-]+)\b")
INSTALLED = re.compile(
    r"\b(?:pip|pipx|uv pip) install ((?:'[^']*'|[^\s`'()]+)(?: +(?:'[^']*'|[^\s`'()]+))*)|\buvx (\S+)"
)
PULLED = re.compile(r"docker pull (?:\S+/)?(tei-appliance\S*)")
REQUIREMENT = re.compile(r"([A-Za-z][\w.-]*|\.)(?:\[([\w, -]+)\])?")
# Flags of programs that are not ours, where a page names one without its command.
FOREIGN = set(
    "--build-arg --cpus --cpuset-cpus --env --gpus --no-deps --require-hashes --stop-timeout --volume -H".split()
)


class Command(NamedTuple):
    """What stands behind `appliance`."""

    words: list[str]
    line: int


def commands(text: str) -> Iterator[Command]:
    for span in spans(text):
        if re.match(r"\S*\bappliance |docker exec |exec: ", span.text):
            yield from commands_in(span.text, span.line)
    for block in blocks(text):
        for offset, line in enumerate(block.lines):
            yield from commands_in(line, block.line + offset)


def commands_in(text: str, line: int) -> Iterator[Command]:
    # `docker exec appliance appliance status`: the first is the container.
    text = re.sub(r"docker exec (?:appliance|…) (?=appliance )", "", text)
    if re.match(r"docker |--name|(?:image|name|app):", text):
        return
    for found in OURS.finditer(text.partition(" #")[0]):
        yield Command(shlex.split(found[1].replace("…", "")), line)
    for found in EXEC.finditer(text):
        yield Command(re.split(r",\s*", found[1]), line)


def options_of(tree: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in tree._actions for name in action.option_strings}


def verbs_of(tree: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = [action.choices for action in tree._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(groups[0]) if groups else {}


def no_such_commands(text: str) -> list[str]:
    """Verbs that there are not, and flags that a verb does not take."""
    return [complaint for command in commands(text) for complaint in wrong_in(command)]


def wrong_in(command: Command) -> Iterator[str]:
    tree, name, value = PARSER, "appliance", False
    for word in command.words:
        verbs, options = verbs_of(tree), options_of(tree)
        if value:  # of the flag before it
            value = False
        elif word.startswith("-"):
            flag, given, _ = word.partition("=")
            if flag not in options:
                yield f"line {command.line}: {name} takes no {flag}"
            else:
                value = not given and options[flag].nargs != 0
        elif verbs:
            for each in word.split("|"):
                if each not in verbs:
                    yield f"line {command.line}: there is no {name} {each}"
                    return
            tree, name = verbs[word.split("|")[0]], f"{name} {word}"


def all_flags(tree: argparse.ArgumentParser) -> set[str]:
    inner = [all_flags(each) for each in verbs_of(tree).values()]
    return set(options_of(tree)).union(*inner)


def no_such_flags(text: str) -> list[str]:
    """Flags that a sentence names by themselves: ours, or those of an engine."""
    known = all_flags(PARSER) | all_flags(engine_flags.parser(add_help=True)) | FOREIGN
    named = [(span, span.text.split()[0].partition("=")[0]) for span in spans(text) if re.match(r"-\D", span.text)]
    return [f"line {span.line}: nobody takes {flag}" for span, flag in named if flag not in known]


def flags_of_fields(text: str) -> list[str]:
    """Flags that a sentence about extra_args names, and that are refused there, because they are fields."""
    found = []
    for paragraph, line in paragraphs(text):
        for sentence in re.split(r"(?<=\.)\s", paragraph):
            named = [span.text.split()[0] for span in spans(sentence) if span.text.startswith("--")]
            if "`extra_args`" in sentence:
                found += [f"line {line}: extra_args takes no {flag}" for flag in named if is_owned(flag)]
    return found


def is_owned(flag: str) -> bool:
    try:
        extra_arg(flag)
    except ValueError:
        return flag in OWNED_FLAGS
    return False


def wrong_sets(text: str) -> list[str]:
    """`--set field=value`"""
    found = []
    for span in spans(text):
        if span.text.startswith("--set "):
            key, value = parse_field(shlex.split(span.text)[1])
            try:
                InstanceSpec.parse({"name": "a", "model_id": "m", key: value})
            except Problem as problem:
                found.append(f"line {span.line}: {problem.message}")
    return found


def no_such_targets(text: str) -> list[str]:
    there = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = [(name, span.line) for span in spans(text) for name in re.findall(r"^make ([a-z0-9-]+)\b", span.text)]
    for block in blocks(text):
        named += [(name, block.line) for line in block.lines for name in re.findall(r"^make ([a-z0-9-]+)\b", line)]
    return [f"line {line}: make has no {name}" for name, line in named if name not in there]


def wrong_installs(text: str) -> list[str]:
    """Extras that setup.cfg does not have, files that are not here, and our package by its name, which is nobody's on
    the public index: whoever registers it would be installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras, own = set(setup["options.extras_require"]), setup["metadata"]["name"]
    found = []
    for command in INSTALLED.finditer(text):
        line = text.count("\n", 0, command.start()) + 1
        words = [word.strip("'\"") for word in re.findall(r"'[^']*'|\S+", command[1] or command[2])]
        for flag, word in zip(["", *words], words):
            if flag == "-r":
                found += [f"line {line}: there is no {word}"] * (not (ROOT / word).is_file())
            elif requirement := REQUIREMENT.match(word):
                name, chosen = requirement[1], re.split(r",\s*", requirement[2] or "")
                found += [f"line {line}: {name} is not on the index: install the checkout"] * (name == own)
                unknown = [each for each in chosen if each and name in (own, ".") and each not in extras]
                found += [f"line {line}: there is no extra {each}" for each in unknown]
    return [*found, *(f"{image} is on no registry" for image in PULLED.findall(text))]


CHECKED = (no_such_commands, no_such_flags, flags_of_fields, wrong_sets, no_such_targets, wrong_installs)


@pytest.mark.parametrize("check", CHECKED)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists(page: str, check: Any) -> None:
    assert check(PAGES[page]) == []


def test_many_commands_are_looked_at() -> None:
    assert len([command for text in PAGES.values() for command in commands(text)]) > 50


def leaves(tree: argparse.ArgumentParser, name: str = "appliance") -> dict[str, argparse.ArgumentParser]:
    """The commands, by their verbs."""
    inner = [leaves(each, f"{name} {verb}") for verb, each in verbs_of(tree).items()]
    return {key: each for found in inner for key, each in found.items()} or {name: tree}


def test_every_command_takes_json() -> None:
    """As CONTRIBUTING.md says."""
    assert [name for name, tree in leaves(PARSER).items() if "--json" not in options_of(tree)] == []


def test_no_message_of_the_code_installs_what_is_nobodys() -> None:
    told = {path.name: wrong_installs(path.read_text()) for path in (ROOT / "appliance").rglob("*.py")}
    assert {name: complaints for name, complaints in told.items() if complaints} == {}


# -- planted errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "page", "old", "new"),
    [
        (no_such_commands, "deployment.md", "`appliance logs NAME`\nread", "`appliance instances\nlogs NAME` read"),
        (no_such_commands, "operations.md", "`appliance doctor`", "`appliance diagnose`"),
        (no_such_commands, "operations.md", "`appliance status --watch`", "`appliance status --follow`"),
        (no_such_commands, "operations.md", "`appliance keys create NAME admin`", "`appliance keys make NAME admin`"),
        (no_such_commands, "README.md", "appliance logs minilm --lines 5", "appliance logs minilm --last 5"),
        (no_such_commands, "README.md", "$(appliance keys create me admin)", "$(appliance key create me admin)"),
        (no_such_commands, "README.md", "--config etc/appliance.toml version", "--conf=etc/appliance.toml version"),
        (no_such_commands, "deployment.md", "command: [appliance, status,\n--ready]", "command: [appliance, probe]"),
        (
            no_such_commands,
            "deployment.md",
            "appliance appliance instances create",
            "appliance appliance instance create",
        ),
        (no_such_flags, "README.md", "`--runtime openvino`", "`--backend openvino`"),
        (no_such_flags, "moving-in.md", "`--max-message-size-mb`", "`--max-message-mb`"),
        (no_such_flags, "security.md", "With `--json`", "With `--as-json`"),
        (flags_of_fields, "README.md", "`--runtime torch`", "`--pooling mean`"),
        (wrong_sets, "deployment.md", "`--set engine=embedded`", "`--set engine=onnx`"),
        (wrong_sets, "deployment.md", "`--set engine=embedded`", "`--set backend=embedded`"),
        (no_such_targets, "README.md", "`make soak`", "`make soaking`"),
        (no_such_targets, "CONTRIBUTING.md", "make check    #", "make checks   #"),
        (wrong_installs, "README.md", "'.[openvino]'", "'.[vino]'"),
        (wrong_installs, "README.md", "--editable '.[openvino]'", "'tei-appliance[openvino]'"),
        (wrong_installs, "README.md", "--editable '.[openvino]'", "tei-appliance"),
        (wrong_installs, "deployment.md", "-r requirements.lock", "-r requirements.txt"),
        (wrong_installs, "deployment.md", "docker exec appliance appliance status", "docker pull tei-appliance:1.0"),
    ],
)
def test_a_planted_command_is_found(check: Any, page: str, old: str, new: str) -> None:
    assert len(check(planted(page, old, new))) == 1
