# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-workergroup as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, assert_type

from ray import ObjectRef
from ray.util.placement_group import PlacementGroup

from fairlead_placement import PortLease, RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    BrokenEpochError,
    Call,
    CallCancelledError,
    CallExplanation,
    CallStatistics,
    CallTimeoutError,
    CurrentWorker,
    Elastic,
    EpochError,
    GroupHandle,
    GroupState,
    GroupStatistics,
    GroupView,
    JoinedCall,
    JoinedView,
    LaneError,
    LateWorker,
    MultiWorkerFuture,
    Outcome,
    PerWorker,
    Place,
    RayWorkerBuilder,
    RayWorkerGroup,
    RemoteError,
    ResizeTimeoutError,
    Restart,
    ResultStream,
    Shard,
    StartPhase,
    StartReport,
    StuckWorker,
    Timeouts,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerOptions,
    WorkerStartError,
    WorkerStatus,
    WorkerUsage,
    attach,
    current_worker,
    join,
    launch,
    recursive_merge_options,
    report_progress,
    spi,
    testing,
)
from fairlead_workergroup.torch import (
    GradientBytes,
    axis_group,
    broadcast_state,
    destroy,
    gradient_bytes,
    init_process_group,
    rewrap_ddp,
    wrap_ddp,
)


class Worker:
    def step(self, batch: list[int], lr: float) -> float:
        report_progress(step=1, message="one")
        me = current_worker()
        assert_type(me, CurrentWorker)
        with me.waiting():
            pass
        assert_type(me.rank, int)
        assert_type(me.world_size, int)
        assert_type(me.name, str)
        assert_type(me.coords, Mapping[str, int])
        assert_type(me.incarnation, int)
        assert_type(me.epoch, int)
        assert_type(me.communication_backend, Literal["nccl", "gloo"] | None)
        assert_type(me.gradient_compression, Literal["fp16", "bf16", "powersgd"] | None)
        assert_type(me.layout, Mapping[str, Any])
        assert_type(me.sharding, NamedSharding)
        return sum(batch) * lr

    def join(self, model: Any, optimizer: Any) -> None:
        assert_type(init_process_group("gloo", timeout_s=60), None)
        wrapped = wrap_ddp(model, compression="bf16", group=axis_group("dp"), bucket_cap_mb=1)
        sent = gradient_bytes(wrapped)
        assert_type(sent, GradientBytes)
        assert_type(sent.handed, int)
        assert_type(sent.uncompressed, int)
        assert_type(broadcast_state(model), None)
        assert_type(broadcast_state(wrapped, optimizer, source=0, group=axis_group("dp")), None)
        assert_type(gradient_bytes(rewrap_ddp(wrapped, group=axis_group("dp"))), GradientBytes)
        assert_type(destroy(), None)


def variables(place: Place) -> dict[str, str]:
    assert_type((place.rank, place.node_rank, place.local_rank, place.local_world_size), tuple[int, int, int, int])
    assert_type((place.tied_group, place.tied_rank), tuple[int, int])
    assert_type(place.tied_bundles, tuple[int, list[int]])
    assert_type(place.slot, Slot)
    return {"NAME": place.name}


def create(cluster: RayVirtualCluster, slots: Sequence[Slot]) -> None:
    axes = NamedSharding.from_shape(dp=2, tp=4)
    builder = RayWorkerBuilder(Worker, 1, key="value")
    with RayWorkerGroup(cluster, builder, sharding_annotations=axes, env_vars={"A": "1"}) as group:
        assert_type(group, RayWorkerGroup)
        assert_type(group.world_size, int)
        assert_type(group.name_prefix, str)
        assert_type(group.cluster, RayVirtualCluster | Sequence[Slot])
        assert_type(group.sharding_annotations, NamedSharding)
        assert_type(group.workers, list[Any])
        assert_type(group.worker_metadata, list[dict[str, Any]])
        assert_type(group.master_address, str)
        assert_type(group.master_port, int)
        assert_type(group.dp_size, int)
        assert_type(group.dp_leader_worker_indices, list[int])
        assert_type(group.get_dp_leader_worker_idx(0), int)
        assert_type(group.restart_failed_workers(), list[int])
        assert_type(group.replace([0], timeout=60), int)
        assert_type(group.resize(dp=3), int)
        assert_type(group.resize(dp=4, slots=slots, timeout=60), int)
        assert_type(group.shutdown("save", timeout=None), bool)
    RayWorkerGroup(slots, "package.module.Worker", [1, 2], "prefix", timeouts=Timeouts(call_s=60))
    RayWorkerGroup(
        cluster=cluster,
        remote_worker_builder=builder,
        workers_per_node=None,
        name_prefix="prefix",
        bundle_indices_list=None,
        sharding_annotations=axes,
        env_vars={"A": "1"},
    )
    RayWorkerGroup(slots, Worker, bundle_indices_list=[(0, [0, 1])], load_balancing_strategy=lambda loads: loads[0])
    RayWorkerGroup(slots, Worker, async_communication="auto", env_vars=variables)
    RayWorkerGroup(slots, Worker, async_communication=True, enable_gradient_compression="bf16")
    RayWorkerGroup(slots, Worker, restart=Restart(on_failure=True, scope="group", method="load"), memory_limit="8GB")
    restart = Restart(max_restarts=5, scope="group")
    assert_type((restart.on_failure, restart.max_restarts, restart.method), tuple[bool, int, str | None])
    assert_type(restart.scope, Literal["worker", "group"])
    elastic = Elastic(on_resize="join", standby=2)
    assert_type((elastic.standby, elastic.on_resize, elastic.on_handover), tuple[int, str | None, str | None])
    assert_type(elastic.on_drain, Literal["replace"] | None)
    worker = WorkerOptions(visible_devices="node", share_devices=True, ray_options={"memory": 1 << 30})
    assert_type(worker.ray_options, Mapping[str, Any])
    assert_type(worker.visible_devices, Literal["own", "node"])
    assert_type(worker.share_devices, bool)
    assert_type(WorkerOptions(master_port=(29500, 29503)).master_port, int | tuple[int, int] | None)
    WorkerOptions(master_port="29500")  # type: ignore[arg-type]
    RayWorkerGroup(slots, Worker, worker=worker)
    timeouts = Timeouts(start_s=60, call_s=None)
    assert_type((timeouts.start_s, timeouts.call_s), tuple[float, float | None])
    RayWorkerGroup(slots, Worker, restart=restart, elastic=elastic, timeouts=timeouts)
    RayWorkerGroup(slots, Worker, restart_on_failure=True, max_restarts=5, enable_load_balancing=True)
    RayWorkerGroup(
        slots, Worker, restart=Restart(method="load"), elastic=Elastic(on_handover="save", on_drain="replace")
    )


def build(group: PlacementGroup) -> None:
    builder = RayWorkerBuilder("package.module.Worker", 1, key="value")
    assert_type(builder.ray_actor_class_fqn, str)
    assert_type(builder.args, tuple[Any, ...])
    assert_type(builder.kwargs, dict[str, Any])
    assert_type(builder.with_methods("_step", "_save"), RayWorkerBuilder)
    assert_type(builder.methods, tuple[str, ...])
    assert_type(RayWorkerBuilder(builder.worker), RayWorkerBuilder)
    assert_type(builder(group, 0, num_gpus=0.5), Any)
    assert_type(builder.create_worker_async(group, 0, 1, (0, [0]), max_concurrency=2), tuple[ObjectRef[Any], Any])
    assert_type(recursive_merge_options({"a": 1}, {}), dict[str, Any])


def call(group: RayWorkerGroup, ref: ObjectRef[Any]) -> None:
    made = group.call("step", Shard([[1], [2]], "dp"), lr=0.1, collect=("dp",), first_along="tp", timeout=60)
    assert_type(made, Call)
    assert_type(made.refs, list[Any])
    assert_type(made.epoch, int)
    assert_type(made.result(timeout=1), Any)
    assert_type(made.outcomes(timeout=1), list[Outcome])
    assert_type(made.done(), bool)
    assert_type(made.wait(1.5), bool)
    assert_type(made.cancel(force=True), list[int])
    for outcome in made:
        assert_type(outcome.rank, int)
        assert_type(outcome.coords, Mapping[str, int])
        assert_type(outcome.value, Any)
    for outcome in made.stream(timeout=1):
        assert_type(outcome.error, BaseException | None)
    group.call("step", PerWorker([1, 2]), ref, made, discard=True)
    group.call("step", Shard(made, "dp"), PerWorker(made), retries=2)
    assert_type(made, Call[Any])
    made.as_argument()
    made.as_arguments()
    assert_type(made.method_name(), str)
    assert_type(group.map("step", range(3), max_in_flight=2, ordered=False, strategy="least_loaded"), ResultStream[Any])
    assert_type(group.map("step", range(3), return_exceptions=True, move_items=True), ResultStream[Any])
    assert_type(made.stream(), ResultStream[Outcome])


def launch_groups() -> None:
    assert_type(launch(Worker, dp=2, tp=2, init_args=[1], init_kwargs={"a": 1}, timeout_s=60), RayWorkerGroup)
    launch("package.Worker", workers=4, address="auto", gpus_per_worker=0.5, cpus_per_worker=2, python="uv run")
    launch(Worker, workers=4, env_vars=variables)
    launch(Worker, workers="4")  # type: ignore[arg-type]
    launch(Worker, dp=2.0)  # type: ignore[arg-type]
    launch(worker=Worker, dp=2)  # type: ignore[call-arg, arg-type]


def handle(group: RayWorkerGroup) -> None:
    handle = group.handle()
    assert_type(handle, GroupHandle)
    assert_type(attach("policy", "10.0.0.1:6379"), GroupHandle)
    assert_type((handle.name, handle.group_id, handle.epoch), tuple[str, str, int])
    assert_type(handle.sharding_annotations, NamedSharding)
    assert_type(handle.call(Worker.step, [1], 0.1, collect=()).result(), float)
    assert_type(handle.call("step", [1], 0.1), Call)
    assert_type(handle.at(dp=0), GroupView)
    assert_type(handle.with_options(timeout=1.0), GroupView)
    assert_type(handle.map("step", range(3)), ResultStream[Any])
    assert_type(handle.at().explain("step", [1]), CallExplanation)
    assert_type(handle.status(stuck_after_s=10.0), list[WorkerStatus])


async def call_functions(group: RayWorkerGroup) -> None:
    def sizes(worker: Worker, least: int) -> Iterator[int]:
        yield least

    async def fetch(worker: Worker) -> str:
        return "text"

    async def tokens(worker: Worker) -> AsyncIterator[str]:
        yield "text"

    made = group.call(Worker.step, PerWorker([[1], [2]]), lr=0.1, timeout=60)
    assert_type(made, Call[list[float]])
    assert_type(made.result(), list[float])
    assert_type(await made, list[float])
    assert_type(group.call(Worker.step, [1], 0.1, collect="dp").result(), list[float])
    assert_type(group.call(Worker.step, [1], 0.1, collect=()).result(), float)
    assert_type(group.call(Worker.step, [1], 0.1, discard=True), Call[None])
    group.call(lambda worker, more: worker.rank + more, 3)
    assert_type(group.call(sizes, 3).result(), list[list[int]])
    assert_type(group.call(sizes, 3, collect=()).result(), list[int])
    assert_type(group.call(fetch).result(), list[str])
    assert_type(group.call(fetch, collect=()).result(), str)
    assert_type(group.call(tokens, collect=()).result(), list[str])
    assert_type(group.at(dp=0).call(Worker.step, [1], 0.1), Call)
    assert_type(group.at().explain(Worker.step, [1], 0.1), CallExplanation)
    assert_type(group.map(sizes, range(3)), ResultStream[Any])


def wrapped(made: Call) -> None:
    shard = Shard([[1], [2]], "dp", "tp")
    assert_type(shard.values, Any)
    assert_type(shard.axes, tuple[str, ...])
    assert_type(PerWorker(made), PerWorker)


def lane(group: RayWorkerGroup) -> None:
    with group.lane(timeout=30.0) as nothing:
        assert_type(nothing, None)
        assert_type(group.call("step", [1], 0.1).statistics().route, str)
    error = LaneError("why", (1,))
    assert_type(error.reason, str)
    assert_type(error.ranks, tuple[int, ...])
    assert_type(error.late, tuple[LateWorker, ...])


def explain(group: RayWorkerGroup) -> None:
    explanation = group.at().explain("step", 1, collect="dp")
    assert_type(explanation.route, str)
    assert_type(explanation, CallExplanation)
    assert_type(explanation.summary, str)
    assert_type(explanation.header, tuple[str, ...])
    assert_type(explanation.rows, tuple[tuple[str, ...], ...])


def count(group: RayWorkerGroup, made: Call) -> None:
    state = group.inspect()
    assert_type(state, GroupState)
    assert_type((state.epoch, state.standby), tuple[int, int])
    assert_type(state.standby_metadata, list[dict[str, Any]])
    assert_type(state.shown, Mapping[str, Any])
    of_group = state.statistics
    assert_type(of_group, GroupStatistics)
    assert_type(of_group.calls, int)
    assert_type(of_group.lane_requests, int)
    assert_type(of_group.lane_fallbacks, int)
    of_call = made.statistics()
    assert_type(of_call, CallStatistics)
    assert_type(of_call.submit_s, float)
    for number in (of_group.requests, of_group.puts, of_call.requests, of_call.puts):
        assert_type(number, int)
    for number in (of_call.bytes_put, of_call.fetched, of_call.bytes_fetched):
        assert_type(number, int)


async def wait(group: RayWorkerGroup) -> None:
    assert_type(await group.call("step"), Any)
    async for outcome in group.call("step"):
        assert_type(outcome, Outcome)
    stream = group.call("step").stream()
    async for outcome in stream:
        assert_type(outcome, Outcome)
    assert_type(await stream.aclose(), None)


def views(group: RayWorkerGroup) -> None:
    view = group.at(dp=0, tp=slice(1, None))
    assert_type(view, GroupView)
    assert_type(view.at(tp=-1).call("step"), Call)
    assert_type(view.ranks, list[int])
    assert_type(view.coords, dict[int, dict[str, int]])
    assert_type(view.workers, list[Any])
    assert_type(view.sharding_annotations, NamedSharding | None)
    assert_type(view.explain("step"), CallExplanation)
    assert_type(view.map("step", [1]), ResultStream[Any])
    assert_type(group.at().ranks, list[int])
    assert_type(group.at().coords, dict[int, dict[str, int]])
    assert_type(group.with_options(timeout=60, collect="dp").call("step", collect=3, anything=4), Call)
    assert_type(view.with_options(discard=True).with_options(retries=1, first_along="tp"), GroupView)


def joined(trainer: RayWorkerGroup, rollouts: GroupHandle) -> None:
    both = join(trainer, rollouts, trainer.at(dp=0))
    assert_type(both, JoinedView)
    assert_type(both.with_options(timeout=60, discard=True), JoinedView)
    assert_type(both.parts[0].at(dp=0), GroupView)
    made = both.call("step", PerWorker([1, 2]), timeout=60)
    assert_type(made, JoinedCall)
    assert_type(made.result(timeout=1), Any)
    assert_type(made.cancel(force=True), dict[str, list[int]])
    assert_type(made.calls, tuple[Call, ...])
    assert_type(made.refs, list[Any])
    assert_type((made.done(), made.wait(1)), tuple[bool, bool])
    assert_type(made.method_name(), str)
    assert_type(made.outcomes()[0].group, str)
    assert_type([outcome.rank for outcome in made], list[int])
    trainer.call("step", made, PerWorker(made))
    try:
        made.result()
    except WorkerFailureError as error:
        assert_type([failure.group for failure in error.failures], list[str])
    join("trainer")  # type: ignore[arg-type]


def classic(group: RayWorkerGroup) -> None:
    assert_type(group.run_single_worker_single_data("step", 0, 1, lr=2), ObjectRef[Any])
    assert_type(group.run_all_workers_single_data("step", 1, run_rank_0_only_axes=["tp"]), list[ObjectRef[Any]])
    several = group.run_all_workers_multiple_data("step", [1, 2], lr=[0.1, 0.2], common_kwargs={"path": ""})
    assert_type(several, list[ObjectRef[Any]])
    future: MultiWorkerFuture = group.run_all_workers_sharded_data("step", [1, 2], in_sharded_axes="dp")
    assert_type(group.get_all_worker_results(future), list[Any])
    assert_type(group.get_all_worker_results(several, return_generators_as_proxies=True), list[Any])
    future = MultiWorkerFuture([1], return_from_workers=[0], called_workers=[0])
    assert_type(future.futures, list[Any])
    assert_type(future.return_from_workers, list[int] | None)
    assert_type(future.called_workers, list[int] | None)
    assert_type(future.get_results(group), list[Any])


def watch(group: RayWorkerGroup) -> None:
    (status,) = group.get_worker_status(stuck_after_s=60)
    assert_type(status, WorkerStatus)
    assert_type(status.state, Literal["starting", "idle", "busy", "stuck", "dead", "restarting", "unknown"])
    assert_type(status.name, str)
    assert_type(status.method, str | None)
    assert_type(status.step, int | None)
    assert_type(status.message, str)
    assert_type((status.weights, status.weights_age_s), tuple[int | None, float])
    for number in (status.rank, status.pid, status.calls, status.incarnation, status.restarts):
        assert_type(number, int)
    (usage,) = group.get_resource_usage()
    assert_type(usage, WorkerUsage)
    assert_type(usage.rank, int)
    assert_type(usage.cpu_percent, float)
    assert_type(usage.rss_bytes, int)
    assert_type(usage.gpu_memory_bytes, int | None)
    assert_type(usage.num_threads, int)
    (stuck,) = group.detect_stuck_workers(60, dump_stacks=False)
    assert_type(stuck, StuckWorker)
    assert_type(stuck.method, str | None)
    for text in (stuck.stacks, stuck.where, stuck.note):
        assert_type(text, str)
    for one in (status, stuck):
        assert_type(one.rank, int)
        assert_type(one.coords, Mapping[str, int])
        assert_type(one.node_id, str)
        assert_type(one.pid, int)
        assert_type(one.running_s, float)
        assert_type(one.since_progress_s, float)


def start(group: RayWorkerGroup) -> None:
    report = group.inspect().start_report
    assert_type(report, StartReport)
    assert_type((report.group, report.workers), tuple[str, int])
    assert_type(report.seconds, float)
    assert_type(report.phases, tuple[StartPhase, ...])
    assert_type(report["create"], StartPhase)
    phase = report.phases[0]
    assert_type(phase.seconds, float)
    assert_type(phase.median_s, float | None)
    assert_type(phase.max_s, float | None)
    assert_type(phase.slowest, tuple[tuple[int, float], ...])
    name: Literal["reserve", "environment", "agents", "describe", "create", "process", "import", "constructor"]
    name = phase.name
    assert_type(report[name], StartPhase)
    report["start"]  # type: ignore[index]
    report.seconds = 1.0  # type: ignore[misc]


def faults(group: RayWorkerGroup) -> None:
    assert_type(testing.kill(group, 0), None)
    with testing.hang(group, 0, "native-gil", timeout_s=5) as hung:
        assert_type(hung, testing.Hang)
        assert_type(hung.rank, int)
        assert_type(hung.how, Literal["sleep", "native", "native-gil", "stop"])
    assert_type(hung.close(), None)
    assert_type(testing.slow(group, 0, 0.5), None)
    assert_type(testing.fill_memory(group, 0, 1 << 30), bool)
    with testing.LocalGroup(Worker, dp=2, tp=2, init_args=[1], init_kwargs={"key": 2}, timeout_s=5) as local:
        assert_type(local, testing.LocalGroup)
        assert_type(local.call(Worker.step, Shard([[1], [2]], "dp"), 0.1), Call[list[float]])
        assert_type(local.call("step", [1], 0.1, collect=()).result(), Any)
        assert_type(local.at(dp=0).with_options(timeout=5), GroupView)
        assert_type(local.map("step", [[1]]), ResultStream[Any])
        assert_type(local.world_size, int)
        assert_type(local.sharding_annotations, NamedSharding)
        assert_type(local.close(timeout=None), None)
    testing.LocalGroup("package.module.Worker", workers=2)
    testing.LocalGroup(Worker, sharding_annotations=NamedSharding.from_shape(dp=2)).close()
    with testing.assert_no_leaks(timeout_s=5):
        pass


def errors(group: RayWorkerGroup) -> None:
    try:
        group.call("step").result()
    except CallTimeoutError as error:
        assert_type(error.method, str)
        assert_type(error.waited_s, float)
        assert_type(error.called, int)
        assert_type(error.late, tuple[LateWorker, ...])
        for worker in error.late:
            assert_type(worker.rank, int)
            assert_type(worker.coords, Mapping[str, int])
            assert_type(worker.node_id, str)
            assert_type(worker.pid, int)
            assert_type(worker.method, str | None)
            assert_type(worker.running_s, float)
        late: TimeoutError = error
        raise late from None
    except ResizeTimeoutError as error:
        assert_type(error.what, str)
        assert_type(error.waited_s, float)
        assert_type(error.late, tuple[LateWorker, ...])
        assert_type(error.reason, str)
        late_resize: TimeoutError = error
        raise late_resize from None
    except EpochError as error:
        assert_type(error.reason, str)
        assert_type(error.epoch, int)
        assert_type(error.ran, tuple[int, ...])
        assert_type(error.refused, tuple[int, ...])
    except BrokenEpochError as error:
        assert_type(error.failures, tuple[WorkerFailure, ...])
        assert_type(error.remedy, str)
        assert_type(error.epoch, int)
    except WorkerFailureError as error:
        assert_type(error.failures, tuple[WorkerFailure, ...])
        assert_type(error.remedy, str)
        for failure in error.failures:
            assert_type(failure.rank, int)
            assert_type(
                failure.kind,
                Literal[
                    "killed",
                    "node-lost",
                    "out-of-memory",
                    "preempted",
                    "start-failed",
                    "cancelled",
                    "resize-failed",
                    "left",
                ],
            )
            assert_type(failure.coords, Mapping[str, int])
            assert_type(failure.node_id, str)
            assert_type(failure.pid, int)
            assert_type(failure.cause, str)
            assert_type(failure.exit_code, int | None)
            assert_type(failure.signal, int | None)
    except WorkerStartError as error:
        assert_type(error.reason, str)
        assert_type(error.rank, int)
        assert_type(error.coords, dict[str, int])
        assert_type(error.node_id, str)
        assert_type(error.remote_traceback, str)
        assert_type(error.others, str)
    except CallCancelledError as error:
        assert_type(error.method, str)
        assert_type(error.ranks, tuple[int, ...])
    except RemoteError as error:
        assert_type(error.type_name, str)
        assert_type(error.message, str)
        assert_type(error.remote_traceback, str)
        assert_type(error.rank, int)
        base: WorkerGroupError = error
        raise base from None


def build_on_groups(group: RayWorkerGroup) -> None:
    snapshot = spi.read_members(group)
    assert_type(snapshot, spi.Snapshot)
    assert_type((snapshot.epoch, snapshot.version), tuple[int, int])
    assert_type(snapshot.sharding, NamedSharding)
    assert_type(snapshot.departed, Mapping[int, spi.Member])
    assert_type(snapshot.is_broken, bool)
    assert_type(snapshot.has([0, 1]), bool)
    for resize in snapshot.resizes:
        assert_type(resize, spi.Resize)
        assert_type((resize.epoch, resize.axis, resize.before, resize.after), tuple[int, str, int, int])
    assert_type(snapshot.ended, bool)
    assert_type(snapshot.lost, Mapping[int, WorkerFailure])
    assert_type(snapshot.restarting, tuple[int, ...])
    assert_type([place.rank for place in snapshot.places], list[int])
    assert_type(snapshot.processes, tuple[spi.WorkerProcess, ...])
    assert_type([one.epoch for one in snapshot.facts], list[int])
    member = snapshot.members[0]
    assert_type(member, spi.Member)
    assert_type(member.rank, int)
    assert_type(member.coords, Mapping[str, int])
    assert_type(member.slot, Slot)
    assert_type(member.place.slot, Slot)
    assert_type(member.state, str)
    assert_type((member.incarnation, member.restarts), tuple[int, int])
    assert_type(member.restarting, bool)
    assert_type(member.failure, WorkerFailure | None)
    assert_type(member.handle, Any)
    process = member.process
    assert_type(process.key, tuple[int, int])
    assert_type(process.actor_id, str)
    assert_type((process.rank, process.pid, process.started), tuple[int, int, int])
    assert_type((process.node_id, process.node_ip), tuple[str, str])
    assert_type(process.failure("killed", "why"), WorkerFailure)
    with spi.record_span("a transfer", group):
        pass
    requests = {0: (process, spi.send_function(member, "name", b"", 1, alone_within_s=2.0))}
    for reply in spi.collect(group, requests, 3.0, all_of_them=True).values():
        assert_type(reply, spi.Reply)
        assert_type(reply.is_good, bool)
        assert_type(reply.worker, spi.WorkerProcess)
        assert_type(reply.value, Any)
        assert_type(reply.error, BaseException | None)
        assert_type(reply.failure, WorkerFailure | None)
        assert_type(reply.late, LateWorker | None)
    spi.cancel(requests)
    need = spi.Need(b"", (1,))
    assert_type((need.function, need.args), tuple[bytes, tuple[Any, ...]])
    assert_type(spi.check_calls(group, lambda method, ranks: need if ranks else None), Callable[[], None])
    assert_type(spi.wait_for_turn(group, 1.0), bool)
    assert_type(spi.add_state(group, "versions", lambda: {0: 1}), Callable[[], None])
    assert_type(spi.stream_function(member, b"", 1), Any)
    assert_type(spi.actor_id_of(member.handle), str)


def write_transport(site: spi.Site, carrier: spi.Transport, ref: ObjectRef[int]) -> None:
    assert_type((carrier.name, carrier.most_waiting, carrier.failures), tuple[str, int, int])
    encoded = carrier.encode([])
    assert_type(encoded, list[Any])
    assert_type(carrier.send(site.members(), [0], encoded, yields_items=False), list[Any])
    assert_type(carrier.wait_for_room([0], 1.0), bool)
    assert_type(carrier.makes_way([0]), bool)
    assert_type(carrier.wait_for_way([0], None), bool)
    with carrier.detour([0]):
        carrier.open(1.0)
        carrier.stop()
        carrier.close(1.0)
    assert_type(carrier.run(lambda: True, 1.0), bool)
    assert_type((site.overlaps, site.is_connected, site.is_ending), tuple[bool, bool, bool])
    assert_type(site.lease_port(), PortLease)
    assert_type(site.late_workers([0]), tuple[LateWorker, ...])
    site.report_end("actor", ValueError(), "it ended")
    message = spi.Message(carrier, b"")
    message.resolve([b""], ref=None, error=None, failed=False, has_references=False)
    carrier.call_back(message)
    assert_type(carrier.cancel(message.task, asks=True), bool)
    assert_type((message.done, message.failed, message.has_references), tuple[bool, bool, bool])
    assert_type((message.frames, message.error), tuple[Sequence[bytes] | None, BaseException | None])
    assert_type((message.binary(), message.size(), message.get()), tuple[bytes, int, Any])
    message.ref = message.store(1.0)
    message.carrier = carrier
    message.add_callback(lambda one: one.run_callbacks())
    assert_type(message.cancel(asks=False), bool)
    assert_type(message.future().result(), Any)
    stream = spi.MessageStream(carrier, b"")
    stream.add_item(message)
    stream.resolve(failed=True)
    assert_type((stream.done, stream.next_ready(), stream.task), tuple[bool, bool, bytes])
    assert_type(stream.completed(), spi.Message)
    assert_type(spi.dump(1), list[Any] | None)
    frames = spi.dump_error("method", ValueError(), package="package", address="127.0.0.1")[1]
    assert_type(frames, list[bytes] | None)
    assert_type(spi.ownership_of(ref), tuple[bytes, bytes, bytes] | None)
    assert_type(spi.borrow(b"", b"", b""), Any)


def extend_groups(group: RayWorkerGroup, handle: GroupHandle) -> None:
    observer = spi.CallObserver()
    assert_type(observer.begin("step", 1.0, []), int)
    observer.end([1], failed=True)
    observer.mark("a loss")
    observer.explain(KeyError())
    spi.observe_calls(handle, observer)
    spi.on_worker_start(group, lambda on_call, on_step: None)
    assert_type(spi.task_of_future(object()), bytes)
    unsubscribe = spi.subscribe(group, lambda notice: assert_type(notice, spi.Notice), lambda within_s: None)
    unsubscribe()
    notice = spi.Notice("resized", -1, "text")
    assert_type((notice.kind, notice.rank, notice.message), tuple[str, int, str])
    workers = spi.observe_workers(group)
    assert_type(workers, spi.Observer)
    assert_type((workers.name, workers.connected), tuple[str, bool])
    assert_type(workers.members, spi.Snapshot)
    assert_type(workers.read_status(spi.STUCK_AFTER_S), list[WorkerStatus])
    assert_type(workers.read_usage(), list[WorkerUsage])
    assert_type(workers.find_stuck(spi.check_seconds("timeout_s", 1), dump_stacks=True), list[StuckWorker])
    assert_type(workers.find_causes([], within_s=1.0), Mapping[int, WorkerFailure])
    assert_type(spi.record_html(notice), str)


def look_at_other_groups(handle: GroupHandle) -> None:
    group = spi.publication_of(handle)()
    assert_type(group, spi.RegisteredGroup)
    assert_type(spi.find_groups(), list[spi.RegisteredGroup])
    assert_type(spi.find_group("policy"), spi.RegisteredGroup)
    assert_type(
        (group.group_id, group.name, group.label, group.class_name, group.namespace), tuple[str, str, str, str, str]
    )
    assert_type((group.shape, group.sharding), tuple[Mapping[str, int], NamedSharding])
    assert_type(
        (group.layout, group.driver, group.methods), tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    )
    assert_type((group.created, group.epoch, group.publication), tuple[float, int, int])
    assert_type((group.settled, group.lane), tuple[bool, bool])
    assert_type(list(group.agents), list[str])
    worker = group.members[0]
    assert_type(worker, spi.RegisteredWorker)
    assert_type((worker.rank, worker.pid, worker.started, worker.tied_rank), tuple[int, int, int, int])
    assert_type((worker.incarnation, worker.restarts), tuple[int, int])
    assert_type((worker.name, worker.node_id, worker.address), tuple[str, str, str])
    assert_type((worker.actor_id, worker.actor_name, worker.mark), tuple[str, str, str])
    assert_type(worker.coords, Mapping[str, int])
    processes = [(worker.pid, worker.started)]
    rows = spi.look_from_outside([(worker.pid, worker.started, worker.mark)], 10.0, False)
    state: spi.State = spi.state_of(False, rows[0])
    assert_type(state, spi.State)
    assert_type(spi.find_innermost(rows[0]["stacks"]), str)
    assert_type(spi.find_method_frames(""), tuple[tuple[str, str, str], ...])
    assert_type(spi.look_at_process(1, spi.start_tick(1), "host"), str)
    assert_type(spi.read_records(processes, methods=True), list[dict[str, Any] | None])
    file, page = spi.make_memory_file("name", 8)
    assert_type((file, page[0]), tuple[int, int])
    assert_type(spi.open_memory_file(1, "name"), int | None)
    evidence = spi.Evidence("node", "gone", "node-lost", "Its node is lost.")
    assert_type((evidence.text, evidence.at), tuple[str, float])
    assert_type((evidence.exit_code, evidence.signal), tuple[int | None, int | None])
    assert (evidence.source, evidence.says, evidence.kind) == ("node", "gone", "node-lost")
    verdict = spi.decide(spi.WorkerProcess(0), [evidence])
    assert_type((verdict.is_lost, verdict.cause), tuple[bool, str])
    assert_type(spi.alive_nodes(), frozenset[str])
    assert_type(spi.drain_deadlines(), dict[str, float])
    assert_type(spi.process_is_alive("id"), bool | None)
    assert_type(spi.read_deaths(["01"]), dict[str, dict[str, str]])


def wrong(group: RayWorkerGroup, slots: Sequence[Slot], made: Call, status: WorkerStatus) -> None:
    RayWorkerGroup(slots)  # type: ignore[call-arg]
    RayWorkerGroup(8, Worker)  # type: ignore[arg-type]
    RayWorkerGroup(slots, worker=Worker)  # type: ignore[call-arg, arg-type]
    RayWorkerGroup(slots, Worker, restart=Restart(scope="all"))  # type: ignore[arg-type]
    RayWorkerGroup(slots, Worker, restart_scope="group")  # type: ignore[call-arg]
    RayWorkerGroup(slots, Worker, load_balancing_strategy="random")  # type: ignore[arg-type]
    RayWorkerGroup(slots, Worker, enable_gradient_compression="int8")  # type: ignore[arg-type]
    RayWorkerGroup(slots, Worker, env_vars={"A": 1})  # type: ignore[dict-item]
    group.call("step", timeout="60")  # type: ignore[call-overload]
    group.call("step", collect=0)  # type: ignore[call-overload]
    group.at(dp="0")  # type: ignore[arg-type]
    group.with_options(lr=0.1)  # type: ignore[call-arg]
    group.at(dp=0).with_options(lr=0.1)  # type: ignore[call-arg]
    group.map("step", 3)  # type: ignore[arg-type]
    Shard([1, 2], 0)  # type: ignore[arg-type]
    PerWorker(3)  # type: ignore[arg-type]
    made.result("1")  # type: ignore[arg-type]
    testing.LocalGroup(Worker, workers=2).resize(dp=2)  # type: ignore[attr-defined]
    testing.LocalGroup(Worker, dp="2")  # type: ignore[arg-type]
    testing.hang(group, 0, "forever")  # type: ignore[arg-type]
    testing.slow(group, 0, 0.5, 60)  # type: ignore[call-arg]
    report_progress("one")  # type: ignore[arg-type]
    wrap_ddp(None, compression="int8")  # type: ignore[arg-type]
    status.step = 2  # type: ignore[misc]
