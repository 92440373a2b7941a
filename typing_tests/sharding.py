# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-sharding as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import fairlead_sharding
from fairlead_sharding import DispatchPlan, NamedSharding

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

assert_type(fairlead_sharding.__version__, str)


def make(array: IntArray, mesh: Any) -> None:
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    assert_type(sharding, NamedSharding)
    assert_type(NamedSharding(array, names=("dp", "tp")), NamedSharding)
    assert_type(NamedSharding.from_shape(dp=2, tp=4, start=8), NamedSharding)
    assert_type(NamedSharding.from_dict(sharding.to_dict()), NamedSharding)
    assert_type(NamedSharding.from_device_mesh(mesh), NamedSharding)
    assert_type(sharding.to_dict(), dict[str, Any])
    assert_type(sharding.to_device_mesh("cpu"), Any)
    assert_type(sharding.render(), str)
    assert_type({sharding: 1}, dict[NamedSharding, int])


def look_up(sharding: NamedSharding) -> None:
    assert_type(sharding.names, list[str])
    assert_type(sharding.shape, dict[str, int])
    assert_type(sharding.ndim, int)
    assert_type(sharding.size, int)
    assert_type(sharding.layout, IntArray)
    assert_type(sharding.get_axis_index("dp"), int)
    assert_type(sharding.get_axis_size("dp"), int)
    assert_type(sharding.get_worker_coords(0), dict[str, int])
    assert_type(sharding.get_ranks_by_coord(dp=0, tp=1), list[int])
    assert_type(sharding.get_ranks(dp=0), NamedSharding | int)
    assert_type(sharding.groups("dp", "tp"), list[list[int]])
    assert_type(sharding.peers(0, "tp"), list[int])
    assert_type(NamedSharding.is_axis_zero({"dp": 0}, "dp"), bool)
    assert_type(sharding.is_axis_zero({"dp": 0}, ["dp", "tp"]), bool)
    assert_type(sharding.piece_index("tp", "dp"), IntArray)
    assert_type(sharding.leaders("tp"), BoolArray)


def view(sharding: NamedSharding) -> None:
    assert_type(sharding.at(dp=-1, tp=slice(0, 2)), NamedSharding | int)


def plan(sharding: NamedSharding) -> None:
    plan = sharding.plan("dp", replicate_on_axes=["tp"], output_is_replicated=("tp",))
    assert_type(plan, DispatchPlan)
    assert_type(DispatchPlan(sharding, ("dp",), make_dummy_calls_to_free_axes=True), DispatchPlan)
    assert_type(plan.sharding, NamedSharding)
    assert_type(plan.in_sharded_axes, tuple[str, ...])
    assert_type(plan.replicate_on_axes, tuple[str, ...])
    assert_type(plan.output_is_replicated, tuple[str, ...])
    assert_type(plan.make_dummy_calls_to_free_axes, bool)
    assert_type(plan.called, IntArray)
    assert_type(plan.piece, IntArray)
    assert_type(plan.answers, BoolArray)
    assert_type(plan.returned, IntArray)
    assert_type(plan.piece_shape, tuple[int, ...])
    assert_type(plan.n_pieces, int)
    assert_type(plan.pieces([["a"], ["b"]]), list[Any])
    assert_type(plan.explain(max_rows=10), str)


def wrong(sharding: NamedSharding, plan: DispatchPlan) -> None:
    NamedSharding([0, 1])  # type: ignore[call-arg]
    NamedSharding([0, 1], [0])  # type: ignore[list-item]
    NamedSharding.from_shape(dp="2")  # type: ignore[arg-type]
    NamedSharding.from_shape(2)  # type: ignore[call-arg]
    sharding.get_worker_coords("0")  # type: ignore[arg-type]
    sharding.groups(0)  # type: ignore[arg-type]
    sharding.groups(axes=["dp"])  # type: ignore[call-arg]
    sharding.get_ranks(dp=slice(2))  # type: ignore[arg-type]
    sharding.at(dp="0")  # type: ignore[arg-type]
    sharding.plan(in_sharded_axes=0)  # type: ignore[arg-type]
    sharding.plan(sharded="dp")  # type: ignore[call-arg]
    sharding.size = 4  # type: ignore[misc]
    plan.called = sharding.layout  # type: ignore[misc]
