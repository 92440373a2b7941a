# SPDX-License-Identifier: Apache-2.0
"""The functions outside of the seam that the simulation replaces, all of them."""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from fairlead_placement.spi import Job
from fairlead_workergroup._lifecycle.resources import Resources

from .actors import SimRef
from .group import describe_model
from .placement import PretendedPlacement
from .ray import PretendedRay
from .scheduler import SimulatedWorld

# What Ray tells a driver about itself.
CONTEXT = SimpleNamespace(
    namespace="simulated", get_job_id=lambda: "01", get_worker_id=lambda: "driver", get_node_id=lambda: "node-0"
)


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


def _wait_until(world: SimulatedWorld, is_true: Callable[[], bool], seconds: float) -> bool:
    """Ask again and again until a condition holds, as `wait_until` does; the question may be a point itself."""
    deadline = world.now() + seconds
    while not is_true():
        if world.now() >= deadline:
            return False
        world.sleep(0.5)
    return True


def _run_in_thread(world: SimulatedWorld, function: Callable[[], Any]) -> Job[Any]:
    """Run a function on a task of its own, as `run_in_thread` does."""
    job: Job[Any] = Job(world.now())

    def run() -> None:
        try:
            job.future.set_result(function())
        except Exception as error:  # noqa: BLE001  it is the outcome
            job.future.set_exception(error)

    world.spawn("in the background", run)
    return job


def replacements(pretended: PretendedRay, placement: PretendedPlacement) -> dict[str, Any]:
    """Return what stands for each function of Ray, of placement, or of this package that leaves the seam."""
    ours, world = "fairlead_workergroup", pretended.world
    return {
        # Ray's own functions, wherever they are called as `ray.kill`.
        "ray.kill": pretended.kill,
        "ray.wait": pretended.wait,
        "ray.get": pretended.get,
        "ray.put": pretended.put,
        "ray.cancel": pretended.cancel,
        "ray.is_initialized": pretended.is_initialized,
        # All requests to the head but `choose_alive`.
        f"{ours}._observe.head._ask": pretended.ask_head,
        f"{ours}._observe.query.choose_alive": pretended.choose_alive,
        f"{ours}._observe.evidence.choose_alive": pretended.choose_alive,
        f"{ours}._observe.evidence.collect": world.collect,
        f"{ours}._lifecycle.shutdown.collect": world.collect,
        # All requests to the agents of nodes: `late_workers`, `find_ended`, `cancel_calls`.
        f"{ours}._observe.query.run_on_nodes": pretended.run_on_nodes,
        # Whether Ray is the one that the group was made on.
        f"{ours}._membership.roster.connection": pretended.connection,
        # References of the driver, and their sizes.
        f"{ours}._transport.messages.still_referenced": pretended.still_referenced,
        f"{ours}._transport.futures.object_sizes": lambda refs: [0] * len(refs),
        # A thread that fetches errors which no caller wants, so that Ray does not print them.
        f"{ours}._calls.execution.retrieve_late": lambda futures, owner: None,
        # Slots, ports, and actors, which are created by several threads.
        f"{ours}._lifecycle.resources.claim_slots": placement.claim_slots,
        f"{ours}._lifecycle.resources.lease_ports": placement.lease_ports,
        f"{ours}._lifecycle.launcher.create_actors": placement.create_actors,
        f"{ours}._lifecycle.launcher.wait_started": placement.wait_started,
        f"{ours}._lifecycle.standbys.create_actor": placement.create_actor,
        # The class of the user is described once for all runs.
        f"{ours}._lifecycle.launcher.describe_class": describe_model,
        f"{ours}._transport.arguments.ObjectRef": SimRef,
        # Variables of the driver.
        f"{ours}._start.launch.forwarded_variables": lambda driver: {},
        # The table of environments in the pyproject.toml, which would be read for each group.
        f"{ours}._start.environment.known_actor_environments": dict,
        # What a group publishes for other processes, and the extensions that are installed.
        "ray.get_runtime_context": lambda: CONTEXT,
        f"{ours}._observe.registration.publish": lambda key, version, data, **options: None,
        f"{ours}._observe.registration.await_published": lambda key, node_id, **options: True,
        f"{ours}._observe.registration.withdraw": lambda key, nodes: None,
        # It has a lock that is held while processes end, which is a wait.
        f"{ours}._group.Resources": lambda *args: Resources(*args, _ending=world.mutex(reentrant=True)),
        f"{ours}._group.extend": lambda group, group_id: None,
        f"{ours}._group.release_when_dropped": lambda *_: None,
        f"{ours}._group.uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="simulated")),
        # Terminals.
        f"{ours}._lifecycle.delivery.Bar": NoBar,
        # Functions of this package that read the clock themselves, because agents need its times.
        f"{ours}._lifecycle.shutdown.time": SimpleNamespace(monotonic=world.now, sleep=world.sleep),
        f"{ours}._lifecycle.shutdown.wait_until": lambda is_true, until, **_: _wait_until(
            world, is_true, until - world.now()
        ),
        f"{ours}._lifecycle.shutdown.choose_alive": pretended.choose_alive,
        f"{ours}._lifecycle.shutdown.run_on_nodes": pretended.run_on_nodes,
        f"{ours}._observe.query.time": SimpleNamespace(monotonic=world.now),
        # Threads for which the end of a group waits.
        f"{ours}._lifecycle.resources.run_in_thread": lambda function: _run_in_thread(world, function),
        f"{ours}._lifecycle.resources.wait": lambda futures, seconds: world.wait_for(
            "joins the threads of a group", lambda: all(one.done() for one in futures), seconds
        ),
        # How often waits look at the clock, or whether they are to be given up.
        f"{ours}._world.SLICE_S": math.inf,
        f"{ours}._lifecycle.delivery.LOOK_EVERY_S": 2.0,
        f"{ours}._lifecycle.shutdown.LOOK_EVERY_S": 2.0,
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
