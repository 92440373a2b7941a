# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-transfer as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, assert_type

import fairlead_transfer as ft
from fairlead_sharding import NamedSharding
from fairlead_transfer.adapters import nemo_rl, verl
from fairlead_workergroup import RayWorkerGroup


def plan(mesh: NamedSharding) -> None:
    held = ft.Layout.from_sharding((4, 4), mesh, {0: "dp", 1: ("tp", "pp")}, itemsize=4)
    made = ft.reshard({"w": held}, {"w": ft.Layout.replicated((4, 4), 2)}, source_nodes="a", target_nodes="b")
    assert_type(made, ft.TransferPlan)
    assert_type((made.bytes_moved, made.tensor_sets), tuple[int, tuple[ft.TensorSet, ...]])
    assert_type(made.tensor_sets[0].pieces, ft.PieceTable)
    ft.reshard(held, held)  # type: ignore[call-arg]


def send(policy: RayWorkerGroup, generation: RayWorkerGroup) -> None:
    with ft.Link(policy, generation, source="weights", target="weights", check_replicas="always") as link:
        assert_type(link.send(1, timeout=60), ft.TransferReport)
        assert_type(link.sync([0, 1], timeout=60), ft.TransferReport | None)
        assert_type(link.versions(), dict[int, int | Literal["inconsistent", "committing"] | None])
        assert_type(link.guard("generate"), Callable[[], None])
        assert_type(link.explain(timeout=60), ft.TransferExplanation)
    ft.Link(policy, generation, source="weights", apply="load", rename=str.lower)
    link.send("1")  # type: ignore[arg-type]
    ft.Link(policy, generation, source="weights", target="weights", transport="pigeon")  # type: ignore[arg-type]


def hold(tensors: Mapping[str, Any]) -> ft.LocalTensor:
    return ft.LocalTensor(tensors["w"], (4, 4), [0, 2])


async def adapt(weights: Sequence[tuple[str, Any]]) -> None:
    engine = verl.FairleadCheckpointEngine(bucket_size=1 << 20, is_master=True, timeout=1.0)
    await engine.send_weights(iter(weights), global_steps=1)
    async for one in engine.receive_weights(global_steps=1):
        assert_type(one, tuple[str, Any])
    async for batch in nemo_rl.FairleadCheckpointEngine(bucket_size=1 << 20).receive_weight_batches():
        assert_type(batch, list[tuple[str, Any]])


def read_errors(error: Exception) -> None:
    match error:
        case ft.LayoutMismatchError():
            assert_type(error.mismatches, tuple[ft.Mismatch, ...])
        case ft.TransferError():
            assert_type(error.phase, Literal["collect", "stage", "move", "commit"])
            assert_type(error.failures, tuple[ft.RankFailure, ...])
        case ft.StaleWeightsError():
            assert_type((error.method, error.needed), tuple[str, int | None])
