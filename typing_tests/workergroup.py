# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-workergroup as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping, Sequence
from typing import Any, assert_type

import fairlead_workergroup as wg
import fairlead_workergroup.torch as wg_torch
from fairlead_placement import RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import testing


class Worker:
    def step(self, batch: list[int], lr: float) -> float:
        wg.report_progress(step=1, message="one")
        me = wg.current_worker()
        assert_type(me, wg.CurrentWorker)
        assert_type((me.rank, me.coords, me.sharding), tuple[int, Mapping[str, int], NamedSharding])
        return sum(batch) * lr

    def train(self, model: Any, optimizer: Any) -> None:
        wg_torch.init_process_group("gloo", timeout_s=60)
        wrapped = wg_torch.wrap_ddp(model, compression="bf16", group=wg_torch.axis_group("dp"))
        wg_torch.broadcast_state(wrapped, optimizer)
        wg_torch.destroy()


def create(cluster: RayVirtualCluster, slots: Sequence[Slot], options: wg.WorkerOptions) -> None:
    axes = NamedSharding.from_shape(dp=2, tp=4)
    builder = wg.RayWorkerBuilder(Worker, 1, key="value")
    with wg.RayWorkerGroup(cluster, builder, sharding_annotations=axes, env_vars={"A": "1"}, worker=options) as group:
        assert_type(group, wg.RayWorkerGroup)
    policies = wg.Restart(on_failure=True, scope="group"), wg.Elastic(on_resize="join"), wg.Timeouts(call_s=60)
    wg.RayWorkerGroup(slots, "package.Worker", restart=policies[0], elastic=policies[1], timeouts=policies[2])
    assert_type(wg.launch(Worker, dp=2, tp=2, init_args=[1], python="uv run"), wg.RayWorkerGroup)
    assert_type(wg.recursive_merge_options({"a": 1}, {}), dict[str, Any])
    wg.RayWorkerGroup(8, Worker)  # type: ignore[arg-type]
    wg.RayWorkerGroup(slots, Worker, load_balancing_strategy="random")  # type: ignore[arg-type]
    wg.launch(Worker, workers="4")  # type: ignore[arg-type]


async def call(group: wg.RayWorkerGroup, handle: wg.GroupHandle) -> None:
    assert_type(group.call("step", wg.Shard([[1], [2]], "dp"), lr=0.1), wg.Call)
    assert_type(group.call(Worker.step, wg.PerWorker([[1], [2]]), lr=0.1).result(), list[float])
    assert_type(await group.call(Worker.step, [1], 0.1, collect="dp"), list[float])
    assert_type(handle.call(Worker.step, [1], 0.1, collect=()).result(), float)
    assert_type(group.call(Worker.step, [1], 0.1, discard=True), wg.Call[None])
    assert_type(group.at(dp=0).with_options(timeout=60), wg.GroupView)
    assert_type(group.at().explain("step", [1]), str)
    assert_type(group.call("step").stream(timeout=1), wg.ResultStream[wg.Outcome])
    assert_type(group.map("step", range(3), strategy="least_loaded"), wg.ResultStream[Any])
    assert_type(wg.attach("policy", "10.0.0.1:6379"), wg.GroupHandle)
    future: wg.MultiWorkerFuture = group.run_all_workers_sharded_data("step", [1, 2], in_sharded_axes="dp")
    assert_type(group.get_all_worker_results(future), list[Any])
    group.call("step", timeout="60")  # type: ignore[call-overload]
    group.at(dp="0")  # type: ignore[arg-type]


def watch(group: wg.RayWorkerGroup) -> None:
    assert_type(group.get_worker_status(), list[wg.WorkerStatus])
    assert_type(group.get_resource_usage(), list[wg.WorkerUsage])
    assert_type(group.detect_stuck_workers(60), list[wg.StuckWorker])
    assert_type(group.restart_failed_workers(), list[int])
    assert_type((group.resize(dp=3), group.restart([0]), group.shutdown("save")), tuple[int, list[int], bool])
    state = group.state()
    assert_type(state, wg.GroupState)
    testing.kill(group, 0)
    testing.stop(group, 0)
    testing.resume(group, 0)


def read_errors(error: Exception) -> None:
    match error:
        case wg.CallTimeoutError() | wg.ResizeTimeoutError():
            assert_type(error.late, tuple[wg.LateWorker, ...])
        case wg.WorkerFailureError():
            assert_type(error.failures, tuple[wg.WorkerFailure, ...])
        case wg.StaleGroupError():
            assert_type((error.epoch, error.ran, error.refused), tuple[int, tuple[int, ...], tuple[int, ...]])
        case wg.RemoteError() | wg.WorkerStartError():
            assert_type(error.remote_traceback, str)
        case wg.CallCancelledError():
            assert_type(error.ranks, tuple[int, ...])
        case wg.WorkerGroupError():
            assert_type(error.args, tuple[Any, ...])
