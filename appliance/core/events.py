"""The events: the words of the journal, and the causes of restarts. `docs/operations.md` says what to do about each."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    CREATED = "created"
    DELETED = "deleted"
    CHANGED = "changed"
    REPLACED = "replaced"
    FELL_BACK = "fell_back"
    STARTED = "started"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    ROLLED = "rolled"
    ROLL_ENDED = "roll_ended"
    SLEPT = "slept"
    WOKEN = "woken"
    READY = "ready"
    DIED = "died"
    UNHEALTHY = "unhealthy"
    RECOVERED = "recovered"
    QUARANTINED = "quarantined"
    CONVICTED = "convicted"
    MOVED = "moved"
    RECONCILED = "reconciled"
    ORPHAN_ENDED = "orphan_ended"
    STATE_REPAIRED = "state_repaired"
    MOVED_IN = "moved_in"
    EXPRESS_REJECTED = "express_rejected"
    CACHE_PURGED = "cache_purged"
    CACHE_DAMAGED = "cache_damaged"
    CACHE_FAILED = "cache_failed"
    CACHE_RECOVERED = "cache_recovered"
    # Conditions of the machine (`core.conditions`)
    DISK_FULL = "disk_full"
    READ_ONLY = "read_only"
    NO_DESCRIPTORS = "no_descriptors"
    DISK_FAILING = "disk_failing"
    STATE_UNREADABLE = "state_unreadable"
    KEYS_UNREADABLE = "keys_unreadable"
    GPU_LOST = "gpu_lost"
    CONDITION_OVER = "trouble_over"
    OPEN_TO_THE_NETWORK = "open_to_the_network"
    MODEL_ADDED = "model_added"
    MODEL_DELETED = "model_deleted"
    MODEL_IMPORTED = "model_imported"
    MODEL_CANCELLED = "model_cancelled"
    MODEL_DOWNLOADED = "model_downloaded"
    MODEL_VERIFIED = "model_verified"
    MODEL_FAILED = "model_failed"
    KEY_CREATED = "key_created"
    KEY_REVOKED = "key_revoked"


class Cause(StrEnum):
    """Of a restart."""

    ASKED = "asked"
    CRASH = "crash"
    MISSED_PROBES = "missed_probes"
    WRONG_ANSWERS = "wrong_answers"
