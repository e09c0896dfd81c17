"""A rolling restart: one replica after the other gets a new process, and the others answer meanwhile.

Theory of operation. The state has the replicas that are left, each with the process that is to be replaced; everything
else is seen at each look, so that whoever takes over goes on where it stands.

    the first that is left                      the others           then
    its old process lives                       all answer, or stop  stop it
    its old process lives                       one does not         wait
    its old process lives, and gets no traffic  any                  stop it
    it is stopped                               any                  start it
    its new process answers                     any                  done: the next one
    the new one is quarantined                  any                  give up; what is left keeps its process
    anything else (stopping, loading)           any                  wait

One that is stopped goes before the first, and then one that gets no traffic because it hangs: it may be that nobody
else starts the one and ends the other, and the rest wait until it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from appliance.core.state import State, healed, with_instance
from appliance.core.status import ALIVE

STARTABLE = ("STOPPED", "EXITED", "FATAL")


class Step(StrEnum):
    WAIT = "wait"
    STOP = "stop"
    START = "start"
    DONE = "done"
    GIVE_UP = "give up"


class Seen(NamedTuple):
    """One replica at a look. state: supervisor's, or ABSENT. answers: its present process does. ejected: it gets no
    traffic."""

    state: str
    pid: int | None
    answers: bool
    quarantined: bool = False
    ejected: bool = False


def next_replica(rolling: Mapping[int, int], replicas: Mapping[int, Seen]) -> int:
    """Whose turn it is, of those that are left."""
    left = [each for each in rolling if not replicas[each].quarantined]
    stopped = [each for each in left if replicas[each].state in STARTABLE]
    hung = [each for each in left if replicas[each].ejected and replicas[each].pid == rolling[each]]
    return next(iter([*stopped, *hung, *rolling]))


def next_step(old_pid: int, replica: Seen, others: Mapping[int, Seen]) -> Step:
    """old_pid: of the process to be replaced; 0 where there was none."""
    if replica.quarantined:
        return Step.GIVE_UP
    if replica.state in STARTABLE:
        return Step.START
    if replica.state not in ALIVE or replica.pid is None:
        return Step.WAIT
    if replica.pid == old_pid:
        can_go = replica.ejected or all(map(is_settled, others.values()))
        return Step.STOP if can_go else Step.WAIT
    return Step.DONE if replica.answers else Step.WAIT


def is_settled(other: Seen) -> bool:
    """Whether waiting for it is of no use: it answers, or it is stopped, by the monitor or with supervisorctl."""
    return other.answers or other.quarantined or other.state == "STOPPED"


def roll(state: State, name: str, launch: int, rolling: Mapping[int, int]) -> State:
    """Replicas of a running instance that are to be restarted one after the other; none: no more. What stood with its
    replicas ends."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or instance.wanted != "running":
        return state
    there = {replica: pid for replica, pid in rolling.items() if replica < instance.spec.replicas}
    return with_instance(state, replace(healed(instance) if there else instance, rolling=there))


def rolled(state: State, name: str, launch: int, replica: int) -> State:
    """One of them was restarted."""
    instance = state.instances.get(name)
    if instance is None or instance.launch != launch or replica not in instance.rolling:
        return state
    left = {each: pid for each, pid in instance.rolling.items() if each != replica}
    return with_instance(state, replace(instance, rolling=left))
