# SPDX-License-Identifier: Apache-2.0
"""Notices, inside a node agent's process, that the owner of a lease has ended, or the whole job.

Shipped by value, as `agent_process`: it imports the standard library, ray and `_ray_private`, which is shipped by value
too. Processes are identified by Ray's worker ids, in hexadecimal.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from .._ray_private import worker_is_alive

# Each check sends one small request to Ray's head per owner. With 1,000 nodes these are 400 requests per second.
EVERY_S = 5.0


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

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="fairlead-owners", daemon=True).start()

    def look(self) -> None:
        """Release what processes hold that have ended, and end with the job."""
        alive = {owner: self.is_alive(owner) for owner in self.holders() - {self.job}}
        for owner in (owner for owner, there in alive.items() if there is False):
            self.release(owner)
        # A detached actor, and what it holds, outlives its job's driver.
        if True not in alive.values() and self.is_alive(self.job) is False:
            self.end()

    def _run(self) -> None:
        while True:
            # At random moments, so that the agents of a large cluster do not ask all at once.
            time.sleep(EVERY_S * random.uniform(0.8, 1.2))
            try:
                self.look()
            except Exception:
                # Ray's head does not answer. The next check may succeed.
                logging.getLogger(__name__).debug("cannot check which processes have ended", exc_info=True)


def end_this_actor(me: object) -> None:
    """End the actor of this process, through Ray if Ray does it in time."""
    try:
        ray.kill(me)
        time.sleep(5.0)  # Ray ends an actor at its own request within milliseconds
    finally:
        os._exit(0)
