# SPDX-License-Identifier: Apache-2.0
"""Notices, inside a node agent's process, that the owner of a lease or a placement group has ended, or the whole job.

Shipped by value, as `agent_process`: it imports the standard library, ray and `_ray_private`, which is shipped by value
too. Processes are identified by Ray's worker ids, in hexadecimal.
"""

import logging
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from .._ray_private import worker_is_alive

# Each check sends one small request to Ray's head per owner. With 1,000 nodes these are 400 requests per second.
ALL_S = 5.0
# Only two agents of a job guard a process's placement groups.
GUARDED_S = 1.0
# A group that the process has just requested may appear after its end.
SCANS = 3
_DIGITS = 12


@dataclass(eq=False, repr=False)
class Owners:
    """Watches, on a thread of its own, the processes that hold something on this node.

    It calls `release` for a holder that has ended. It calls `end` when the driver `job` has ended and no other process
    holds anything. `is_alive` returns None for a process if that is unknown.
    """

    job: str
    holders: Callable[[], set[str]]
    release: Callable[[str], None]
    end: Callable[[], None]
    is_alive: Callable[[str], bool | None] = worker_is_alive
    _guarded: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _more: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="fairlead-owners", daemon=True).start()

    def guard(self, owner: str) -> None:
        """Remove the placement groups of a process when it has ended."""
        with self._lock:
            self._guarded.setdefault(owner, SCANS)
        self._more.set()

    def look(self, *, everything: bool) -> None:
        """Release what processes hold that have ended: all holders and the job, or only those with guarded groups."""
        with self._lock:
            guarded = set(self._guarded)
        owners = guarded | (self.holders() if everything else set())
        alive = {owner: self.is_alive(owner) for owner in owners - {self.job}}
        for owner in (owner for owner, there in alive.items() if there is False):
            self.release(owner)
            if owner in guarded:
                remove_groups_of(owner)
                with self._lock:
                    self._guarded[owner] -= 1
                    if not self._guarded[owner]:
                        del self._guarded[owner]
        # A detached actor, and what it holds, outlives its job's driver.
        if everything and True not in alive.values() and self.is_alive(self.job) is False:
            self.end()

    def _run(self) -> None:
        due = time.monotonic() + ALL_S
        while True:
            # At random moments, so that the agents of a large cluster do not ask all at once.
            self._more.wait(GUARDED_S if self._guarded else ALL_S * random.uniform(0.8, 1.2))
            self._more.clear()
            everything = time.monotonic() >= due
            try:
                self.look(everything=everything or not self._guarded)
            except Exception:
                # Ray's head does not answer. The next check may succeed.
                logging.getLogger(__name__).debug("cannot check which processes have ended", exc_info=True)
                continue
            if everything:
                due = time.monotonic() + ALL_S


def end_this_actor(me: object) -> None:
    """End the actor of this process, through Ray if Ray does it in time."""
    try:
        ray.kill(me)
        time.sleep(5.0)  # Ray ends an actor at its own request within milliseconds
    finally:
        os._exit(0)


def owned_name(name: str, owner: str) -> str:
    """Return a unique name for a placement group. It contains the id of the owner, unless that is empty."""
    return f"{name}-{owner[:_DIGITS]}{uuid.uuid4().hex[:8]}"


def remove_groups_of(owner: str) -> None:
    """Remove the placement groups whose names contain an owner's id."""
    job = ray.get_runtime_context().get_job_id()
    for group_id, row in placement_group_table().items():
        # The last four bytes of a group's id are those of its job.
        mine = re.search(f"-{owner[:_DIGITS]}[0-9a-f]{{8}}$", row["name"]) and group_id.endswith(job)
        if mine and row["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
