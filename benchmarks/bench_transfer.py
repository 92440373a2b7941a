# SPDX-License-Identifier: Apache-2.0
"""Measure how fast transfers are planned.

python benchmarks/bench_transfer.py
"""

from collections.abc import Iterator

from _measure import Row, interleaved, table

from fairlead_sharding import NamedSharding
from fairlead_transfer import Layout, reshard

# The shapes of a Llama with 8 billion parameters, and how FSDP2 on top of tensor parallelism and vLLM shard them.
FAMILIES = [
    ((4096, 4096), {0: ("tp", "dp")}, {0: "tp"}),
    ((4096, 4096), {0: "dp", 1: "tp"}, {1: "tp"}),
    ((4096,), {0: "dp"}, {}),
    ((14336, 4096), {0: ("tp", "dp")}, {0: "tp"}),
    ((4096, 14336), {0: "dp", 1: "tp"}, {1: "tp"}),
    ((128256, 4096), {0: ("tp", "dp")}, {0: "tp"}),
]


def rows() -> list[Row]:
    """Return every row of the table."""
    return list(_planning_rows())


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
    yield Row("plan one layout from 65,536 to 65,536 ranks", str(large), "< 1 s", large.median < 1)

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
    yield Row("plan 600 tensors in 6 layouts, 64 to 64 ranks", str(small), "< 50 ms", small.median < 0.05)


if __name__ == "__main__":
    print(table(rows()))
