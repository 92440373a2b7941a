# SPDX-License-Identifier: Apache-2.0
"""Workers on real GPUs: which one each sees, the torch helpers with NCCL, memory, hangs. Skipped without a GPU."""

import os
import re
import time

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, WorkerFailureError
from fairlead_workergroup.testing import kill

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

MIB = 1 << 20


@pytest.fixture(scope="module")
def real_ray():
    """Start a Ray that finds the GPUs itself."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


class Worker:
    """Uses its GPU."""

    def __init__(self, mib=0):
        import torch

        self.held = torch.ones(mib * MIB, dtype=torch.uint8, device="cuda")

    def sees(self):
        """Return what tells the worker its GPU, and the UUID of the one that it gets."""
        import torch

        names = "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE"
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        return *(os.environ.get(name) for name in names), torch.cuda.device_count(), uuid

    def multiply(self, size):
        import torch

        one = torch.full((size, size), 2.0, device="cuda", dtype=torch.bfloat16)
        return float((one @ one).float().mean())

    def hang(self):
        """Wait for a kernel that takes minutes."""
        import torch

        torch.cuda._sleep(10**12)
        torch.cuda.synchronize()

    def fail(self):
        """Read beyond the end of a tensor, which ends all use of the GPU by this process."""
        import torch

        torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()


def test_a_worker_sees_its_gpu(real_ray):
    """The slot names the GPU that the worker sees, and computes on."""
    with RayVirtualCluster([1], use_gpus=True) as cluster, RayWorkerGroup(cluster, Worker) as group:
        (slot,) = cluster.slots()
        ((visible, rank, local_rank, world_size, count, uuid),) = group.call("sees").result()
        assert (visible,) == slot.accelerator_ids == ("0",)
        assert (rank, local_rank, world_size, count) == ("0", "0", "1", 1)
        assert uuid == str(torch.cuda.get_device_properties(0).uuid)
        assert group.call("multiply", 1024).result() == [4096.0]
        assert cluster.communication_backend == "nccl"


def test_memory(real_ray, eventually):
    """The use of memory of the GPU is reported for the worker."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    restart = Restart(max_restarts=5)
    with (
        RayVirtualCluster([1], use_gpus=True) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Worker, 2048), restart=restart) as group,
    ):
        (usage,) = group.get_resource_usage()
        # In a virtual machine the driver may report no process.
        assert usage.gpu_memory_bytes == 0 or usage.gpu_memory_bytes >= 2048 * MIB


def test_a_broken_context(real_ray):
    """An error of the GPU comes with its text, and a restart gives a worker that can use the GPU again."""
    restart = Restart(max_restarts=5)
    with (
        RayVirtualCluster([1], use_gpus=True) as cluster,
        RayWorkerGroup(cluster, Worker, restart=restart) as group,
    ):
        for method in ("fail", "fail"):
            with pytest.raises(Exception, match="CUDA error"):
                group.call(method).result(timeout=60)
        kill(group, 0)
        assert group.restart_failed_workers() == [0]
        assert group.call("multiply", 1024).result() == [4096.0]


def test_hang_on_the_gpu(real_ray):
    """While a worker waits for a kernel, its state and its line are shown; a restart ends the kernel."""
    restart = Restart(max_restarts=5)
    with (
        RayVirtualCluster([1], use_gpus=True) as cluster,
        RayWorkerGroup(cluster, Worker, name_prefix="policy", restart=restart) as group,
    ):
        group.call("multiply", 16).result()
        call = group.call("hang")
        time.sleep(2)
        (status,) = group.get_worker_status()
        assert (status.method, status.state) == ("hang", "busy")
        (stuck,) = group.detect_stuck_workers(1.0)
        assert re.search(r"line [1-9]\d* in synchronize", stuck.stacks)
        assert re.search(r"line [1-9]\d* in \S*hang", stuck.stacks)
        kill(group, 0)
        with pytest.raises(WorkerFailureError):
            call.result(timeout=60)
        assert group.restart_failed_workers() == [0]
        assert group.call("multiply", 1024).result(timeout=60) == [4096.0]


class Trainer:
    """Trains under DDP and FSDP2 with NCCL."""

    def connect(self):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import broadcast_state, init_process_group, wrap_ddp

        init_process_group(timeout_s=60)
        torch.manual_seed(0)
        self.model = getattr(self, "model", torch.nn.Linear(64, 64).to("cuda"))
        self.optimizer = getattr(self, "optimizer", torch.optim.Adam(self.model.parameters()))
        broadcast_state(self.model, self.optimizer)
        self.ddp = wrap_ddp(self.model)
        return dist.get_backend()

    def step(self, compression=None):
        """Return the loss before and after some steps."""
        import torch

        from fairlead_workergroup.torch import broadcast_state, wrap_ddp

        model = self.ddp if compression is None else wrap_ddp(self.model, compression=compression)
        losses = []
        for _ in range(20):
            loss = model(torch.ones(8, 64, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss))
        broadcast_state(self.model, self.optimizer)
        return losses[0] > losses[-1]

    def sum_along(self):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import axis_group

        value = torch.ones(3, device="cuda")
        dist.all_reduce(value, group=axis_group("dp"))
        return value.tolist()

    def fsdp(self):
        """Return whether a step under FSDP2 on the mesh of the group works."""
        import torch
        from torch.distributed.fsdp import fully_shard

        from fairlead_workergroup import current_worker

        mesh = current_worker().sharding.to_device_mesh("cuda")
        model = torch.nn.Linear(8, 8).to("cuda")
        fully_shard(model, mesh=mesh["dp"])
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        return next(model.parameters()).to_local().device.type

    def disconnect(self):
        from fairlead_workergroup.torch import destroy

        destroy()


def test_nccl(real_ray):
    """The torch helpers take NCCL and tensors on the GPU, also when they join again."""
    from fairlead_sharding import NamedSharding

    sharding = NamedSharding.from_shape(dp=1)
    with (
        RayVirtualCluster([1], use_gpus=True) as cluster,
        RayWorkerGroup(cluster, Trainer, sharding_annotations=sharding) as group,
    ):
        assert group.call("connect", timeout=120).result() == ["nccl"]
        assert group.call("step").result() == [True]
        for compression in ("bf16", "fp16", "powersgd"):
            group.call("step", compression).result()
        assert group.call("sum_along").result() == [[1.0, 1.0, 1.0]]
        assert group.call("fsdp").result() == ["cuda"]
        assert group.call("connect", timeout=120).result() == ["nccl"]
        group.call("step").result()
        group.shutdown(cleanup_method="disconnect")
