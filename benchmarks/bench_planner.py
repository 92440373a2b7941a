# SPDX-License-Identifier: Apache-2.0
"""Measure how fast plans for large clusters are, with pure functions and without Ray.

python benchmarks/bench_planner.py
"""

import gc
from collections.abc import Callable, Iterator

from _measure import Row, interleaved, table, under

from fairlead_placement import select_segment_nodes, sort_bundle_indices_by_topology
from fairlead_placement._model import Ask, Node
from fairlead_placement._plan.planner import decide
from fairlead_placement._plan.topology import node_place, sort_nodes

NODES, GPUS, DOMAIN = 10_000, 8, 16
BUNDLE = {"CPU": 1.0, "GPU": 1.0}


def physical_order(nodes: list[Node]) -> list[Node]:
    """Return nodes as a reservation orders them."""
    by_id = {node.node_id: node for node in nodes}
    return [by_id[node_id] for _, node_id in sort_nodes({node.node_id: node_place(node) for node in nodes})]


def planning_rows() -> list[Row]:
    """Return every row of the table. The run takes half a minute."""
    gc.collect()
    gc.freeze()  # Objects that exist already should not slow down the measurements.
    try:
        return [*_plan_rows(), *_refusal_rows(), *_sharing_rows()]
    finally:
        gc.unfreeze()


def _nodes(count: int) -> list[Node]:
    """Return nodes in random order whose resources differ slightly, as those of real nodes do."""
    return [
        Node(
            node_id=f"{at * 7919 % count:056x}",
            ip="10.0.0.1",
            total={"CPU": 96.0, "GPU": float(GPUS), "memory": 1e12 + at, f"node:{at}": 1.0},
            free={"CPU": 96.0 - at % 7, "GPU": float(GPUS), "memory": 1e12 - at, f"node:{at}": 1.0},
            labels={"ray.io/gpu-domain": f"d{at // DOMAIN:05}", "fairlead.io/topo-rank": str(at % DOMAIN)},
        )
        for at in range(count)
    ]


def _asks(count: int, bundles: int = GPUS) -> list[Ask]:
    return [Ask(at, bundles, BUNDLE) for at in range(count)]


def _make_pipeline(count: int) -> Callable[[], None]:
    """Return a function that sorts nodes, makes a plan, sorts bundles and selects nodes for segments."""
    nodes, asks = _nodes(count), _asks(count)

    def run_pipeline() -> None:
        ordered = physical_order(nodes)
        assert decide(asks, ordered)[0] is not None
        places = [(node_place(node), node.node_id) for node in ordered]
        rows = [(gpu, *place, node_id) for place, node_id in places for gpu in range(GPUS)]
        assert len(sort_bundle_indices_by_topology(rows, DOMAIN, GPUS)) == count * GPUS
        assert select_segment_nodes({node_id: place for place, node_id in places}, DOMAIN, count)[1] == []

    return run_pipeline


def _plan_rows() -> Iterator[Row]:
    nodes, asks = physical_order(_nodes(NODES)), _asks(NODES)
    segments, one, two = interleaved(
        lambda: decide(asks, nodes, segment_size=DOMAIN), _make_pipeline(NODES), _make_pipeline(2 * NODES), repeats=9
    )
    yield under(f"plan {NODES:,} nodes, sort {NODES * GPUS:,} bundles, take segments", str(one), one.median, 0.3)
    ratio = two.median / one.median
    yield Row(f"  the same for {2 * NODES:,} nodes, against this", f"{ratio:.2f}x", "about 2x (n log n)", ratio < 2.8)
    yield under("  the plan alone, in segments", str(segments), segments.median, 0.3)


def _refusal_rows() -> Iterator[Row]:
    few, many = _nodes(1_000), _nodes(2_000)
    over, twice = _asks(1_001), _asks(2_001)
    assert decide(over, few) == (None, "impossible")
    one, two = interleaved(lambda: decide(over, few), lambda: decide(twice, many), repeats=21)
    yield under("refuse 1,001 logical nodes on 1,000 nodes", str(one), one.median, 0.02)
    ratio = two.median / one.median
    yield Row("  the same for 2,001 on 2,000, against this", f"{ratio:.2f}x", "about 2x", ratio < 2.8)


def _sharing_rows() -> Iterator[Row]:
    nodes = _nodes(1_000)
    half, mixed = _asks(2_000, GPUS // 2), _asks(900) + [Ask(900 + at, 1 + at % 3, BUNDLE) for at in range(400)]
    assert decide(half, nodes)[0] is not None
    assert decide(mixed, nodes)[0] is not None
    one, two = interleaved(lambda: decide(half, nodes), lambda: decide(mixed, nodes), repeats=9)
    yield under("share 1,000 nodes among 2,000 logical nodes", str(one), one.median, 0.3)
    yield under("share 1,000 nodes among 1,300 of four sizes", str(two), two.median, 0.3)


if __name__ == "__main__":
    print(table(planning_rows()))
