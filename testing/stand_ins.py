"""Stand-ins for what a test of decisions does not want to run."""

from __future__ import annotations

from typing import Any


class QuietSupervisor:
    """A supervisord that has nothing to do."""

    def require(self) -> None:
        pass

    def answers(self) -> bool:
        return False

    def difference(self) -> tuple[list[str], list[str], list[str]]:
        return [], [], []

    def processes(self) -> list[Any]:
        return []

    def members(self, group: str, names: list[str]) -> list[Any]:
        return []


class EmptyStore:
    """A store of the cache that keeps nothing."""

    evicted = 0

    def get_many(self, fingerprint: str, keys: Any) -> dict[bytes, bytes]:
        return {}

    def put_many(self, fingerprint: str, values: Any) -> None:
        pass

    def close(self) -> None:
        pass
