# SPDX-License-Identifier: Apache-2.0
"""Processes that ranks are about to move to: the class's module is imported, and its constructor has not run."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import ray

from fairlead_placement import Slot
from fairlead_placement.extension import head_deadline

from .._remote.facts import warm_up
from .._remote.process import mark_of
from .._start.environment import RANK_VARIABLES
from .._start.launch import create_actor
from .._world import Deadline
from .delivery import pickle_function
from .launcher import Launcher
from .shutdown import RunningWorker

# What the resources of a group know prepared processes by, in place of a rank. A number is never used again.
_numbers = itertools.count(-1, -1)


@dataclass(frozen=True)
class PreparedProcess:
    """One process without a rank; its number is its key in the resources of the group, in place of a rank."""

    number: int
    slot: Slot
    worker: RunningWorker


def check_alike(launcher: Launcher) -> None:
    """Refuse ranks in tied groups, and ranks that differ in what they need before they start."""
    workers = launcher.planned.workers
    if any(len(worker.place.tied_bundles[1]) > 1 for worker in workers):
        raise ValueError("replace needs workers that can take each other's place, and those of tied groups cannot")
    if odd := [one.place.rank for one in workers if one.options != workers[0].options]:
        raise ValueError(
            f"replace needs workers that start alike, but rank {odd[0]} has other options, or other variables that "
            "a process needs when it starts, than rank 0. Look at configure_worker and at the slots."
        )


def check_slots(launcher: Launcher, slots: Iterable[Slot]) -> None:
    """Refuse slots that have just been claimed and hold other resources; the caller releases the claims."""
    workers = launcher.planned.workers
    for slot in slots:
        if launcher.plan_in(slot).options != workers[0].options:
            raise ValueError(f"a process in {slot!r} could not take a rank's place: the slot holds other resources")


def prepare_processes(launcher: Launcher, slots: Sequence[Slot], deadline: Deadline) -> list[PreparedProcess]:
    """Start processes in slots, and wait until the class's module is loaded in all of them."""
    numbers = [next(_numbers) for _ in slots]
    token, resources, roster = launcher.spec.token, launcher.resources, launcher.resources.roster
    refs, waiting, pickled = [], [], pickle_function(warm_up)
    try:
        for number, slot in zip(numbers, slots, strict=True):
            plan = launcher.plan_in(slot)
            name = f"{plan.place.name}-{token[:6]}{number}"
            with head_deadline(deadline.left()):
                actor = create_actor(plan, launcher.worker_class, name)
            worker = RunningWorker(actor, slot.node_id, mark_of(token, number), name=name)
            resources.add({number: worker})
            if roster.is_over or resources.closed:  # the release may have begun before this process was known
                raise roster.ended_error()
            waiting.append(PreparedProcess(number, slot, worker))
            # Without what configure_worker sets for rank 0 alone: another rank may take this process.
            variables = {
                name: value
                for name, value in plan.environment.variables.items()
                if name not in RANK_VARIABLES
                and (
                    name in slot.env
                    or all(one.environment.variables.get(name) == value for one in launcher.planned.workers)
                )
            }
            near = [one.place for one in launcher.planned.workers if one.place.slot.node_id == slot.node_id]
            devices = launcher.device_facts(plan.place, [*near, plan.place])
            path, target = list(plan.environment.path), launcher.target
            refs.append(actor._fairlead_apply.remote("warm_up", pickled, variables, path, target, devices))
        answers = ray.get(refs, timeout=deadline.left())
    except BaseException:
        resources.discard(numbers)
        raise
    ready = []
    for one, answer in zip(waiting, answers, strict=True):
        worker = replace(one.worker, pid=answer["pid"], started=answer["started"])
        resources.add({one.number: worker})
        ready.append(replace(one, worker=worker))
    return ready
