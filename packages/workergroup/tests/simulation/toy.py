# SPDX-License-Identifier: Apache-2.0
"""A small group of workers, which can be made faulty, to test the simulation itself.

Calls go through a gate. A change runs on a task of its own: it starts workers, closes the gate, sends the facts of the
next epoch, and opens the gate when the survivors have them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ray.exceptions import RayError

from .ray import PretendedRay
from .scheduler import SimulatedWorld

# The faults of a group: the facts of an epoch are not sent to workers that stay, or not waited for before the gate
# opens and the epoch begins; workers that leave are not ended; two locks are taken in two orders.
FAULTS = ("stale facts", "early gate", "leak", "lock order")


class Members(NamedTuple):
    """The workers of one epoch."""

    epoch: int
    handles: tuple[Any, ...]


class EndedError(Exception):
    """The group has been shut down."""


class ToyGroup:
    """A group of workers whose size changes."""

    def __init__(self, world: SimulatedWorld, ray: PretendedRay, size: int, fault: str = "") -> None:
        self.world = world
        self.ray = ray
        self.fault = fault
        self.is_ended = False
        self.lost: set[Any] = set()
        self.calls = 0
        self._gate = world.lock()
        self._counters = world.lock()
        # Set while the gate is open.
        self._opened = world.event()
        self._waiting: list[tuple[Callable[[], None], Any]] = []
        self._queue = world.lock()
        self._is_serving = False
        handles = [ray.create("node-0") for _ in range(size)]
        world.get([self._start(handle, rank, 0, size) for rank, handle in enumerate(handles)], timeout=None)
        self.now = Members(0, tuple(handles))
        self._opened.set()

    def call(self) -> bool:
        """Run a method on all workers; return whether none of them was lost."""
        now, refs = self._send()
        try:
            answers = self.world.get(refs, timeout=None)
        except RayError:
            self._note_lost(now, refs)
            return False
        expected = [(rank, now.epoch, len(now.handles)) for rank in range(len(now.handles))]
        assert answers == expected, f"stale facts: a call of {expected} ran as {answers}"
        return True

    def _send(self) -> tuple[Members, list[Any]]:
        while True:
            opened = self._opened
            opened.wait()
            with self._gate:
                if self.is_ended:
                    raise EndedError
                if opened is not self._opened or not opened.is_set():
                    continue
                with self._counters:
                    self.calls += 1
                return self.now, [handle.step.remote() for handle in self.now.handles]

    def _note_lost(self, now: Members, refs: Sequence[Any]) -> None:
        self.lost |= {handle for handle, ref in zip(now.handles, refs, strict=True) if ref.has_failed}

    def change(self, size: int | None) -> None:
        """Change the number of workers and replace lost ones; with None, end the group."""
        done = self.world.event()
        with self._queue:
            self._waiting.append((lambda: self._end() if size is None else self._resize(size), done))
            begins, self._is_serving = not self._is_serving, True
        if begins:
            self.world.spawn("change", self._serve)
        done.wait()

    def _serve(self) -> None:
        while True:
            with self._queue:
                if not self._waiting:
                    self._is_serving = False
                    return
                work, done = self._waiting.pop(0)
            if not self.is_ended:
                work()
            done.set()

    def _resize(self, size: int) -> None:
        world, ray, before = self.world, self.ray, self.now
        epoch = before.epoch + 1
        handles = [handle for handle in before.handles[:size] if handle not in self.lost]
        stay = {rank: handle for rank, handle in enumerate(before.handles[:size]) if handle in handles}
        new = {rank: ray.create("node-1") for rank in range(size) if rank not in stay}
        started = [self._start(handle, rank, epoch, size) for rank, handle in new.items()]
        try:
            world.get(started, timeout=None) if started else None
        except RayError:
            self._discard(new.values())
            return
        if self.fault == "lock order":
            with self._counters, self._gate:
                self._opened = world.event()
        else:
            with self._gate:
                self._opened = world.event()
        facts = {"epoch": epoch, "world_size": size, "env": {"WORLD_SIZE": str(size)}}
        sent = []
        if self.fault != "stale facts":
            sent = [handle._fairlead_apply.remote("apply_facts", b"", facts) for handle in stay.values()]
        if self.fault == "early gate":
            self._opened.set()
        members = Members(epoch, tuple({**stay, **new}[rank] for rank in range(size)))
        if sent:  # an error of one must not end the wait for the others
            world.wait(sent, num_returns=len(sent), timeout=None)
            self.lost |= {handle for handle, ref in zip(stay.values(), sent, strict=True) if ref.has_failed}
        self.now = members
        self._opened.set()
        if self.fault != "leak":
            self._discard(handle for handle in before.handles if handle not in members.handles)

    def _end(self) -> None:
        with self._gate:
            self.is_ended = True
        self._opened.set()
        self._discard(self.now.handles)

    def _start(self, handle: Any, rank: int, epoch: int, size: int) -> Any:
        facts = {"rank": rank, "epoch": epoch, "world_size": size, "env": {"RANK": str(rank)}}
        return handle._fairlead_start.remote(facts, [], [], {})

    def _discard(self, handles: Any) -> None:
        for handle in handles:
            self.ray.kill(handle)


def run_toy(world: SimulatedWorld, fault: str = "") -> None:
    """Let two callers, a changer and a crash meet, end the group, and check what is left."""
    ray = PretendedRay(world)
    group = ToyGroup(world, ray, 2, fault)
    ray.lose_actor()

    def call() -> None:
        for _ in range(3):
            group.call()

    def change() -> None:
        for _ in range(2):
            group.change(1 + world.choose(3))

    world.join([world.start_task(name, work) for name, work in (("a", call), ("b", call), ("changer", change))])
    now = group.now
    for rank, handle in enumerate(now.handles):
        worker, expected = handle.actor.worker, (rank, now.epoch, len(now.handles))
        has = worker.facts["rank"], worker.epoch, worker.facts["world_size"]
        assert not handle.actor.is_running or handle in group.lost or has == expected, f"stale facts: {has}"
    group.change(None)
    killed = [one for one in ray.actors if one.is_killed]
    world.wait_for("waits for the end of killed workers", lambda: not any(one.is_running for one in killed))
    left = [one.name for one in ray.actors if one.is_running]
    assert not left, f"leak: {', '.join(left)} still there"
