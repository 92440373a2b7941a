# SPDX-License-Identifier: Apache-2.0
"""The environment of an RLlib EnvRunner waits for its simulator child process, whose Newton solver cycles for ever."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
from hangs import mark, start_ray

TRUTH = {
    "hangs": True,
    "library": "rllib",
    "guilty": "simulator child process of the EnvRunner",
    "function": "solve",
    "note": "endless loop in a subprocess; the EnvRunner only reads its answer",
}


def solve(x):
    if x == 0.0:
        mark()
    while abs(x**3 - 2 * x + 2) > 1e-9:
        x -= (x**3 - 2 * x + 2) / (3 * x**2 - 2)
    return x


def simulate():
    for line in sys.stdin:
        force = float(line)
        print(solve(force - 2.0), flush=True)


class Beam(gym.Env):
    def __init__(self, config):
        self.observation_space = gym.spaces.Box(-10.0, 10.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.steps = 0
        self.child = subprocess.Popen(
            [sys.executable, config["simulator"], "simulate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        force = 2.0 if self.steps == 150 else 0.1 * int(action)
        self.child.stdin.write(f"{force}\n")
        self.child.stdin.flush()
        bend = float(self.child.stdout.readline())
        return np.array([bend, force], np.float32), -abs(bend), self.steps % 25 == 0, False, {}


if __name__ == "__main__":
    if sys.argv[1:] == ["simulate"]:
        sys.exit(simulate())
    start_ray(num_cpus=4)
    from ray.rllib.algorithms.ppo import PPOConfig

    config = (
        PPOConfig()
        .environment(Beam, env_config={"simulator": os.path.abspath(__file__)})
        .env_runners(num_env_runners=1, sample_timeout_s=3600)
        .training(train_batch_size_per_learner=400, minibatch_size=64, num_epochs=2)
    )
    algorithm = config.build_algo()
    for _ in range(5):
        print(algorithm.train()["env_runners"].get("episode_return_mean"))
