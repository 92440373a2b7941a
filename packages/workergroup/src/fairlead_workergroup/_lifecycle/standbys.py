# SPDX-License-Identifier: Apache-2.0
"""Processes that wait to become workers: the class's module is imported in them, and its constructor has not run."""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import ray

from fairlead_placement import PlacementError, Slot
from fairlead_placement.spi import head_deadline

from .._membership.model import Place, WorkerProcess
from .._observe.head import REQUEST_S, alive_nodes
from .._ray_private import actor_id_of
from .._remote.facts import warm_up
from .._remote.process import mark_of
from .._start.environment import RANK_VARIABLES
from .._start.launch import create_actor
from .._world import Deadline
from .delivery import pickle_function
from .launcher import Launcher
from .resources import usable_slots
from .shutdown import RunningWorker

logger = logging.getLogger(__name__)

# What the resources of a group know standbys by, in place of a rank. A number is never used again.
_numbers = itertools.count(-1, -1)


@dataclass(frozen=True)
class Standby:
    """One process that waits; its number is its key in the resources of the group, in place of a rank."""

    number: int
    slot: Slot
    worker: RunningWorker

    @property
    def process(self) -> WorkerProcess:
        """Its identity for the judge."""
        worker, actor_id = self.worker, actor_id_of(self.worker.handle)
        return WorkerProcess(self.number, {}, worker.node_id, self.slot.node_ip, *worker.key, actor_id)


class Standbys:
    """Keep `count` processes ready to take over the ranks of lost workers."""

    def __init__(self, launcher: Launcher, count: int) -> None:
        self.count = count
        self._launcher = launcher
        self._resources = launcher.resources
        self._roster = launcher.resources.roster
        # The lock of the roster protects these: each slot is in one of the lists, and one thread fills.
        self._warm: list[Standby] = []
        # Slots without a process, those in which one is starting, and those in which what is left of one is ended.
        self._cold: list[Slot] = []
        self._starting: list[Slot] = []
        self._ending: list[Slot] = []
        self._is_filling = False
        self._resources.standby_slots = lambda: self.slots

    @property
    def slots(self) -> list[Slot]:
        """The slots that are kept for standbys."""
        with self._roster.lock:
            return [*(standby.slot for standby in self._warm), *self._cold, *self._starting, *self._ending]

    def reserve(self, slots: Sequence[Slot]) -> None:
        """Claim some of these slots for standbys, as the group is made."""
        if self.count == 0:
            return
        self.check_alike("standby")
        chosen = self._resources.claim_free(slots, self.count)
        if len(chosen) < self.count:
            raise ValueError(
                f"standby={self.count} needs slots that the group does not use, and there are {len(chosen)}. Reserve "
                "more, or leave some free with workers_per_node."
            )
        self.check_slots(chosen)
        self._add_cold(chosen)

    def check_alike(self, what: str) -> None:
        """Refuse ranks in tied groups, and ranks that differ in what they need before they start."""
        workers = self._launcher.planned.workers
        if any(len(worker.place.tied_bundles[1]) > 1 for worker in workers):
            raise ValueError(f"{what} needs workers that can take each other's place, and those of tied groups cannot")
        if odd := [one.place.rank for one in workers if one.options != workers[0].options]:
            raise ValueError(
                f"{what} needs workers that start alike, but rank {odd[0]} has other options, or other variables that "
                "a process needs when it starts, than rank 0. Look at configure_worker and at the slots."
            )

    def check_slots(self, slots: Iterable[Slot]) -> None:
        """Refuse slots that have just been claimed and hold other resources; the caller releases the claims."""
        workers = self._launcher.planned.workers
        for slot in slots:
            if self._launcher.plan_in(slot).options != workers[0].options:
                raise ValueError(f"a process in {slot!r} could not take a rank's place: the slot holds other resources")

    def _add_cold(self, slots: Iterable[Slot]) -> None:
        with self._roster.lock:
            self._cold.extend(slots)
        self._show()

    def _show(self) -> None:
        with self._roster.lock:
            states = [("warm", one.slot) for one in self._warm]
            states += [("starting", slot) for slot in (*self._cold, *self._starting, *self._ending)]
            if self._is_over:
                states = []
            self._roster.standby_metadata[:] = [
                {"node_idx": slot.node_idx, "bundle_index": slot.bundle_index, "node_id": slot.node_id, "state": state}
                for state, slot in states
            ]

    def count_warm(self) -> int:
        """Return how many are ready; those that have died are started again."""
        self._drop_dead()
        self.fill()
        with self._roster.lock:
            return len(self._warm)

    def take(self, places: Iterable[Place]) -> dict[int, Standby]:
        """Return a standby in a usable slot for each place, as far as there are any, by rank; the same node first."""
        self._drop_dead()
        usable = {slot.key for slot in usable_slots(self.slots)}
        taken = {}
        with self._roster.lock:
            ready = [one for one in self._warm if one.slot.key in usable]
            for place in places:
                if not ready:
                    break
                here = [one for one in ready if one.slot.node_id == place.slot.node_id]
                taken[place.rank] = (here or ready)[0]
                ready.remove(taken[place.rank])
                self._warm.remove(taken[place.rank])
        self._show()
        return taken

    def give_back(self, standbys: Iterable[Standby]) -> None:
        """Keep standbys that were taken and not used."""
        with self._roster.lock:
            self._warm.extend(standbys)
        self._show()

    def fill(self) -> None:
        """Start what is missing, on a thread of its own."""
        with self._roster.lock:
            if self._is_filling or not self._cold or self._is_over:
                return
            self._is_filling = True
        self._resources.start_thread("the start of standbys", self._fill)

    def refill(self, slots: Iterable[Slot]) -> None:
        """Start the standbys that are missing, if need be in those of these slots that the group has left."""
        missing = self.count - len(self.slots)
        if missing > 0:
            with contextlib.suppress(PlacementError):  # the next change tries again
                self._add_cold(self._resources.claim_free(slots, missing, partly=True))
        self.fill()

    def start_in(self, slots: Sequence[Slot], deadline: Deadline) -> list[Standby]:
        """Start processes in slots, and wait until the class's module is loaded in all of them."""
        numbers = [next(_numbers) for _ in slots]
        token, launcher = self._launcher.spec.token, self._launcher
        refs, waiting, pickled = [], [], pickle_function(warm_up)
        try:
            for number, slot in zip(numbers, slots, strict=True):
                plan = launcher.plan_in(slot)
                name = f"{plan.place.name}-{token[:6]}{number}"
                with head_deadline(deadline.left()):
                    actor = create_actor(plan, launcher.worker_class, name)
                worker = RunningWorker(actor, slot.node_id, mark_of(token, number), name=name)
                self._resources.add({number: worker})
                if self._is_over:  # the release may have begun before this process was known
                    raise self._roster.ended_error()
                waiting.append(Standby(number, slot, worker))
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
            self._resources.discard(numbers)
            raise
        ready = []
        for standby, answer in zip(waiting, answers, strict=True):
            worker = replace(standby.worker, pid=answer["pid"], started=answer["started"])
            self._resources.add({standby.number: worker})
            ready.append(Standby(standby.number, standby.slot, worker))
        return ready

    def _fill(self) -> None:
        """Start standbys in the slots that have none; the work of a thread."""
        while True:
            with self._roster.lock:
                if not self._cold or self._is_over:
                    # What did not start is tried again when the next one asks for standbys.
                    self._cold, self._starting = [*self._cold, *self._starting], []
                    self._is_filling = False
                    break
                slot = self._cold.pop(0)
                self._starting.append(slot)
            try:
                if not usable_slots([slot]):  # it is tried again later, like one in which a process did not start
                    continue
                ready = self.start_in([slot], Deadline.after(self._launcher.spec.start_timeout_s))
            except Exception as error:  # noqa: BLE001  the thread has to go on, or nothing is filled any more
                if not self._is_over:
                    logger.warning("A standby of %r did not start: %s", self._roster.name_prefix, error)
            else:
                with self._roster.lock:
                    self._starting.remove(slot)
                    self._warm.extend(ready)
            self._show()
        if self._is_over:
            self._resources.give_back_late()

    @property
    def _is_over(self) -> bool:
        return self._roster.is_over or self._resources.closed

    def _drop_dead(self) -> None:
        """Drop standbys that have died, and keep the slots on living nodes for others."""
        with self._roster.lock:
            if not self._warm and not self._cold:
                return
            warm = list(self._warm)
        alive = alive_nodes()
        verdicts = self._roster.judge.ask([one.process for one in warm], look="head", within_s=REQUEST_S)
        with self._roster.lock:
            self._cold = [slot for slot in self._cold if slot.node_id in alive]
            lost = [one for one in self._warm if one in warm and verdicts[one.process].is_lost]
            self._warm = [one for one in self._warm if one not in lost]
            kept = [one.slot for one in lost if one.slot.node_id in alive]
            self._ending += kept
        if lost:
            try:
                self._resources.discard([one.number for one in lost])
            finally:
                with self._roster.lock:
                    self._ending = [slot for slot in self._ending if slot not in kept]
                    self._cold += kept
                self._show()
