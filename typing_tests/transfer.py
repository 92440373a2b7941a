# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-transfer as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

import numpy as np
import numpy.typing as npt

from fairlead_sharding import NamedSharding
from fairlead_transfer import Family, Layout, LayoutMismatchError, Mismatch, Pieces, TransferPlan, reshard


def plan_by_hand(mesh: NamedSharding) -> None:
    """Use layouts and plans."""
    held = Layout((4,), np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64), itemsize=2)
    assert_type(held.shape, tuple[int, ...])
    assert_type(held.itemsize, int)
    assert_type(held.ranks, int)
    assert_type(held.offsets, npt.NDArray[np.int64])
    assert_type(held.sizes, npt.NDArray[np.int64])
    assert_type(held.volumes, npt.NDArray[np.int64])
    assert_type(Layout.replicated((4, 4), 2), Layout)
    assert_type(Layout.from_sharding((4, 4), mesh, {0: "dp", 1: ("tp", "pp")}, itemsize=4), Layout)

    plan = reshard(held, held, source_nodes=["a"], target_nodes=[0])
    assert_type(plan, TransferPlan)
    assert_type(
        reshard({"w": held}, {"w": held}, source_nodes="a", target_nodes="b", same_processes=False), TransferPlan
    )
    assert_type(plan.names, tuple[str, ...])
    assert_type(plan.bytes_moved, int)
    assert_type(plan.bytes_between_nodes, int)
    assert_type(plan.lower_bound, int)
    assert_type(plan.bytes_by_sender, npt.NDArray[np.int64])
    assert_type(plan.source_nodes, npt.NDArray[np.int64])
    assert_type(plan.target_nodes, npt.NDArray[np.int64])
    for family in plan.families:
        assert_type(family, Family)
        assert_type(family.names, tuple[str, ...])
        assert_type((family.source, family.target), tuple[Layout, Layout])
        pieces = family.pieces
        assert_type(pieces, Pieces)
        assert_type(pieces.receivers, npt.NDArray[np.int64])
        assert_type(pieces.senders, npt.NDArray[np.int64])
        assert_type(pieces.starts, npt.NDArray[np.int64])
        assert_type(pieces.sizes, npt.NDArray[np.int64])
        assert_type(pieces.via, npt.NDArray[np.int64])
        assert_type(pieces.local, npt.NDArray[np.bool_])
        assert_type(pieces.volumes, npt.NDArray[np.int64])
        assert_type(pieces.missing, int)
    reshard(held, held)  # type: ignore
    held.itemsize = 3  # type: ignore


def read_mismatches(error: LayoutMismatchError) -> None:
    """Read what does not fit."""
    assert_type(error.mismatches, tuple[Mismatch, ...])
    for one in error.mismatches:
        assert_type((one.name, one.source, one.target, one.reason), tuple[str, str, str, str])
