# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-transfer as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt

from fairlead_sharding import NamedSharding
from fairlead_transfer import (
    DeltaReport,
    Endpoint,
    EndpointDescription,
    EndpointOrders,
    EndpointPlan,
    Layout,
    LayoutMismatchError,
    Link,
    LocalTensor,
    Mismatch,
    PieceTable,
    RankFailure,
    StagedPieces,
    StaleWeightsError,
    TensorSet,
    TransferError,
    TransferExplanation,
    TransferPlan,
    TransferReport,
    plan_endpoints,
    reshard,
)
from fairlead_transfer.adapters import nemo_rl, verl
from fairlead_transfer.testing import fail_at
from fairlead_workergroup import RayWorkerGroup


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
    for tensor_set in plan.tensor_sets:
        assert_type(tensor_set, TensorSet)
        assert_type(tensor_set.names, tuple[str, ...])
        assert_type((tensor_set.source, tensor_set.target), tuple[Layout, Layout])
        pieces = tensor_set.pieces
        assert_type(pieces, PieceTable)
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


def send(policy: RayWorkerGroup, generation: RayWorkerGroup) -> None:
    """Use a link."""
    link = Link(
        policy,
        generation,
        source="weights",
        target="weights",
        rename={"a": "b"},
        dtype="bfloat16",
        exclude=["c"],
        transport="auto",
        verify="always",
        before_commit="sleep",
        pauses=True,
        after_commit="wake",
    )
    assert_type(link.version, int | None)
    report = link.send(1, timeout=60, again=True)
    assert_type(report, TransferReport)
    delta = link.send(2, delta="blocks").delta
    assert_type(delta, DeltaReport | None)
    if delta is not None:
        assert_type((delta.changed, delta.elements, delta.bytes_saved), tuple[int, int, int])
        assert_type((delta.density, delta.whole), tuple[float, tuple[str, ...]])
    link.send(3, delta="rows")  # type: ignore
    assert_type((report.version, report.rounds), tuple[int, int])
    assert_type((report.bytes_moved, report.bytes_between_nodes), tuple[int, int])
    assert_type(report.seconds, Mapping[str, float])
    assert_type(report.slowest, Mapping[str, int])
    assert_type(report.total_s, float)
    assert_type(report.transports, Mapping[str, int])
    assert_type(report.verified, bool)
    assert_type(link.sync([0, 1], timeout=60), TransferReport | None)
    assert_type(link.versions(), dict[int, int | Literal["torn", "committing"] | None])
    assert_type(link.guard("generate"), Callable[[], None])
    explanation = link.explain(timeout=60)
    assert_type(explanation, TransferExplanation)
    assert_type(explanation.plan, TransferPlan)
    assert_type(explanation.transports, Mapping[tuple[int, int], str])
    assert_type(explanation.reasons, Mapping[str, str])
    link.close()
    with Link(policy, generation, source="weights", apply="load", chunk_bytes=1, rename=str.lower) as other:
        assert_type(other, Link)
    fail_at(policy, 0, "source", "stage", "stop", timeout_s=3.0)
    Link(policy, generation, source="weights", target="weights", transport="nixl", commit="in_place")
    Link(policy, generation, source="weights", target="weights", commit="in_place", max_bytes_in_flight=1 << 27)
    Link(policy, generation, source="weights", target="weights", max_bytes_in_flight="1 GiB")  # type: ignore
    Link(policy, generation, source="weights", target="weights", transport="pigeon")  # type: ignore
    Link(policy, generation, source="weights", target="weights", commit="never")  # type: ignore
    link.send("1")  # type: ignore


def describe(tensor: object) -> LocalTensor:
    """Return the box of a tensor."""
    local = LocalTensor(tensor, (4, 4), [0, 2])
    assert_type(local.tensor, Any)
    assert_type(local.global_shape, Sequence[int])
    assert_type(local.offsets, Sequence[int])
    return local


def read_error(error: TransferError) -> None:
    """Read why a transfer failed."""
    assert_type(error.phase, Literal["collect", "stage", "move", "verify", "commit"])
    assert_type(error.version, int)
    assert_type(error.remedy, str)
    assert_type(error.versions, dict[int, int | Literal["torn", "committing"] | None])
    assert_type(error.failures, tuple[RankFailure, ...])
    for one in error.failures:
        assert_type(one.side, Literal["source", "target"])
        assert_type((one.rank, one.node_id, one.reason), tuple[int, str, str])


def read_refusal(error: StaleWeightsError) -> None:
    """Read why a call was refused."""
    assert_type((error.method, error.needed), tuple[str, int | None])
    assert_type(error.held, dict[int, int | Literal["torn", "committing"] | None])


def carry_messages(tensors: Mapping[str, Any]) -> None:
    """Move tensors between endpoints."""
    with Endpoint(tensors) as trainer, Endpoint(lambda: tensors) as engine:
        described = trainer.describe()
        assert_type(described, EndpointDescription)
        assert_type((described.node, described.tensors), tuple[str, tuple[tuple[Any, ...], ...]])
        assert_type(described.token, bytes)
        plan = plan_endpoints([described], [engine.describe()], transport="auto", rename={"a": "b"}, exclude=["c"])
        assert_type(plan, EndpointPlan)
        assert_type(plan.plan, TransferPlan)
        assert_type(plan.transports, Mapping[tuple[int, int], str])
        assert_type(plan.sources, tuple[EndpointOrders, ...])
        orders = plan.targets[0]
        assert_type((orders.side, orders.rank), tuple[Literal["source", "target"], int])
        assert_type((orders.described, orders.content), tuple[tuple[tuple[Any, ...], ...], Mapping[str, Any]])
        assert_type((orders.secret, orders.membership), tuple[bytes, bytes])
        staged = trainer.stage(plan.sources[0], 1, verify=True)
        assert_type(staged, StagedPieces)
        assert_type((staged.rank, staged.version), tuple[int, int])
        assert_type((staged.channels, staged.proof), tuple[Sequence[Mapping[str, Any]], bytes])
        assert_type(engine.fetch(orders, [staged], timeout=1.0), None)
        assert_type(engine.commit(), int)
        engine.replace({})
    plan_endpoints([], [], transport="pigeon")  # type: ignore
    Endpoint([tensors])  # type: ignore


async def update_weights(weights: Sequence[tuple[str, Any]]) -> None:
    """Use the engines as their frameworks do."""
    engine = verl.FairleadCheckpointEngine(bucket_size=1 << 20, is_master=True, timeout=1.0)
    assert_type(engine.prepare(), dict[str, Any])
    assert_type(engine.build_topology(1, 1, []), tuple[dict[str, list[Any]], dict[str, list[Any]]])
    await engine.send_weights(iter(weights), global_steps=1)
    async for one in engine.receive_weights(global_steps=1):
        assert_type(one, tuple[str, Any])
    other = nemo_rl.FairleadCheckpointEngine(bucket_size=1 << 20)
    other.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    async for batch in other.receive_weight_batches():
        assert_type(batch, list[tuple[str, Any]])
    verl.FairleadCheckpointEngine()  # type: ignore
