"""The events: the words of the journal, and the causes of restarts. `docs/operations.md` says what to do about each."""

from __future__ import annotations

from typing import Literal, get_args

from appliance.core.conditions import Condition

Event = Literal[
    "created",
    "deleted",
    "started",
    "stopped",
    "restarted",
    "ready",
    "died",
    "unhealthy",
    "recovered",
    "quarantined",
    "convicted",
    "moved",
    "reconciled",
    "orphan_ended",
    "state_repaired",
    Condition,
    "trouble_over",
    "open_to_the_network",
    "model_added",
    "model_deleted",
    "model_imported",
    "model_cancelled",
    "model_downloaded",
    "model_verified",
    "model_failed",
    "key_created",
    "key_revoked",
]
Cause = Literal["asked", "crash", "missed_probes", "wrong_answers"]  # of a restart

EVENTS: tuple[Event, ...] = get_args(Event)
CAUSES: tuple[Cause, ...] = get_args(Cause)
