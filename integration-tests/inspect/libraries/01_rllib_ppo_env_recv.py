# SPDX-License-Identifier: Apache-2.0
"""PPO with two env runners: the simulator of one of them stops answering, and its env waits in recv for ever."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
from hangs import mark, start_ray
from ray.rllib.algorithms.ppo import PPOConfig

TRUTH = {
    "hangs": True,
    "library": "rllib",
    "guilty": "env runner actor whose worker_index is 2",
    "function": "step",
    "note": "socket recv in env.step; the peer is a simulator outside Ray that lost the request",
}

SIMULATOR = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
def serve(peer):
    while True:
        request = peer.recv(64)
        if not request:
            return
        if request != b"2 150":
            peer.sendall(b"0.5 1.0")
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


class SimulatorEnv(gym.Env):
    def __init__(self, config):
        import socket

        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.index = config.worker_index
        self.total = self.t = 0
        self.sock = socket.create_connection(("127.0.0.1", config["port"]))

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        self.total += 1
        self.sock.sendall(f"{self.index} {self.total}".encode())
        if self.index == 2 and self.total == 150:
            mark()
        position, reward = map(float, self.sock.recv(64).split())
        return np.full(2, position, np.float32), reward, self.t >= 50, False, {}


if __name__ == "__main__":
    start_ray(num_cpus=4, object_store_memory=400_000_000)
    simulator = subprocess.Popen([sys.executable, "-c", SIMULATOR], stdout=subprocess.PIPE, text=True)
    config = (
        PPOConfig()
        .environment(SimulatorEnv, env_config={"port": int(simulator.stdout.readline())})
        .env_runners(num_env_runners=2, sample_timeout_s=100_000)
        .training(train_batch_size=400, minibatch_size=100, num_epochs=2)
    )
    algo = config.build_algo()
    for i in range(20):
        print(i, algo.train()["env_runners"].get("episode_return_mean"), flush=True)
