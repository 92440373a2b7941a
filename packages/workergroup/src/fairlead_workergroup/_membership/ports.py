# SPDX-License-Identifier: Apache-2.0
"""The outside of a change: the processes of a group, requests to its workers, and methods of the user."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from .._world import Deadline
from ..exceptions import LateWorker, WorkerFailure
from .facts import WorkerFacts
from .model import Member, Place, Snapshot, Started
from .operations import Facilities, Plan


class Staged(Protocol):
    """The resources of the next epoch, acquired and not used yet."""

    @property
    def places(self) -> Sequence[Place]:
        """The place of each rank."""


S = TypeVar("S", bound=Staged)


class Crew(Facilities, Protocol[S]):
    """Acquires, starts and ends the processes of a group."""

    def acquire(self, before: Snapshot, plan: Plan, undo: ExitStack, deadline: Deadline) -> S:
        """Get slots, processes and the environment for a plan; put what reverts that on the stack first."""

    def start(
        self, staged: S, ranks: Sequence[int], undo: ExitStack, deadline: Deadline, check: Callable[[], None]
    ) -> list[Started]:
        """Start the processes of ranks with the facts of the next epoch, until their constructors have finished."""

    def facts(self, staged: S) -> tuple[WorkerFacts, ...]:
        """Return the facts of each rank in the next epoch."""

    def check_head(self) -> None:
        """Check that processes can start, before others end for them."""

    def commit(self, staged: S) -> None:
        """Use what was staged from now on."""

    def publish(self, *, wait: bool) -> None:
        """Let handles of other processes see the members; with `wait`, wait a moment until those that look now do."""

    def end(self, ranks: Sequence[int]) -> list[str]:
        """End the processes of ranks; return descriptions of those that are still there."""

    def discard(self, ranks: Sequence[int]) -> None:
        """End the processes of ranks that have left the group, and forget them."""

    def settle(self) -> None:
        """Give back what the group does not use any more."""


class Transport(Protocol):
    """The requests of a change to workers that keep running."""

    def quiesce(
        self, members: Sequence[Member], deadline: Deadline, check: Callable[[], None]
    ) -> tuple[LateWorker, ...]:
        """Wait until the calls of these workers that have begun have ended; return those that are late."""

    def send_facts(self, member: Member, changes: Mapping[str, Any], deadline: Deadline, *, alone: bool) -> Any:
        """Send a worker the facts that change, through the queue of its calls; return a future."""

    def wait_for(
        self, futures: Mapping[Any, Any], deadline: Deadline, what: str, check: Callable[[], None]
    ) -> tuple[dict[Any, Exception], list[Any]]:
        """Wait for futures by key; return the errors, and the keys of the late ones."""

    def explain(self, member: Member, error: Exception, what: str) -> WorkerFailure:
        """Return why a worker did not take part in a change, after some words about what it did."""

    def drain(self, members: Sequence[Member], deadline: Deadline, check: Callable[[], None]) -> Sequence[int]:
        """Wait until workers that leave have finished their calls; return the late ranks."""


class Turns(Protocol):
    """The calls of a group, which wait while a change begins an epoch."""

    def begin_change(self) -> None:
        """Let no further call pass."""

    def end_change(self, error: BaseException | None = None) -> bool:
        """Let calls pass again; return whether some still wait for a restart. `error` is why the change has failed."""

    def refuse_waiting(self) -> None:
        """Wake all calls that wait, because the group ends."""


class HookCall(Protocol):
    """A method of the user's class that runs on workers."""

    @property
    def called_workers(self) -> list[int] | None:
        """The ranks, by position."""

    @property
    def futures(self) -> list[Any]:
        """The future of each worker, by position."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all workers, and raise what they raise."""


class Hooks(Protocol):
    """The methods of the user's class that run when the membership changes."""

    timeout_s: float  # how long each of them may take

    def on_restart(self, ranks: Sequence[int], deadline: Deadline) -> Sequence[HookCall]:
        """Send `Restart.method` to ranks; do not wait."""

    def on_resize(self, ranks: Sequence[int], deadline: Deadline) -> Sequence[HookCall]:
        """Send `on_resize` to ranks; do not wait."""
