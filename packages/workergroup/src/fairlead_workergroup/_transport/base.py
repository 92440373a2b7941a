# SPDX-License-Identifier: Apache-2.0
"""The interface of a transport, which carries the calls of a group instead of Ray."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .._membership.model import Snapshot
from .messages import Carrier


class Transport(Carrier, Protocol):
    """Carries the calls of a group while the group uses it.

    The calls of a group to one worker begin in the order in which they are sent, whatever carries them.

    Attributes:
        name: what explanations and statistics call it.
        most_waiting: the calls of a worker that may wait to be sent; further calls wait until there is room.
    """

    name: str
    most_waiting: int

    def encode(self, requests: Iterable[Any]) -> list[Any]:
        """Return requests in the form in which they are sent; it may run code of the user's classes."""

    def send(self, now: Snapshot, ranks: Sequence[int], encoded: Sequence[Any], *, yields_items: bool) -> list[Any]:
        """Send a request to each rank without waiting, and return an `Message` for each, or an `MessageStream`.

        All ranks get the call or, if Ctrl-C comes, none. `yields_items` says that the method is a generator.
        """

    def wait_for_room(self, ranks: Iterable[int], timeout_s: float | None) -> bool:
        """Wait while too many calls of these workers wait to be sent; return whether there is room in time."""

    def makes_way(self, ranks: Collection[int]) -> bool:
        """Return whether Ray can be given a call of these ranks now, in its turn; `wait_for_way` waits for that."""

    def wait_for_way(self, ranks: Collection[int], timeout_s: float | None) -> bool:
        """Wait until these workers have begun all earlier calls; return whether they have in time."""

    def detour(self, ranks: Iterable[int]) -> AbstractContextManager[None]:
        """Let these workers run Ray's calls that are sent in a block after all earlier calls, and before later ones."""

    def open(self, timeout_s: float) -> None:
        """Wait until the workers take calls, or raise an error that says which do not."""

    def stop(self) -> None:
        """Take no further call, and end when the earlier ones have been answered; do not wait."""

    def close(self, timeout_s: float) -> None:
        """Wait for the end, or raise an error that says which workers are late."""
