# SPDX-License-Identifier: Apache-2.0
"""Compiled graph of two actors: at the fourth execution the second one waits for a condition that nobody notifies."""

import threading

import ray
from hangs import mark, start_ray
from ray.dag import InputNode

TRUTH = {
    "hangs": True,
    "library": "core (compiled graph)",
    "guilty": "Stage actor named decode",
    "function": "forward",
    "note": "threading.Condition.wait in the execution loop of the compiled graph; the driver reads the output channel",
}


@ray.remote
class Stage:
    def __init__(self, name, slots):
        self.name = name
        self.free = slots
        self.condition = threading.Condition()

    def forward(self, x):
        with self.condition:
            if self.free == 0:
                mark()
                self.condition.wait()
            self.free -= 1
        return x + 1


if __name__ == "__main__":
    start_ray(num_cpus=3, object_store_memory=400_000_000)
    encode, decode = Stage.remote("encode", 100), Stage.remote("decode", 3)
    with InputNode() as x:
        graph = decode.forward.bind(encode.forward.bind(x))
    compiled = graph.experimental_compile()
    for i in range(10):
        print(ray.get(compiled.execute(i), timeout=100_000), flush=True)
