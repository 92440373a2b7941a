# SPDX-License-Identifier: Apache-2.0
"""ActorPool.map over simulators; for a big case the actor calls a method of its own handle and waits for it."""

import ray
from hangs import mark, start_ray
from ray.util import ActorPool

TRUTH = {
    "hangs": True,
    "library": "ray.util.ActorPool",
    "guilty": "Simulator actor that got case 9",
    "function": "run",
    "note": "ray.get of a method of itself: the actor is single threaded, the call stays in its queue",
}


@ray.remote
class Simulator:
    def __init__(self):
        self.me = ray.get_runtime_context().current_actor

    def score(self, case):
        return case * 0.25

    def run(self, case):
        if case < 9:
            return case * 0.5
        mark()
        return ray.get(self.me.score.remote(case))


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    pool = ActorPool([Simulator.remote() for _ in range(3)])
    for value in pool.map(lambda actor, case: actor.run.remote(case), range(10)):
        print(value, flush=True)
