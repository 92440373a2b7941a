# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-workergroup as mypy sees it. Never run: `nox -s typecheck` checks that these types hold."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_type

from ray import ObjectRef

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    Call,
    CallExplanation,
    CallStatistics,
    CallTimeoutError,
    CurrentWorker,
    GroupStatistics,
    GroupView,
    LateWorker,
    MultiWorkerFuture,
    Outcome,
    PerWorker,
    RayWorkerBuilder,
    RayWorkerGroup,
    Shard,
    StuckWorker,
    Watch,
    WorkerEvent,
    WorkerFailure,
    WorkerFailureError,
    WorkerStartError,
    WorkerStatus,
    WorkerUsage,
    current_worker,
    recursive_merge_options,
    report_progress,
    testing,
)


class Worker:
    def step(self, batch: list[int], lr: float) -> float:
        report_progress(step=1, message="one")
        assert_type(current_worker(), CurrentWorker)
        assert_type(current_worker().sharding, NamedSharding)
        return sum(batch) * lr


def create(cluster: RayVirtualCluster, slots: Sequence[Slot]) -> None:
    axes = NamedSharding.from_shape(dp=2, tp=4)
    builder = RayWorkerBuilder(Worker, 1, key="value")
    with RayWorkerGroup(cluster, builder, sharding_annotations=axes, env_vars={"A": "1"}) as group:
        assert_type(group, RayWorkerGroup)
        assert_type(group.world_size, int)
        assert_type(group.worker_metadata, list[dict[str, Any]])
        assert_type(group.statistics(), GroupStatistics)
        assert_type(group.shutdown("save", timeout=None), bool)
    RayWorkerGroup(slots, "package.module.Worker", [1, 2], "prefix", call_timeout_s=60)
    RayWorkerGroup(slots, Worker, bundle_indices_list=[(0, [0, 1])], load_balancing_strategy=lambda loads: loads[0])
    RayWorkerGroup(slots, Worker, async_communication=True, enable_gradient_compression="bf16")


def call(group: RayWorkerGroup, ref: ObjectRef) -> None:
    made = group.call("step", Shard([[1], [2]], "dp"), lr=0.1, collect=("dp",), first_along="tp", timeout=60)
    assert_type(made, Call)
    assert_type(made.outcomes(timeout=1), list[Outcome])
    assert_type(made.done(), bool)
    assert_type(made.wait(1.5), bool)
    assert_type(made.cancel(force=True), list[int])
    assert_type(made.statistics(), CallStatistics)
    for outcome in made:
        assert_type(outcome.coords, Mapping[str, int])
    for outcome in made.stream(timeout=1):
        assert_type(outcome.error, BaseException | None)
    group.call("step", PerWorker([1, 2]), ref, made, discard=True)
    assert_type(group.explain("step", 1), CallExplanation)
    assert_type(group.map("step", range(3), max_in_flight=2, ordered=False, strategy="least_loaded"), Iterator[Any])


async def wait(group: RayWorkerGroup) -> None:
    await group.call("step")
    async for outcome in group.call("step"):
        assert_type(outcome, Outcome)


def views(group: RayWorkerGroup) -> None:
    view = group.at(dp=0, tp=slice(1, None))
    assert_type(view, GroupView)
    assert_type(view.at(tp=-1).call("step"), Call)
    assert_type(view.ranks, list[int])
    assert_type(view.coords, dict[int, dict[str, int]])
    assert_type(view.sharding_annotations, NamedSharding | None)
    assert_type(group.with_options(timeout=60, collect="dp").call("step", collect=3, anything=4), Call)


def classic(group: RayWorkerGroup) -> None:
    assert_type(group.run_single_worker_single_data("step", 0, 1, lr=2), ObjectRef)
    assert_type(group.run_all_workers_single_data("step", 1, run_rank_0_only_axes=["tp"]), list[ObjectRef])
    future: MultiWorkerFuture = group.run_all_workers_sharded_data("step", [1, 2], in_sharded_axes="dp")
    assert_type(group.get_all_worker_results(future), list[Any])
    assert_type(MultiWorkerFuture([1]).get_results(), list[Any])
    assert_type(recursive_merge_options({"a": 1}, {}), dict[str, Any])


def watch(group: RayWorkerGroup) -> None:
    assert_type(group.get_worker_status(stuck_after_s=60), list[WorkerStatus])
    assert_type(group.get_worker_status()[0].step, int | None)
    assert_type(group.get_resource_usage(), list[WorkerUsage])
    assert_type(group.detect_stuck_workers(60, dump_stacks=False), list[StuckWorker])

    def on_event(event: WorkerEvent) -> None:
        assert_type(event.stuck, StuckWorker | None)

    with group.watch(5, 300, on_event, slow_after_s=60) as watch:
        assert_type(watch, Watch)
    group.watch(on_event=print).close()


def faults(group: RayWorkerGroup) -> None:
    testing.kill(group, 0)
    with testing.hang(group, 0, "native-gil", timeout_s=5) as hung:
        assert_type(hung, testing.Hang)
    testing.slow(group, 0, 0.5)
    assert_type(testing.fill_memory(group, 0, 1 << 30), bool)


def errors(group: RayWorkerGroup) -> None:
    try:
        group.call("step").result()
    except CallTimeoutError as error:
        assert_type(error.late, tuple[LateWorker, ...])
        late: TimeoutError = error
        raise late from None
    except WorkerFailureError as error:
        assert_type(error.failures, tuple[WorkerFailure, ...])
    except WorkerStartError as error:
        assert_type(error.coords, dict[str, int])
