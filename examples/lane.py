# SPDX-License-Identifier: Apache-2.0
"""Train a network in four pipeline stages with the 1F1B schedule, by Ray's actor calls and by a lane.

python examples/lane.py

The driver schedules each forward and backward pass of each microbatch, dozens of calls per step, and activations go
from stage to stage as arguments of the next call. The work of each call is small, so its price decides the speed.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator

import numpy as np

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_workergroup import Call, RayWorkerGroup, current_worker

STAGES, MICROBATCHES, ROWS, WIDTH = 4, 8, 16, 64
RATE = 0.1


class Stage:
    """One layer of the network, which a pipeline stage holds."""

    def __init__(self) -> None:
        self.rank = current_worker().rank
        self.weights = np.random.default_rng(self.rank).normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
        self.data = np.random.default_rng(100).normal(0, 1, (MICROBATCHES, ROWS, WIDTH))
        self.kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.losses: list[float] = []
        self.reset()

    def reset(self) -> None:
        self.gradient = np.zeros_like(self.weights)

    def forward(self, micro: int, inputs: np.ndarray | None = None) -> np.ndarray:
        given = self.data[micro] if inputs is None else inputs
        outputs = np.tanh(given @ self.weights)
        self.kept[micro] = given, outputs
        if self.rank < STAGES - 1:
            return outputs
        # The last stage learns to return the input's sign, and passes the gradient of its loss back.
        error = outputs - np.sign(self.data[micro])
        self.losses.append(float((error**2).mean()))
        return 2 * error / error.size

    def backward(self, micro: int, gradient: np.ndarray) -> np.ndarray:
        given, outputs = self.kept.pop(micro)
        inner = gradient * (1 - outputs**2)
        self.gradient += given.T @ inner
        return inner @ self.weights.T

    def step(self) -> float:
        self.weights -= RATE * WIDTH * self.gradient
        self.reset()
        losses, self.losses = self.losses, []
        return sum(losses) / len(losses) if losses else 0.0


def schedule(stage: int) -> Iterator[tuple[str, int]]:
    """Yield the passes of a stage in the order of 1F1B: a warm-up, then one forward and one backward in turns."""
    ahead = min(STAGES - 1 - stage, MICROBATCHES)
    yield from (("forward", micro) for micro in range(ahead))
    for micro in range(MICROBATCHES):
        if micro + ahead < MICROBATCHES:
            yield "forward", micro + ahead
        yield "backward", micro


def train_step(group: RayWorkerGroup) -> float:
    """Make all calls of one step, each as soon as the call that makes its argument has been made; return the loss."""
    stages = [group.at(worker=stage) for stage in range(STAGES)]
    made: dict[tuple[str, int, int], Call] = {}
    waiting = [list(schedule(stage)) for stage in range(STAGES)]
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                kind, micro = passes[0]
                source = ("forward", stage - 1, micro) if kind == "forward" else ("backward", stage + 1, micro)
                if kind == "backward" and stage == STAGES - 1:
                    source = ("forward", stage, micro)
                if stage == 0 and kind == "forward":
                    call = stages[stage].call(kind, micro, collect=())
                elif source in made:
                    call = stages[stage].call(kind, micro, made[source], collect=())
                else:
                    break
                made[kind, stage, micro] = call
                passes.pop(0)
    losses: list[float] = group.call("step").result()
    return losses[-1]


def run(group: RayWorkerGroup, steps: int, *, by_lane: bool) -> list[float]:
    """Train for some steps, and print how long one takes; return the losses."""
    with group.lane() if by_lane else contextlib.nullcontext():
        losses = [train_step(group)]
        began = time.perf_counter()
        losses += [train_step(group) for _ in range(steps)]
        took_ms = (time.perf_counter() - began) / steps * 1e3
    way = "by the lane" if by_lane else "by Ray's actor calls"
    calls = 2 * STAGES * MICROBATCHES + STAGES
    print(f"{way:>20}: {took_ms:6.1f} ms per step of {calls} calls, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return losses


def main() -> None:
    """Train the same network in both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    init_ray(address="local", num_cpus=STAGES)
    losses = []
    for by_lane in (False, True):
        with RayVirtualCluster([STAGES], use_gpus=False) as cluster, RayWorkerGroup(cluster, Stage) as group:
            losses.append(run(group, steps, by_lane=by_lane))
    assert losses[0] == losses[1], "both ways compute the same"
    assert losses[0][-1] < losses[0][0], "the loss falls"


if __name__ == "__main__":
    main()
