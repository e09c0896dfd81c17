"""The include file, read back with supervisor's own parser: whatever people write, each program gets its argv."""

import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from supervisor.options import ProcessConfig, ProcessGroupConfig, ServerOptions

from appliance.core import program, state
from appliance.core.instance import InstanceSpec
from appliance.core.problems import Problem
from appliance.core.program import MARKER
from appliance.core.settings import Settings
from appliance.core.state import State
from appliance.export.supervisord import instances_conf
from testing.specs import HOSTILE, LAW, configured, given_specs, spec

PYTHON = "/opt/py thon/bin/100% python"
Render = Callable[[State, Settings], dict[str, ProcessGroupConfig]]


def rendered(current: State, settings: Settings) -> str:
    return instances_conf(current, settings, PYTHON, "b0b0b0")


@pytest.fixture(scope="module")
def read_back(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Render, write, and parse as supervisord does: groups by name."""
    folder, turn = tmp_path_factory.mktemp("supervisor"), itertools.count()

    def parse(current: State, settings: Settings) -> dict[str, ProcessGroupConfig]:
        here = folder / str(next(turn))
        here.mkdir()
        (here / "instances.conf").write_text(rendered(current, settings), encoding="utf-8")
        (here / "supervisord.conf").write_text("[supervisord]\n[include]\nfiles=instances.conf\n")
        options = ServerOptions()
        options.realize(["-n", "-c", str(here / "supervisord.conf")])
        return {group.name: group for group in options.process_group_configs}

    return parse


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Supervisor refuses a log file in a folder that is not there."""
    return configured(log_dir=str(tmp_path_factory.mktemp("logs")), tei_binary_path="/opt/50% ;tei # 'x'/router")


def one(settings: Settings, **fields: Any) -> State:
    return state.add(State(), spec(**fields), settings, (), "now")


def assert_faithful(current: State, settings: Settings, groups: dict[str, ProcessGroupConfig]) -> None:
    assert sorted(groups) == sorted(current.instances)
    for name, instance in current.instances.items():
        configs: list[ProcessConfig] = groups[name].process_configs
        wanted = program.programs_of(instance, settings, PYTHON, "b0b0b0")
        assert [config.name for config in configs] == [f"{name}-{i}" for i in range(instance.spec.replicas)]
        for config, expected in zip(configs, wanted, strict=True):
            assert tuple(shlex.split(config.command)) == expected.argv  # supervisor/process.py splits it so
            assert config.environment == expected.environment
            assert config.autostart is expected.autostart
            assert config.stdout_logfile == expected.log_file
            assert (config.stopasgroup, config.killasgroup, config.redirect_stderr) == (True, True, True)
            assert config.stopwaitsecs == expected.stop_wait_secs


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:24])
def test_a_hostile_value_arrives_as_it_was_written(value: str, roomy: Settings, read_back: Render) -> None:
    arguments = [] if value.startswith("-") else [value]
    arguments += [f"--default-prompt={value}", f"x{value}", f"{value}x", "last"]
    current = one(roomy, model_id=f"m{value}m"[:500], revision=f"r{value}"[:200], extra_args=arguments)
    assert_faithful(current, roomy, read_back(current, roomy))


@pytest.mark.parametrize("value", ["%(here)s", "a %(here)s ;b", "%%(here)s", "'%(here)s'", "%(here)s/%(x)s"])
def test_here_is_not_expanded(value: str, roomy: Settings, read_back: Render) -> None:
    """Supervisor replaces %(here)s by plain text before it looks at percent signs, so doubling them is not enough."""
    current = one(roomy, model_id=f"m{value}", extra_args=[value, f"--default-prompt={value}"])
    assert_faithful(current, roomy, read_back(current, roomy))


@LAW
@given(given_specs(), given_specs())
@example({"name": "a", "model_id": "m"}, {"name": "a-0", "model_id": "m"})
def test_whatever_a_spec_takes_supervisor_starts(
    roomy: Settings, read_back: Render, first: dict[str, Any], second: dict[str, Any]
) -> None:
    current = State()
    for body in (first, second):
        plain = {key: value for key, value in body.items() if key not in ("port", "prometheus_port")}
        asked = InstanceSpec.parse({**plain, "replicas": min(plain.get("replicas", 1), 3)})
        if asked.name not in current.instances:
            current = state.add(current, asked, roomy, (), "now")
    current = state.stop(current, second["name"])
    assert_faithful(current, roomy, read_back(current, roomy))
    assert rendered(current, roomy) == rendered(current, roomy)


FOLDERS = ["log dir", "100%", "%(x)s", "a;b", "a#b", "a=b", "日本", "it's", "a ;b", "a #b", "%(here)s"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_logs_go_to_the_folder_whatever_its_name_or_the_name_is_refused(
    folder: str, tmp_path: Path, read_back: Render
) -> None:
    """A log_dir that supervisor cannot take must be a Problem at start, not a log in another place or no start."""
    (tmp_path / folder).mkdir()
    try:
        settings = configured(log_dir=str(tmp_path / folder))
    except Problem as problem:
        assert "log_dir" in problem.message  # noqa: PT017
        return
    (group,) = read_back(one(settings, name="a"), settings).values()
    assert group.process_configs[0].stdout_logfile == str(tmp_path / folder / "a-0.log")


def test_each_replica_gets_its_gpu_and_marker(roomy: Settings, read_back: Render) -> None:
    (group,) = read_back(one(roomy, name="a", replicas=3, gpu_ids=[4, 5]), roomy).values()
    assert [config.environment["CUDA_VISIBLE_DEVICES"] for config in group.process_configs] == ["4", "5", "4"]
    assert [config.environment[MARKER] for config in group.process_configs] == [f"b0b0b0:a:{i}:1" for i in range(3)]


def test_a_stopped_instance_stays_stopped_when_supervisord_starts(roomy: Settings, read_back: Render) -> None:
    current = state.add(one(roomy, name="off"), spec("on"), roomy, (), "now")
    groups = read_back(state.stop(current, "off"), roomy)
    assert {name: group.process_configs[0].autostart for name, group in groups.items()} == {"off": False, "on": True}


def test_no_instances_are_no_groups(roomy: Settings, read_back: Render) -> None:
    assert read_back(State(), roomy) == {}


def test_names_that_look_like_another_s_programs_stay_apart(roomy: Settings, read_back: Render) -> None:
    current = State()
    for name in ("a", "a-0", "a-0-0", "A", "program", "group-a", "supervisord", "include"):
        current = state.add(current, spec(name, replicas=2), roomy, (), "now")
    assert_faithful(current, roomy, read_back(current, roomy))


def test_the_same_state_gives_the_same_bytes_however_it_came_about(roomy: Settings) -> None:
    specs = [spec("a", port=20000, prometheus_port=21000), spec("b", port=20001, prometheus_port=21001)]
    there = state.add(state.add(State(), specs[0], roomy, (), "now"), specs[1], roomy, (), "now")
    back = state.add(state.add(State(), specs[1], roomy, (), "later"), specs[0], roomy, (), "later")
    assert rendered(there, roomy) == rendered(back, roomy)


@pytest.mark.parametrize("verb", [state.stop, state.restart, state.start])
def test_supervisor_sees_a_verb_as_a_change_of_that_group_alone(verb: Any, roomy: Settings, read_back: Render) -> None:
    before = state.add(one(roomy, name="a"), spec("b"), roomy, (), "now")
    first, again, after = (read_back(current, roomy) for current in (before, before, verb(before, "a")))
    assert first["a"].process_configs == again["a"].process_configs
    assert first["a"].process_configs != after["a"].process_configs
    assert first["b"].process_configs == after["b"].process_configs


def test_instances_that_the_directory_of_others_knows_are_not_started_here() -> None:
    current = state.add(State(), spec("a"), configured(), (), "now")
    assert "[group:a]" in rendered(current, configured())
    assert "[group:a]" not in rendered(current, configured(directory="static:/somewhere.toml"))
