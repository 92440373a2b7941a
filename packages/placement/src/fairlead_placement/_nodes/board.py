# SPDX-License-Identifier: Apache-2.0
"""The facts that processes publish at a node's agent for other processes of the cluster. Runs in the agent's process.

Shipped by value, as `agent_process`: it imports the standard library only.
"""

import threading
from dataclasses import dataclass
from typing import Any

# How many keys that were withdrawn are kept, so that a late request does not publish one again.
WITHDRAWN_KEPT = 10_000


@dataclass(frozen=True)
class _Entry:
    version: int
    value: Any
    owner: str


class Board:
    """The values by key. Requests may arrive in any order: each has a version, and an older one changes nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._withdrawn: dict[str, None] = {}

    def publish(self, key: str, version: int, value: Any, owner: str) -> None:
        """Publish a value, in place of an older one with this key."""
        with self._lock:
            old = self._entries.get(key)
            if key not in self._withdrawn and (old is None or old.version < version):
                self._entries[key] = _Entry(version, value, owner)

    def withdraw(self, key: str) -> None:
        """Remove a value for good. Can be repeated."""
        with self._lock:
            self._entries.pop(key, None)
            self._withdrawn[key] = None
            while len(self._withdrawn) > WITHDRAWN_KEPT:
                del self._withdrawn[next(iter(self._withdrawn))]

    def published(self) -> dict[str, Any]:
        """Return the values by key, in the order of the keys."""
        with self._lock:
            return {key: entry.value for key, entry in sorted(self._entries.items())}

    def newer(self, key: str, version: int) -> tuple[int, Any]:
        """Return the version of a value, and the value if the version is above `version`; (0, None) without a value."""
        with self._lock:
            entry = self._entries.get(key)
        return (0, None) if entry is None else (entry.version, entry.value if entry.version > version else None)

    def versions(self, owner: str) -> dict[str, int]:
        """Return the versions of what a process has published, by key."""
        with self._lock:
            return {key: entry.version for key, entry in self._entries.items() if entry.owner == owner}
