# SPDX-License-Identifier: Apache-2.0
"""Measure how fast tensors are planned and sent to another group, against the usual way by hand.

python benchmarks/bench_transfer.py
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from _measure import Row, interleaved, table, under

from fairlead_placement import RayVirtualCluster, init_ray
from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, Link, LocalTensor, reshard
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, current_worker

# The shapes of a Llama with 8 billion parameters, and how FSDP2 on top of tensor parallelism and vLLM shard them.
FAMILIES: list[tuple[tuple[int, ...], dict[int, Any], dict[int, Any]]] = [
    ((4096, 4096), {0: ("tp", "dp")}, {0: "tp"}),
    ((4096, 4096), {0: "dp", 1: "tp"}, {1: "tp"}),
    ((4096,), {0: "dp"}, {}),
    ((14336, 4096), {0: ("tp", "dp")}, {0: "tp"}),
    ((4096, 14336), {0: "dp", 1: "tp"}, {1: "tp"}),
    ((128256, 4096), {0: ("tp", "dp")}, {0: "tp"}),
]


def rows() -> list[Row]:
    """Return every row of the table. The run takes a minute."""
    results = list(_planning_rows())
    init_ray(address="local", num_cpus=8)
    try:
        with RayVirtualCluster([8], use_gpus=False) as cluster:
            results += [row for part in (_large_rows, _contiguous_rows, _small_rows) for row in part(cluster.slots())]
    finally:
        ray.shutdown()
    return results


def _planning_rows() -> Iterator[Row]:
    shape = (65536, 8192)
    held = Layout.from_sharding(
        shape, NamedSharding.from_shape(replica=64, dp=128, tp=8), {0: "dp", 1: "tp"}, itemsize=2
    )
    wanted = Layout.from_sharding(
        shape, NamedSharding.from_shape(replica=512, dp=16, tp=8), {0: "dp", 1: "tp"}, itemsize=2
    )
    nodes = [rank // 8 for rank in range(65536)], [8192 + rank // 8 for rank in range(65536)]
    (large,) = interleaved(lambda: reshard(held, wanted, source_nodes=nodes[0], target_nodes=nodes[1]), repeats=5)
    yield under("plan one layout from 65,536 to 65,536 ranks", str(large), large.median, 1.0)

    meshes = NamedSharding.from_shape(dp=8, tp=8), NamedSharding.from_shape(replica=8, tp=8)
    kinds = [FAMILIES[number % len(FAMILIES)] for number in range(600)]

    def models() -> list[dict[str, Layout]]:
        # New objects each time, so that no hash is known.
        return [
            {
                f"{number}": Layout.from_sharding(shape, mesh, dims[side], itemsize=2)
                for number, (shape, *dims) in enumerate(kinds)
            }
            for side, mesh in enumerate(meshes)
        ]

    made = [models() for _ in range(15)]
    nodes = [rank // 8 for rank in range(64)], [8 + rank // 8 for rank in range(64)]
    (small,) = interleaved(
        lambda: reshard(*made.pop(), source_nodes=nodes[0], target_nodes=nodes[1]), repeats=len(made)
    )
    yield under("plan 600 tensors in 6 layouts, 64 to 64 ranks", str(small), small.median, 0.05)


class Worker:
    """Holds tensors that are split over all ranks along one dim."""

    def __init__(self, count: int, shape: tuple[int, int], dim: int) -> None:
        me = current_worker()
        self.dim, self.shape = dim, shape
        step = shape[dim] // me.world_size
        self.offsets = [0, 0]
        self.offsets[dim] = me.rank * step
        sizes = [*shape]
        sizes[dim] = step
        self.tensors = {f"t{number}": np.full(sizes, float(number), "float32") for number in range(count)}
        self.copies = {name: np.zeros_like(value) for name, value in self.tensors.items()}

    def weights(self) -> dict[str, LocalTensor]:
        return {name: LocalTensor(value, self.shape, self.offsets) for name, value in self.tensors.items()}

    def copy(self) -> None:
        """Copy everything once, at the same time as the other ranks do."""
        for name, value in self.tensors.items():
            self.copies[name][...] = value

    def shards(self) -> dict[str, np.ndarray]:
        return self.tensors

    def gather(self, *shards: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Put the shards of all ranks together, as rank 0 does."""
        return {name: np.concatenate([one[name] for one in shards], axis=self.dim) for name in self.tensors}

    def take(self, full: dict[str, np.ndarray]) -> None:
        """Copy the own part of whole tensors into place."""
        for name, value in self.tensors.items():
            box = tuple(slice(at, at + size) for at, size in zip(self.offsets, value.shape, strict=True))
            value[...] = full[name][box]


def _groups(slots: Any, count: int, shape: tuple[int, int], dim: int = 1) -> tuple[RayWorkerGroup, RayWorkerGroup]:
    """Start a source whose tensors are split along dim 0, and a target whose tensors are split along `dim`."""
    return (
        RayWorkerGroup(slots[:4], RayWorkerBuilder(Worker, count, shape, 0)),
        RayWorkerGroup(slots[4:], RayWorkerBuilder(Worker, count, shape, dim)),
    )


def _large_rows(slots: Any) -> Iterator[Row]:
    source, target = _groups(slots, 8, (4096, 4096))
    version = itertools.count()
    with source, target, contextlib.ExitStack() as links:
        store, shared = made = _links(links, source, target, "object_store", "auto")
        sent = [link.send(next(version)) for link in made]
        _send_by_hand(source, target)
        hand, stored, mapped, copied = interleaved(
            lambda: _send_by_hand(source, target),
            lambda: store.send(next(version)),
            lambda: shared.send(next(version)),
            lambda: target.call("copy").result(),
            repeats=7,
        )
        planned = shared.explain().plan.bytes_moved
    moved = {report.bytes_moved for report in sent}
    yield Row("512 MiB by hand, 4 to 4 ranks: gather on rank 0, one put, slices", str(hand), "", True)
    ratio = hand.median / stored.median
    yield Row("  a link through the object store", f"{ratio:.1f}x faster, {stored}", ">= 1.5x faster", ratio >= 1.5)
    ratio = hand.median / mapped.median
    yield Row("  a link through shared memory", f"{ratio:.1f}x faster, {mapped}", ">= 3x faster", ratio >= 3)
    ratio = copied.median / mapped.median
    yield Row(
        "  the same, against the rate of 4 ranks that only copy", f"{ratio:.2f}x, {copied}", ">= 0.3x", ratio >= 0.3
    )
    yield Row("  bytes moved, against the plan", f"{moved} / {planned}", "equal", moved == {planned})


def _contiguous_rows(slots: Any) -> Iterator[Row]:
    """Measure pieces that are contiguous at both ends.

    Those of FSDP2 to vLLM (FAMILIES) are so, if both are equally tensor parallel.
    """
    source, target = _groups(slots, 8, (4096, 4096), dim=0)
    version = itertools.count()
    with source, target, contextlib.ExitStack() as links:
        (store,) = _links(links, source, target, "object_store")
        store.send(next(version))
        (stored,) = interleaved(lambda: store.send(next(version)), repeats=7)
    yield Row("512 MiB in contiguous pieces, 4 to 4 ranks: a link through the object store", str(stored), "", True)


def _links(stack: contextlib.ExitStack, source: RayWorkerGroup, target: RayWorkerGroup, *transports: Any) -> list[Link]:
    """Open a link by each transport."""
    return [
        stack.enter_context(Link(source, target, source="weights", target="weights", transport=one))
        for one in transports
    ]


def _small_rows(slots: Any) -> Iterator[Row]:
    source, target = _groups(slots, 600, (64, 64))
    version = itertools.count()
    with source, target, Link(source, target, source="weights", target="weights") as link:
        link.send(next(version))
        _send_by_hand(source, target)
        hand, linked = interleaved(
            lambda: _send_by_hand(source, target), lambda: link.send(next(version)), repeats=15, pause_s=0.1
        )
    yield Row("600 tensors of 16 KiB by hand, in the same way", str(hand), "", True)
    # A link has its rounds, in which all ranks agree, and Python runs for each piece.
    ratio = linked.median / hand.median
    yield Row("  a link", f"{ratio:.2f}x, {linked}", "at most 1.5x", ratio <= 1.5)


def _send_by_hand(source: RayWorkerGroup, target: RayWorkerGroup) -> None:
    """Send the tensors as somebody would who knows Ray: each target rank takes its slices of one object."""
    shards = [worker.shards.remote() for worker in source.workers]
    full = source.workers[0].gather.remote(*shards)
    ray.get([worker.take.remote(full) for worker in target.workers])


if __name__ == "__main__":
    print(table(rows()))
