# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-tpu-executor as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any, Literal, assert_type

import ray

import fairlead_tpu_executor as tpu
from fairlead_placement import Slot
from fairlead_tpu_executor import testing


def train(path: str, steps: int = 1) -> float:
    return 0.0


class Trainer:
    def step(self, lr: float) -> float:
        return lr


remote_train = ray.remote(train)


def configure() -> list[tpu.AcceleratorConfigType]:
    slices = tpu.TpuAcceleratorConfig("v4-16", [1, 2], topology="2x2x2", chips_per_vm=4, megascale_port=8081)
    assert_type(slices.with_environment_variables({"A": "1"}, B="2"), tpu.TpuAcceleratorConfig)
    gpu = tpu.GpuAcceleratorConfig(2, "H100", 4, 3, execution_env={"env_vars": {"A": "1"}}, max_retries_failure=3)
    cpu = tpu.CpuAcceleratorConfig(core_count=2, worker_count=3, replace_timeout_s=60)
    names = tpu.ENV_CALL_INDEX, tpu.ENV_CALL_SLICE
    assert_type(names, tuple[str, str])
    assert_type(tpu.MEGASCALE_DEFAULT_PORT, int)
    tpu.TpuAcceleratorConfig(16)  # type: ignore[arg-type]
    return [slices, gpu, cpu]


def run(config: tpu.AcceleratorConfigType) -> None:
    with tpu.SlicePool("v4-16", [1, 2], scale_timeout_s=60) as pool:
        assert_type(pool, tpu.SlicePool)
    assert_type(pool.run(train, "path", steps=2), list[Any])
    assert_type(pool.run(remote_train, "path"), list[Any])
    assert_type((pool.slices, pool.slots()), tuple[tuple[tpu.SliceInfo, ...], tuple[Slot, ...]])
    pool.run("train")  # type: ignore[arg-type]
    assert_type(tpu.initialize_jax(timeout_s=60, local_device_ids=[0]), None)
    with testing.PretendSlices() as slices:
        assert_type(slices.add_slice("name", workers=[1, 0], kind="v4-16"), str)


def execute(config: tpu.AcceleratorConfigType) -> None:
    assert_type(tpu.RayExecutor.execute(train, config, path="path"), tpu.JobStatus)
    assert_type(tpu.RayExecutor.execute_resumable(train, config, 3, 1, path="path"), list[Any])
    assert_type(tpu.execute(config)(train)("path"), tpu.JobStatus)
    assert_type(tpu.autoscale_execute(config, flatten=False)(remote_train)("path"), tpu.JobStatus)
    assert_type(tpu.execute_resumable(config, max_retries_failure=3)(train)("path"), list[Any])
    assert_type(tpu.autoscale_execute_resumable(config)(train)("path"), list[Any])
    function = tpu.device_remote(accelerator_config=config, flatten=False)(train)
    assert_type((function, function.remote("path", steps=2)), tuple[tpu.DeviceFunction, list[Any]])
    with tpu.device_remote(accelerator_config=config)(Trainer) as trainers, trainers.remote() as instances:
        assert_type((trainers, instances), tuple[tpu.DeviceClass, tpu.DeviceInstances])
        assert_type(instances.step.remote(0.1), list[Any])
    tpu.RayExecutor.execute(config, train)  # type: ignore[arg-type]
    tpu.execute(config)(1)  # type: ignore[arg-type]
    tpu.device_remote(config)  # type: ignore[arg-type]


def manage() -> None:
    with tpu.TpuRemoteManager("v4-16", [1, 2], base_env={"A": "1"}, coord_port=8081) as remote:
        assert_type(remote.run_function(train, "path", flatten=False), list[Any])
        assert_type(remote.run_class_method(Trainer, [], {}, "step", 0.1), list[Any])
    with tpu.SlicePoolManager("v4-16", scale_timeout_s=60) as manager:
        assert_type(manager.get_all_pool_members(), list[tpu.SliceInfo])
        assert_type(manager.execute_on_each_host(train, "path"), list[list[Any]])


def read_status(status: tpu.JobStatus) -> None:
    assert_type(status.info, tpu.JobInfo)
    assert_type(status.info.state, Literal["running", "succeeded", "preempted", "failed", "error"])
    if isinstance(status, tpu.JobSucceeded):
        assert_type(status.result, Any)
    elif isinstance(status, tpu.JobPreempted | tpu.JobFailed | tpu.JobError):
        assert_type(status.error, BaseException)
    assert_type(tpu.handle_ray_error(status.info, ValueError()), tpu.JobStatus)
    assert_type(tpu.resolve_maybe_refs([1]), Any)


def read_errors(error: tpu.TpuExecutorError) -> None:
    match error:
        case tpu.InsufficientSlicesError():
            assert_type(error.missing, dict[str, str])
        case tpu.PreemptionLimitError():
            assert_type((error.preemptions, error.limit), tuple[int, int])
        case tpu.SliceLostError():
            assert_type(error.slices, tuple[str, ...])
        case tpu.JaxUnavailableError() | tpu.OpenInstancesError():
            assert_type(error.args, tuple[Any, ...])
