# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-tpu-executor as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping, Sequence
from typing import Any, Literal, assert_type

import ray

from fairlead_placement import Node, Slot
from fairlead_placement.spi import SlotClaim
from fairlead_tpu_executor import (
    ENV_CALL_INDEX,
    ENV_CALL_SLICE,
    ENV_JOB_COORDINATOR_ADDRESS,
    ENV_PROCESS_COUNT,
    ENV_PROCESS_INDEX,
    MEGASCALE_DEFAULT_PORT,
    AcceleratorConfigType,
    CpuAcceleratorConfig,
    DeviceClass,
    DeviceFunction,
    DeviceInstances,
    GpuAcceleratorConfig,
    HeadUnreachableError,
    InsufficientSlicesError,
    JaxUnavailableError,
    JobError,
    JobFailed,
    JobInfo,
    JobPreempted,
    JobStatus,
    JobSucceeded,
    PoolBusyError,
    PoolStatistics,
    PreemptionLimitError,
    RayExecutor,
    SliceInfo,
    SliceLostError,
    SlicePool,
    SlicePoolManager,
    SliceShortage,
    TpuAcceleratorConfig,
    TpuExecutorError,
    TpuRemoteManager,
    autoscale_execute,
    autoscale_execute_resumable,
    device_remote,
    execute,
    execute_resumable,
    handle_ray_error,
    initialize_jax,
    resolve_maybe_refs,
    testing,
)

assert_type(ENV_CALL_INDEX, str)
assert_type(ENV_CALL_SLICE, str)
assert_type(ENV_JOB_COORDINATOR_ADDRESS, str)
assert_type(ENV_PROCESS_COUNT, str)
assert_type(ENV_PROCESS_INDEX, str)
assert_type(MEGASCALE_DEFAULT_PORT, int)


def train(path: str, steps: int = 1) -> float:
    return 0.0


remote_train = ray.remote(train)


class Trainer:
    def step(self, lr: float) -> float:
        return lr


def configure(nodes: Sequence[Node], one: SliceInfo) -> None:
    tpu = TpuAcceleratorConfig("v4-16", [1, 2], topology="2x2x2", chips_per_vm=4, cpu_count=2, megascale_port=8081)
    gpu = GpuAcceleratorConfig(2, "H100", 4, 3, execution_env={"env_vars": {"A": "1"}}, max_retries_failure=3)
    cpu = CpuAcceleratorConfig(core_count=2, worker_count=3, queue_timeout_s=None, max_retries_preemption=5)
    configs: list[AcceleratorConfigType] = [tpu, gpu, cpu]
    for config in configs:
        assert_type(config.kind, str)
        assert_type(config.hosts_per_slice, int)
        assert_type(config.sizes, tuple[int, ...])
        assert_type(config.execution_env, Mapping[str, Any] | None)
        assert_type(config.env_vars, Mapping[str, str])
        assert_type(config.runtime_env, dict[str, Any])
        assert_type(config.scale_timeout_s, float)
        assert_type(config.replace_timeout_s, float)
        assert_type(config.queue_timeout_s, float | None)
        assert_type(config.grace_s, float)
        assert_type(config.crash_grace_s, float)
        assert_type(config.healthy_after_s, float | None)
        assert_type(config.head_timeout_s, float)
        assert_type(config.flatten, bool)
        assert_type(config.max_retries_preemption, int)
        assert_type(config.max_retries_failure, int)
        assert_type(config.template(), SliceInfo)
        assert_type(config.bundle(one, worker=0), dict[str, float])
        assert_type(config.request(one), dict[str, float])
        assert_type(config.find(nodes).intact, tuple[SliceInfo, ...])
        assert_type(config.find(nodes).lacking, tuple[SliceShortage, ...])
    assert_type(tpu.tpu_version, str)
    assert_type(tpu.pod_count, int | Sequence[int])
    assert_type(tpu.topology, str | None)
    assert_type(tpu.chips_per_vm, int | None)
    assert_type(tpu.cpu_count, int)
    assert_type(tpu.resources, Mapping[str, float] | None)
    assert_type(tpu.megascale_port, int | None)
    assert_type(tpu.lock_files, tuple[str, ...])
    assert_type(tpu.slice_type.chips, int)
    assert_type(tpu.with_environment_variables({"A": "1"}, B="2"), TpuAcceleratorConfig)
    assert_type(gpu.with_environment_variables(A="1"), GpuAcceleratorConfig)
    assert_type(gpu.device_count, int)
    assert_type(gpu.gpu_model, str | None)
    assert_type(gpu.cpu_count, int)
    assert_type(gpu.worker_count, int)
    assert_type(cpu.core_count, int)
    assert_type(cpu.worker_count, int)


def pool(config: AcceleratorConfigType) -> None:
    with SlicePool("v4-16", [1, 2], scale_timeout_s=60) as pool:
        assert_type(pool, SlicePool)
    pool = SlicePool(config)
    assert_type(pool.config, AcceleratorConfigType)
    assert_type(pool.reserve(), SlicePool)
    assert_type(pool.scale([1, 2]), SlicePool)
    assert_type(pool.slices, tuple[SliceInfo, ...])
    assert_type(pool.slots(), tuple[Slot, ...])
    assert_type(pool.run(train, "path", steps=2), list[Any])
    assert_type(pool.run(remote_train, "path"), list[Any])
    assert_type(pool.run_on_first_hosts(train, "path"), list[Any])
    assert_type(pool.attempt(train, "path"), JobStatus)
    assert_type(pool.submit(train, "path"), list[list[Any]])
    assert_type(pool.get(pool.submit(train, "path")), list[Any])
    assert_type(pool.start(Trainer, (), {}), tuple[list[list[Any]], SlotClaim])
    assert_type(pool.checked(train).name, str)
    assert_type(pool.close(), bool)
    counts = pool.statistics()
    assert_type(counts, PoolStatistics)
    for count in (counts.attempts, counts.failures, counts.preemptions, counts.reservations):
        assert_type(count, int)


def slices(one: SliceInfo, lack: SliceShortage) -> None:
    for text in (one.slice_name, one.kind, one.topology, one.head_resource, one.zone, one.ip_address):
        assert_type(text, str)
    assert_type(one.node_ids, tuple[str, ...])
    assert_type(one.node_ips, tuple[str, ...])
    assert_type(one.num_hosts, int)
    assert_type(one.num_accelerators_per_host, int)
    assert_type(lack.slice_name, str)
    assert_type(lack.reason, str)


def status(status: JobStatus) -> None:
    info = status.info
    assert_type(info, JobInfo)
    assert_type(info.name, str)
    assert_type(info.state, Literal["running", "succeeded", "preempted", "failed", "error"])
    assert_type(info.kind, str)
    assert_type(info.slices, tuple[SliceInfo, ...])
    assert_type(info.attempt, int)
    assert_type(info.seconds, float)
    if isinstance(status, JobSucceeded):
        assert_type(status.result, Any)
    elif isinstance(status, JobPreempted | JobFailed | JobError):
        assert_type(status.error, BaseException)
    assert_type(handle_ray_error(info, ValueError(), node_gone=True), JobStatus)
    assert_type(resolve_maybe_refs([1]), Any)


def executor(config: AcceleratorConfigType) -> None:
    assert_type(RayExecutor.execute(train, config, path="path"), JobStatus)
    assert_type(RayExecutor.execute(remote_train, config, path="path"), JobStatus)
    assert_type(RayExecutor.autoscale_execute(train, config, flatten=False, path="path"), JobStatus)
    assert_type(RayExecutor.execute_resumable(train, config, 3, 1, path="path"), list[Any])
    assert_type(RayExecutor.autoscale_execute_resumable(train, config, 3, 1, True, path="path"), list[Any])


def decorators(config: AcceleratorConfigType) -> None:
    assert_type(execute(config)(train)("path"), JobStatus)
    assert_type(autoscale_execute(config, flatten=False)(remote_train)("path"), JobStatus)
    assert_type(execute_resumable(config, max_retries_failure=3)(train)("path"), list[Any])
    assert_type(autoscale_execute_resumable(config)(train)("path"), list[Any])


def devices(config: AcceleratorConfigType) -> None:
    function = device_remote(accelerator_config=config, flatten=False)(train)
    assert_type(function, DeviceFunction)
    assert_type(function.pool, SlicePool)
    assert_type(function.target, Any)
    assert_type(function.work.name, str)
    assert_type(function.remote("path", steps=2), list[Any])
    assert_type(function("path", steps=2), list[Any])
    with device_remote(accelerator_config=config)(Trainer) as trainers:
        assert_type(trainers, DeviceClass)
        with trainers.remote() as instances:
            assert_type(instances, DeviceInstances)
            assert_type(instances.step.remote(0.1), list[Any])
            assert_type(instances.step(0.1), list[Any])
        assert_type(trainers(), DeviceInstances)
        assert_type(instances.close(), None)
    assert_type(trainers.close(), bool)


def jax() -> None:
    assert_type(initialize_jax(timeout_s=60, local_device_ids=[0]), None)


def managers() -> None:
    with TpuRemoteManager("v4-16", [1, 2], base_env={"A": "1"}, runtime_env={}, coord_port=8081) as remote:
        assert_type(remote, TpuRemoteManager)
        assert_type(remote.pool, SlicePool)
        assert_type(remote.tpu_version, str)
        assert_type(remote.pod_count, int | Sequence[int])
        assert_type(remote.base_env, dict[str, str])
        assert_type(remote.runtime_env, dict[str, Any])
        assert_type(remote.coord_port, int | None)
        assert_type(remote.ensure(), TpuRemoteManager)
        assert_type(remote.run_function(train, "path", flatten=False), list[Any])
        assert_type(remote.run_class_method(Trainer, [], {}, "step", 0.1), list[Any])
        assert_type(remote.close(), bool)
    with SlicePoolManager("v4-16", scale_timeout_s=60) as manager:
        assert_type(manager, SlicePoolManager)
        assert_type(manager.pool, SlicePool)
        assert_type(manager.scale_multislice([1, 2]), None)
        assert_type(manager.prepare_all_slices(), None)
        assert_type(manager.get_all_pool_members(), list[SliceInfo])
        assert_type(manager.execute_on_each_slice(train, "path"), list[Any])
        assert_type(manager.execute_on_each_host(train, "path"), list[list[Any]])
        assert_type(manager.execute_on_each_host_flat(train, "path"), list[Any])
        assert_type(manager.drain_actor_pool(), None)


def pretend() -> None:
    with testing.PretendSlices() as slices:
        assert_type(slices, testing.PretendSlices)
        assert_type(slices.address, str)
        assert_type(slices.head_pid, int)
        assert_type(slices.add_slice("name", workers=[1, 0], kind="v4-16"), str)
        assert_type(slices.add_host("name", 2, topology="2x2x2", chips=4, env={"A": "1"}), str)
        assert_type(slices.node_id("name", 0), str)
        assert_type(slices.names(), list[str])
        assert_type(slices.kill("name", 0), None)
        assert_type(slices.remove("name"), None)
        assert_type(slices.close(), None)


def errors(pool: SlicePool) -> None:
    try:
        pool.run(train, "path")
    except InsufficientSlicesError as error:
        assert_type(error.kind, str)
        assert_type(error.requested, tuple[int, ...])
        assert_type(error.available, int)
        assert_type(error.missing, tuple[SliceShortage, ...])
        assert_type(error.waited_s, float)
    except PreemptionLimitError as error:
        assert_type(error.name, str)
        assert_type(error.preemptions, int)
        assert_type(error.limit, int)
        assert_type(error.last, str)
    except HeadUnreachableError as error:
        assert_type(error.silent_s, float)
    except JaxUnavailableError as error:
        assert_type(error.reason, str)
    except PoolBusyError as error:
        assert_type(error.running, str)
        assert_type(error.waited_s, float)
    except SliceLostError as error:
        assert_type(error.slices, tuple[str, ...])
        assert_type(error.reason, str)
    except TpuExecutorError as error:
        base: RuntimeError = error
        raise base from None


def wrong(pool: SlicePool, config: AcceleratorConfigType, one: SliceInfo) -> None:
    TpuAcceleratorConfig(16)  # type: ignore[arg-type]
    TpuAcceleratorConfig("v4-16", num_slices=2)  # type: ignore[call-arg]
    TpuAcceleratorConfig("v4-16", 2, "2x2x2")  # type: ignore[call-arg, arg-type]
    GpuAcceleratorConfig("H100")  # type: ignore[arg-type]
    CpuAcceleratorConfig(device_count=2)  # type: ignore[call-arg]
    config.with_environment_variables(A=1)  # type: ignore[arg-type]
    pool.run("train")  # type: ignore[arg-type]
    pool.scale("2")  # type: ignore[arg-type]
    RayExecutor.execute(train)  # type: ignore[call-arg]
    RayExecutor.execute(config, train)  # type: ignore[arg-type]
    execute(train)  # type: ignore[arg-type]
    execute(config)(1)  # type: ignore[arg-type]
    device_remote(config)  # type: ignore[call-arg]
    device_remote(accelerator_config=config)(1)  # type: ignore[call-overload]
    JobPreempted(JobInfo("train"))  # type: ignore[call-arg]
    one.zone = "a"  # type: ignore[misc]
