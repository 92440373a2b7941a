# SPDX-License-Identifier: Apache-2.0
"""A script of the shipped group: callers, changers and a fault meet, then the group is shut down."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorUnavailableError

from fairlead_placement import PlacementError
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerGroupError

from .actors import HANG, Worker
from .group import Behaviour, make_group
from .invariants import Invariants
from .ray import PretendedRay
from .scheduler import SimulatedWorld, SimulationError
from .seam import replaced

CALLS = ("step", "slow", "fail", "meet")
CHANGES = ("grow", "shrink", "move", "restart")
FAULTS = (
    "none",
    "crash",
    "crash",
    "node",
    "silent head",
    "silent agent",
    "constructor raises",
    "constructor hangs",
    "hook raises",
    "hook hangs",
    "Ctrl-C in a changer",
    "Ctrl-C in a changer",
    "Ctrl-C in a changer",
    "Ctrl-C in a caller",
    "Ctrl-C in the shutdown",
)
# Faults by which no worker is lost.
HARMLESS = {one for one in FAULTS if one.startswith(("none", "Ctrl-C"))}
# Faults by which processes may outlive a shutdown, or by which a cleanup may fail.
MAY_STAY = ("crash", "silent", "node", "hook hangs", "Ctrl-C in the shutdown")
# How errors of changes end that the group refuses, because of its size or its slots.
REFUSED = (
    "use other slots.",
    "slots of another cluster (slots=...).",
    *(f"the group has ranks 0 to {last}" for last in range(8)),
)
# The time that a change may take, and a call.
CHANGE_S = 60.0
CALL_S = 20.0
# A silence is shorter than the requests to the head and the agents may take.
SILENCE_S = 8.0
# An agent may take this long to say what a late worker does.
LOOK_S = 12.0


@dataclass
class GroupRun:
    """One run of the script.

    Attributes:
        faults: the faults to choose from.
    """

    world: SimulatedWorld
    faults: tuple[str, ...] = FAULTS
    _meetings: int = field(default=0, init=False)

    def run(self) -> None:
        """Run the script."""
        world = self.world
        ray = PretendedRay(world)
        with replaced(ray) as placement:
            scope = ("worker", "group")[world.choose(2)]
            behaviour = Behaviour(ray, meets_on_restart=scope == "group")
            behaviour.install()
            self.chosen = {self.faults[world.choose(len(self.faults))] for _ in range(1 + world.choose(2))}
            restarts = bool(world.choose(2))
            world.note(f"has scope {scope!r}, on_failure={restarts}, and the faults {sorted(self.chosen)}")
            self.group = group = make_group(ray, restart=Restart(scope=scope, on_failure=restarts))
            self.invariants = Invariants(world, ray, group._core, placement)
            self._inject(ray, behaviour)
            works: list[tuple[str, Callable[[], object]]] = [("a", self._call), ("b", self._call)]
            works += [("changer", self._change)] + [("other changer", self._change)] * world.choose(2)
            tasks = [world.start_task(name, work) for name, work in works]
            if is_early := world.choose(4) == 3:  # the group is shut down while it is used
                tasks.append(world.start_task("ender", self._shut_down))
            world.join(tasks)
            if not is_early:
                self._check_rest(ray, group)
                world.join([world.start_task("ender", self._shut_down)])
            # A hook that raises in one worker may leave others in it, which wait for the first one.
            if not (group.shutdown() or self._has(*MAY_STAY) or (is_early and self._has("hook"))):
                raise SimulationError("shutdown: it has returned False")
            world.wait_for("waits for the end", lambda: not any(one.is_killed and one.is_running for one in ray.actors))
            self.invariants.check_ended()

    def _has(self, *faults: str) -> bool:
        """Return whether a fault was chosen that begins with one of these words."""
        return any(one.startswith(faults) for one in self.chosen)

    def _inject(self, ray: PretendedRay, behaviour: Behaviour) -> None:
        """Prepare the faults."""
        world = self.world
        for fault in sorted(self.chosen):
            if fault == "crash":
                ray.lose_actor()
            elif fault == "node":
                ray.lose_node("node-1")
            elif fault == "silent head":
                ray.silence(ray.head, SILENCE_S)
            elif fault == "silent agent":
                ray.silence(ray.nodes["node-1"], SILENCE_S)
            elif fault.startswith("constructor"):
                ray.construct = _fail_once(hangs=fault.endswith("hangs"))
            elif fault.startswith("hook"):
                behaviour.hook_fault = fault.removeprefix("hook ")
            elif fault.startswith("Ctrl-C"):
                world.press_ctrl_c({"changer": "changer", "caller": "a", "shutdown": "ender"}[fault.split()[-1]])

    def _call(self) -> None:
        """Make some calls; each ends in time, with a result or an error of a known kind."""
        for _ in range(2):
            # A call that is interrupted while it is sent reaches some workers only, which would wait for the others.
            calls = CALLS[:-1] if self._has("Ctrl-C in a caller") else CALLS
            self._call_once(calls[self.world.choose(len(calls))])

    def _call_once(self, name: str) -> None:
        world, group = self.world, self.group
        args, options = [], dict[str, Any](timeout=CALL_S)
        if name == "meet":
            self._meetings += 1
            args.append(self._meetings)
        if group._core.policy.on_failure:
            options["retries"] = world.choose(2)
        began = world.now()
        try:
            call = group.call(name, *args, **options)
            self.invariants.add(call)
            if name != "meet" and world.choose(4) == 3:
                call.cancel()
            call.result()
        except (WorkerGroupError, ActorUnavailableError) as error:
            # Whether a worker that does not answer is dead is known as long as the head and its agent answer.
            if isinstance(error, ActorUnavailableError) and not self._has("silent"):
                raise
            world.note(f"gets {type(error).__name__}")
        except RuntimeError as error:
            if "the method fails" not in str(error):
                raise
        self._check_time(name, began, CALL_S)

    def _change(self) -> None:
        """Change the group; each change ends in time, with an error of a known kind at most."""
        world, group = self.world, self.group
        for _ in range(1 + world.choose(2)):
            name, began = CHANGES[world.choose(len(CHANGES))], world.now()
            size = group.world_size
            world.note(f"requests: {name}")
            try:
                if name == "grow":
                    group.resize(dp=size + 1, timeout=CHANGE_S)
                elif name == "shrink":
                    group.resize(dp=max(1, size - 1), timeout=CHANGE_S)
                elif name == "move":
                    group.restart([world.choose(size)], elsewhere=bool(world.choose(4)), timeout=CHANGE_S)
                else:
                    group.restart_failed_workers()
            except (WorkerGroupError, PlacementError) as error:
                world.note(f"gets {type(error).__name__}: {str(error)[:200]}")
            except (IndexError, ValueError) as error:
                if not str(error).endswith(REFUSED):
                    raise
                world.note(f"is refused: {error}")
            except RuntimeError as error:
                if "the hook fails" not in str(error):
                    raise
            self._check_time(name, began, 4 * CHANGE_S)

    def _shut_down(self) -> None:
        self.group.shutdown(cleanup_method="clean_up" if self.world.choose(2) else None)

    def _check_time(self, name: str, began: float, limit_s: float) -> None:
        took = self.world.now() - began
        if took > limit_s + 1.0 + LOOK_S:
            raise SimulationError(f"too late: {name} has taken {took:.1f} s, and had {limit_s:g} s")

    def _check_rest(self, ray: PretendedRay, group: RayWorkerGroup) -> None:
        """Check what holds when nothing is under way any more."""
        world = self.world
        world.wait_for("waits for the change", lambda: group._changes._thread is None and not group._changes._queue)
        if self._has("silent"):
            world.sleep(2 * SILENCE_S)
        world.wait_for(
            "waits for rest",
            lambda: all(actor.is_known_dead or not (actor.is_busy or actor.is_killed) for actor in ray.actors),
            200.0,
        )
        self.invariants.check_at_rest()
        now = group._core.now
        if self.chosen <= HARMLESS and (now.lost or now.phase == "broken"):
            raise SimulationError(f"damage: no worker has failed, and the group has lost {now.lost}")


def _fail_once(*, hangs: bool) -> Callable[[Worker], Any]:
    """Return a constructor that fails in the first worker."""
    workers = list[Worker]()

    def construct(worker: Worker) -> Any:
        workers.append(worker)
        if len(workers) > 1:
            return None
        if hangs:
            return HANG
        raise RuntimeError("the constructor fails")

    return construct


def run_group(world: SimulatedWorld, **options: Any) -> None:
    """Run the script in a world."""
    GroupRun(world, **options).run()
