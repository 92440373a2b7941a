# SPDX-License-Identifier: Apache-2.0
"""IMPALA with one env runner: the bridge thread of the game died, and env.step waits in recv of a socket pair."""

import socket
import threading

import gymnasium as gym
import numpy as np
from hangs import mark, start_ray
from ray.rllib.algorithms.impala import IMPALAConfig

TRUTH = {
    "hangs": True,
    "library": "rllib",
    "guilty": "the env runner actor",
    "function": "step",
    "note": "recv from a socketpair whose other end belongs to a dead thread of the same process; the driver goes on calling train()",
}


class GameEnv(gym.Env):
    def __init__(self, config):
        self.observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.mine, self.bridge = socket.socketpair()
        self.steps = 0
        threading.Thread(target=self.run_bridge, daemon=True).start()

    def run_bridge(self):
        frames = 0
        while frames < 699:
            frames += len(self.bridge.recv(1))
            self.bridge.sendall(b"f")

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.mine.sendall(bytes([int(action)]))
        if self.steps == 700:
            mark()
        frame = self.mine.recv(1)
        return np.full(4, frame[0] / 255, np.float32), 1.0, self.steps % 40 == 0, False, {}


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    config = (
        IMPALAConfig()
        .environment(GameEnv)
        .env_runners(num_env_runners=1, rollout_fragment_length=50)
        .training(train_batch_size_per_learner=200)
        .learners(num_learners=0)
    )
    algo = config.build_algo()
    done = 0
    while done < 1_000_000:
        result = algo.train()
        done = result.get("num_env_steps_sampled_lifetime", 0)
        print(done, flush=True)
