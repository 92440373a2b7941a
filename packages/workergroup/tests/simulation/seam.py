# SPDX-License-Identifier: Apache-2.0
"""The seam between the simulation and the package: the functions that it replaces, and the shipped code that it runs.

All of them are here. The other modules of the simulation import no private module of the package.
"""

import contextlib
import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fairlead_workergroup import _world
from fairlead_workergroup._calls.call import Call
from fairlead_workergroup._membership import operations, places
from fairlead_workergroup._membership.core import Core
from fairlead_workergroup._membership.losses import late_error, start_error
from fairlead_workergroup._remote import setup as remote_facts
from fairlead_workergroup._start.worker_class import WorkerClass, describe_class
from fairlead_workergroup._world import Deadline

if TYPE_CHECKING:
    from .placement import PretendedPlacement
    from .ray import PretendedRay
    from .scheduler import SimulatedWorld

__all__ = [
    "Call",
    "Core",
    "Deadline",
    "WorkerClass",
    "late_error",
    "replaced",
    "replaced_by",
    "start_error",
]


@contextlib.contextmanager
def replaced_by(world: "SimulatedWorld") -> Iterator[None]:
    """Run in another world during a block."""
    before, _world.current = _world.current, world
    try:
        yield
    finally:
        _world.current = before


# What Ray tells a driver about itself.
CONTEXT = SimpleNamespace(
    namespace="simulated", get_job_id=lambda: "01", get_worker_id=lambda: "driver", get_node_id=lambda: "node-0"
)


def _wait_until(world: "SimulatedWorld", is_true: Callable[[], bool], seconds: float) -> bool:
    """Ask again and again until a condition holds, as `wait_until` does; the question may be a point itself."""
    deadline = world.now() + seconds
    while not is_true():
        if world.now() >= deadline:
            return False
        world.sleep(0.5)
    return True


def replacements(pretended: "PretendedRay", placement: "PretendedPlacement") -> dict[str, Any]:
    """Return what stands for each function of Ray, of placement, or of this package that leaves the seam."""
    from .actors import SimRef
    from .group import describe_model

    ours, world = "fairlead_workergroup", pretended.world
    return {
        # Ray's own functions, wherever they are called as `ray.kill`.
        "ray.kill": pretended.kill,
        "ray.cancel": pretended.cancel,
        "ray.is_initialized": lambda: True,
        # All requests to the head but `choose_alive`.
        f"{ours}._observe.query._ask": pretended.ask_head,
        f"{ours}._observe.query.choose_alive": pretended.choose_alive,
        f"{ours}._membership.losses.choose_alive": pretended.choose_alive,
        f"{ours}._membership.losses.collect": world.collect,
        f"{ours}._membership.owned.collect": world.collect,
        # All questions to nodes: `late_workers`, `find_ended`, `cancel_calls`.
        f"{ours}._observe.query.run_on_nodes": pretended.run_on_nodes,
        # Whether Ray is the one that the group was made on.
        f"{ours}._world.connection": lambda: "pretended",
        # Slots, ports, and actors, which are created by several threads.
        f"{ours}._membership.places.claim_slots": placement.claim_slots,
        f"{ours}._membership.provision.lease_ports": placement.lease_ports,
        f"{ours}._membership.provision.create_actors": placement.create_actors,
        f"{ours}._membership.provision.wait_started": placement.wait_started,
        # The class of the user is described once for all runs.
        f"{ours}._membership.provision.describe_class": describe_model,
        f"{ours}._arguments.ObjectRef": SimRef,
        f"{ours}._replies.ignore": lambda refs: None,
        # Variables of the driver.
        f"{ours}._membership.provision.forwarded_variables": lambda driver: {},
        # The table of environments in the pyproject.toml, which would be read for each group.
        f"{ours}._start.environment.known_actor_environments": dict,
        # What a group publishes for other processes.
        "ray.get_runtime_context": lambda: CONTEXT,
        f"{ours}._observe.board.publish": lambda key, version, data: None,
        f"{ours}._membership.provision.await_published": lambda key, **options: True,
        f"{ours}._observe.board.withdraw": lambda key: None,
        f"{ours}._group.release_when_dropped": lambda *_: None,
        f"{ours}._group.uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="simulated")),
        # Functions of this package that read the clock themselves, because agents need its times.
        f"{ours}._membership.owned.time": SimpleNamespace(monotonic=world.now, sleep=world.sleep),
        f"{ours}._membership.owned.wait_until": lambda is_true, until, **_: _wait_until(
            world, is_true, until - world.now()
        ),
        f"{ours}._membership.owned.choose_alive": pretended.choose_alive,
        f"{ours}._membership.owned.run_on_nodes": pretended.run_on_nodes,
        f"{ours}._observe.query.time": SimpleNamespace(monotonic=world.now),
        # How often waits look at the clock, or whether they are to be given up.
        f"{ours}._world.SLICE_S": math.inf,
        f"{ours}._world.LOOK_EVERY_S": 2.0,
    }


class _Notes(logging.Handler):
    """Adds what the package logs to the history of a run."""

    def __init__(self, pretended: "PretendedRay") -> None:
        super().__init__()
        self._world = pretended.world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"logs {record.getMessage()!r}")


@contextlib.contextmanager
def replaced(pretended: "PretendedRay") -> Iterator["PretendedPlacement"]:
    """Replace them during a block, in which the package logs to the history of the run; yield the placement."""
    from .placement import PretendedPlacement

    placement = PretendedPlacement(pretended)
    logger, notes = logging.getLogger("fairlead_workergroup"), _Notes(pretended)
    before: list[tuple[Any, str, Any]] = [(logger, "propagate", logger.propagate)]
    logger.addHandler(notes)
    logger.propagate = False
    try:
        # Without `patch`, which takes a tenth of the time of a run.
        for path, value in replacements(pretended, placement).items():
            module, _, name = path.rpartition(".")
            owner: Any = importlib.import_module(module)
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield placement
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
        logger.removeHandler(notes)


# Shipped code that pretended workers run.


def run_setup(worker: Any, name: str, *args: Any) -> Any:
    """Run a function of `_remote/setup.py` in a pretended worker, with its facts and its environment."""
    published: Any = SimpleNamespace(facts=worker.facts)
    own, remote_facts.os = remote_facts.os, SimpleNamespace(environ=worker.environ)  # type: ignore[assignment]
    sys.modules["_fairlead_worker"] = published
    try:
        return getattr(remote_facts, name)(worker, *args)
    finally:
        remote_facts.os = own
        del sys.modules["_fairlead_worker"]
        worker.facts = published.facts


# Shipped code of starts.


def describe(worker: type) -> WorkerClass:
    """Return the description of a class."""
    return describe_class(worker, asks=[{}], node_id="", runtime_env=None, timeout_s=0.0)


# Shipped code of calls.


def was_repeated(call: Call[Any]) -> bool:
    """Return whether a call was sent again to restarted workers."""
    return call._attempts > 0


# Fixes of defects that the group once had, each of which a function takes back.


def send_only_the_epoch(patch: Any) -> None:
    """Survivors of a restart are sent the number of the epoch, and no other facts."""
    apply = remote_facts.apply_facts

    def reverted(worker: Any, changes: Any, layout: Any = None) -> None:
        apply(worker, {"epoch": changes["epoch"]} if layout is None else changes, layout)

    patch.setattr(remote_facts, "apply_facts", reverted)


def forget_the_scope(patch: Any) -> None:
    """A resize restarts only the lost ranks, also with scope "group"."""
    resize = operations.resize

    class Asked:
        def __init__(self, core: Any) -> None:
            self.restarts_all = False
            self._core = core

        def __getattr__(self, name: str) -> Any:
            return getattr(self._core, name)

    def reverted(*args: Any) -> Any:
        made = resize(*args)
        return replace(made, plan=lambda now, core, until: made.plan(now, Asked(core), until))

    patch.setattr(operations, "resize", reverted)


def use_dead_slots(patch: Any) -> None:
    """Slots of dead nodes are chosen."""
    patch.setattr(places, "usable_slots", list)
