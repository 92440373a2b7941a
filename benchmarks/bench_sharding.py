# SPDX-License-Identifier: Apache-2.0
"""Measure how fast sharding is, against simple implementations in one run.

python benchmarks/bench_sharding.py
"""

from collections.abc import Callable, Iterator

import numpy as np
from _measure import Row, interleaved, table, under

from fairlead_sharding import NamedSharding

NAMES = ["dp", "pp", "tp"]
SMALL, LARGE, HUGE = (2, 2, 2), (1024, 8, 8), (16384, 8, 8)


def rows() -> list[Row]:
    """Return every row of the table. The run takes a few seconds."""
    return [*_construction_rows(), *_coordinate_rows(), *_planning_rows(), *_cached_plan_rows(), *_huge_mesh_rows()]


def _layouts(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return a layout of consecutive ranks, which has a fast path, and a layout of shuffled ranks, which has none."""
    size = int(np.prod(shape))
    return {
        "counting": np.arange(size).reshape(shape),
        "shuffled": np.random.default_rng(0).permutation(size).reshape(shape),
    }


def _seconds(*functions: Callable[[], object], repeats: int = 15, calls: int = 1) -> list[float]:
    return [timing.median for timing in interleaved(*functions, repeats=repeats, calls=calls)]


def _construction_rows() -> Iterator[Row]:
    for kind, layout in _layouts(LARGE).items():
        ours, unique = _seconds(lambda: NamedSharding(layout, NAMES), lambda: np.unique(layout))  # noqa: B023
        ratio = ours / unique
        yield Row(f"build 65,536 {kind} ranks, against np.unique", f"{ratio:.2f}x", "< 3x", ratio < 3)


def _coordinate_rows() -> Iterator[Row]:
    for kind, layout in _layouts(LARGE).items():
        sharding = NamedSharding(layout, NAMES)
        small = NamedSharding(_layouts(SMALL)[kind], NAMES)
        rank, small_rank = int(layout[700, 3, 5]), int(small.layout[1, 0, 1])
        known = {int(rank): place for place, rank in np.ndenumerate(layout)}

        def by_dict(known: dict[int, tuple[int, ...]] = known, rank: int = rank) -> dict[str, int]:
            dp, pp, tp = known[rank]
            return {"dp": dp, "pp": pp, "tp": tp}

        assert sharding.get_worker_coords(rank) == by_dict()
        ours, of_few, by_hand = _seconds(
            lambda: sharding.get_worker_coords(rank),  # noqa: B023
            lambda: small.get_worker_coords(small_rank),  # noqa: B023
            by_dict,
            calls=2000,
        )
        ratio, growth = ours / by_hand, ours / of_few
        yield Row(f"coords of one of 65,536 {kind} ranks, against a dict", f"{ratio:.1f}x", "< 10x", ratio < 10)
        yield Row(f"  the same, against one of 8 {kind} ranks", f"{growth:.2f}x", "about 1x", growth < 2)


def _planning_rows() -> Iterator[Row]:
    for kind, layout in _layouts(LARGE).items():
        # Scanning for every rank takes too long, so the time for all ranks is extrapolated from a sample.
        sample = layout.ravel()[:: layout.size // 64].tolist()
        ours, scan = _seconds(
            lambda: NamedSharding(layout, NAMES).plan("dp", ["pp", "tp"], "tp"),  # noqa: B023
            lambda: [np.where(layout == rank) for rank in sample],  # noqa: B023
        )
        ratio = scan / len(sample) * layout.size / ours
        what = f"build and plan 65,536 {kind} ranks, against np.where per rank"
        yield Row(what, f"{ratio:,.0f}x faster", ">= 500x", ratio >= 500)


def _cached_plan_rows() -> Iterator[Row]:
    shardings = [NamedSharding.from_shape(**dict(zip(NAMES, shape, strict=True))) for shape in (SMALL, LARGE)]
    few, many = _seconds(
        *(lambda sharding=sharding: sharding.plan(["dp"], ["pp", "tp"], ["tp"]) for sharding in shardings), calls=2000
    )
    yield under("plan of 65,536 ranks, asked for again", f"{many * 1e6:.1f} us", many, 5e-6)
    yield Row("  the same, against 8 ranks", f"{many / few:.2f}x", "about 1x", many / few < 2)


def _huge_mesh_rows() -> Iterator[Row]:
    for kind, layout in _layouts(HUGE).items():
        (seconds,) = _seconds(lambda: NamedSharding(layout, NAMES).plan("dp", ["pp", "tp"], "tp"), repeats=5)  # noqa: B023
        yield under(f"build and plan 1,048,576 {kind} ranks", f"{seconds:.2f} s", seconds, 0.5)


if __name__ == "__main__":
    print(table(rows()))
