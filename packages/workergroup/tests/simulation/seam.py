# SPDX-License-Identifier: Apache-2.0
"""The functions outside of the seam that the simulation replaces, all of them."""

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from .placement import PretendedPlacement
from .ray import PretendedRay


class NoBar:
    """A progress bar that shows nothing."""

    def __init__(self, what: str, total: int | None) -> None:
        pass

    def show(self, done: int, *, waiting_for: Sequence[int] = ()) -> None:
        pass

    def __enter__(self) -> "NoBar":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoLog:
    """A log of calls that notes nothing, in place of `RequestLog`, which needs memory that agents read."""

    def begin(self, method: str, began: float, futures: Sequence[Any]) -> int:
        return 0

    def end(self, entries: Sequence[int], *, failed: bool = False, ended: float | None = None) -> None:
        pass

    def mark(self, name: str) -> None:
        pass


def _end_workers(pretended: PretendedRay, workers: Mapping[int, Any]) -> list[str]:
    """Kill workers and wait until they are gone, as `kill_and_wait` does."""
    actors = [worker.handle.actor for worker in workers.values()]
    for worker in workers.values():
        pretended.kill(worker.handle)
    pretended.world.wait_for(
        f"waits for the end of {len(actors)} workers", lambda: not any(one.is_running for one in actors), 20.0
    )
    return [f"pid {one.key[0]} on {one.node.id}" for one in actors if one.is_running]


def replacements(pretended: PretendedRay, placement: PretendedPlacement) -> dict[str, Any]:
    """Return what stands for each function of Ray, of placement, or of this package that leaves the seam."""
    ours = "fairlead_workergroup"
    return {
        # Ray's own functions, wherever they are called as `ray.kill`.
        "ray.kill": pretended.kill,
        "ray.wait": pretended.wait,
        "ray.get": pretended.get,
        "ray.put": pretended.put,
        "ray.cancel": pretended.cancel,
        "ray.is_initialized": pretended.is_initialized,
        # All requests to the head but `choose_alive`.
        f"{ours}._head._ask": pretended.ask_head,
        f"{ours}._observe.query.choose_alive": pretended.choose_alive,
        f"{ours}._observe.evidence.choose_alive": pretended.choose_alive,
        # All requests to the agents of nodes: `late_workers`, `find_ended`, `cancel_calls`.
        f"{ours}._observe.query.run_on_nodes": pretended.run_on_nodes,
        # Whether Ray is the one that the group was made on.
        f"{ours}._membership.roster.connection": pretended.connection,
        # References of the driver, and their sizes.
        f"{ours}._calls.overlapping.still_referenced": pretended.still_referenced,
        f"{ours}._calls.errors.still_referenced": pretended.still_referenced,
        f"{ours}._futures.object_sizes": lambda refs: [0] * len(refs),
        # A thread that fetches errors which no caller wants, so that Ray does not print them.
        f"{ours}._calls.execution.retrieve_late": lambda futures, owner: None,
        # Slots, ports, and actors, which are created by several threads.
        f"{ours}._lifecycle.resources.claim_slots": placement.claim_slots,
        f"{ours}._lifecycle.resources.lease_ports": placement.lease_ports,
        f"{ours}._lifecycle.launcher.create_actors": placement.create_actors,
        f"{ours}._lifecycle.launcher.wait_started": placement.wait_started,
        # Terminals.
        f"{ours}._lifecycle.delivery.Bar": NoBar,
        # Ends processes with pauses of real time.
        f"{ours}._lifecycle.resources.kill_and_wait": lambda workers: _end_workers(pretended, workers),
    }


class _Notes(logging.Handler):
    """Adds what the package logs to the history of a run."""

    def __init__(self, pretended: PretendedRay) -> None:
        super().__init__()
        self._world = pretended.world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"logs {record.getMessage()!r}")


@contextlib.contextmanager
def replaced(pretended: PretendedRay) -> Iterator[PretendedPlacement]:
    """Replace them during a block, in which the package logs to the history of the run; yield the placement."""
    placement = PretendedPlacement(pretended)
    logger, notes = logging.getLogger("fairlead_workergroup"), _Notes(pretended)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.object(logger, "propagate", False))
        logger.addHandler(notes)
        undo.callback(logger.removeHandler, notes)
        for path, value in replacements(pretended, placement).items():
            module, _, name = path.rpartition(".")
            undo.enter_context(patch.object(importlib.import_module(module), name, value))
        yield placement
