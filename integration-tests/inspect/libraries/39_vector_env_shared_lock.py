# SPDX-License-Identifier: Apache-2.0
"""An actor rolls out a gymnasium AsyncVectorEnv; one env process never gives back a lock that the other wants."""

import multiprocessing

import gymnasium as gym
import numpy as np
import ray
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "core + gymnasium",
    "guilty": "the env process 1, child of the Rollout actor",
    "function": "step",
    "note": "multiprocessing.Lock that env process 0 took and did not release after an early return; the actor waits for the pipe of child 1",
}


class RenderEnv(gym.Env):
    def __init__(self, index, renderer):
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.index, self.renderer, self.t = index, renderer, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t % 30 == 10 + 5 * self.index:
            if self.index == 1 and self.t > 30:
                mark()
            self.renderer.acquire()
            if self.t > 30:
                return np.zeros(2, np.float32), -1.0, True, False, {}
            self.renderer.release()
        return np.ones(2, np.float32), 1.0, False, False, {}


@ray.remote
class Rollout:
    def __init__(self):
        renderer = multiprocessing.get_context("fork").Lock()
        makers = [lambda index=index: RenderEnv(index, renderer) for index in range(2)]
        self.envs = gym.vector.AsyncVectorEnv(makers, context="fork")
        self.envs.reset()

    def collect(self, steps):
        return sum(float(self.envs.step(self.envs.action_space.sample())[1].sum()) for _ in range(steps))


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    rollouts = [Rollout.remote() for _ in range(1)]
    for i in range(20):
        print(i, ray.get([rollout.collect.remote(10) for rollout in rollouts]), flush=True)
