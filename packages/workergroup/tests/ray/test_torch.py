# SPDX-License-Identifier: Apache-2.0
"""The torch helpers, on real process groups; skipped without torch."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Elastic, RayWorkerGroup, Shard, current_worker
from fairlead_workergroup.testing import kill

pytest.importorskip("torch", reason="the torch helpers need torch")
datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")


class Member:
    """Joins, and reduces along axes."""

    def join(self):
        import torch.distributed as dist

        from fairlead_workergroup.torch import init_process_group

        init_process_group(timeout_s=60)
        return dist.get_backend(), dist.get_rank(), dist.get_world_size()

    def sum_along(self, *axes):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import axis_group

        value = torch.tensor([float(current_worker().rank)])
        dist.all_reduce(value, group=axis_group(*axes))
        assert axis_group(*axes) is axis_group(*axes)
        return int(value)

    def gather_along(self, *axes):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import axis_group

        group = axis_group(*axes)
        gathered = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, torch.tensor([float(current_worker().rank)]), group=group)
        return [int(value) for value in gathered]

    def timeout_along(self, *axes):
        import torch

        from fairlead_workergroup.torch import axis_group

        return axis_group(*axes)._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def bad_axis(self):
        from fairlead_workergroup.torch import axis_group

        return axis_group("pp")

    def leave(self):
        import torch.distributed as dist

        from fairlead_workergroup.torch import destroy

        destroy()
        destroy()
        return dist.is_initialized()


LAYOUT = [[3, 0], [1, 2]]


def test_groups_along_axes(local_ray):
    """The store is on the leased port, ranks are those of the group, and axis groups follow any layout."""
    axes = NamedSharding(LAYOUT, ["dp", "tp"])
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Member, sharding_annotations=axes) as group,
    ):
        assert group.call("join").result() == [("gloo", rank, 4) for rank in range(4)]
        assert group.call("sum_along", "tp").result() == [3, 3, 3, 3]
        assert group.call("sum_along", "dp").result() == [2, 4, 2, 4]
        assert group.call("sum_along", "tp", "dp").result() == [6] * 4
        # Row-major over the axes in the order given, whatever the ranks.
        assert group.call("gather_along", "tp").result() == [[3, 0], [1, 2], [1, 2], [3, 0]]
        assert group.call("gather_along", "tp", "dp").result() == [[3, 1, 0, 2]] * 4
        assert group.call("timeout_along", "dp").result() == [60] * 4
        with pytest.raises(ValueError, match="Invalid axis name: 'pp'"):
            group.call("bad_axis").result()
        assert group.call("leave").result() == [False] * 4
        assert group.call("join").result()[0] == ("gloo", 0, 4)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ipv6_store(local_ray):
    """Workers find the store of a master with an IPv6 address, and the interface of such an address."""
    from fairlead_workergroup import torch as helpers

    with RayVirtualCluster([2], use_gpus=False) as cluster:
        slots = [dataclasses.replace(slot, node_ip="::1") for slot in cluster.slots()]
        axes = NamedSharding.from_shape(dp=2)
        with RayWorkerGroup(slots, Member, sharding_annotations=axes) as group:
            assert group.call("join").result() == [("gloo", rank, 2) for rank in range(2)]
            assert group.call("sum_along", "dp").result() == [1, 1]
            assert group.call("leave").result() == [False] * 2
    assert helpers._interface_of("::1") == "lo"
    assert helpers._interface_of("127.0.0.1") == "lo"
    assert helpers._interface_of("2001:db8::99") is None


def test_backend_of_the_cluster(local_ray):
    """torch gets the backend of the cluster; torch on CPUs has no NCCL and reports it."""
    with (
        RayVirtualCluster([1], use_gpus=False, communication_backend="nccl") as cluster,
        RayWorkerGroup(cluster, Member) as group,
        pytest.raises((RuntimeError, ValueError), match="NCCL"),
    ):
        group.call("join", timeout=60).result()


class Classifier:
    """A data-parallel classifier of digits, which counts the bytes that hooks of torch reduce."""

    def __init__(self):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import init_process_group, wrap_ddp

        def all_reduce(tensor, *args, **kwargs):
            self.reduced += tensor.nbytes
            return reduce(tensor, *args, **kwargs)

        self.reduced = self.gradients = 0
        reduce, dist.all_reduce = dist.all_reduce, all_reduce
        torch.set_num_threads(1)
        init_process_group(timeout_s=60)
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)
        self.model = wrap_ddp(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def train(self, batch, epochs):
        import torch

        x, y = map(torch.tensor, batch)
        for _ in range(epochs):
            for part in torch.arange(len(x)).split(48):
                self.optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.model(x[part]), y[part]).backward()
                self.optimizer.step()
                self.gradients += sum(parameter.grad.nbytes for parameter in self.model.parameters())

    def correct(self, x, y):
        import torch

        with torch.no_grad():
            return int((self.model(torch.tensor(x)).argmax(dim=1) == torch.tensor(y)).sum())

    def bytes(self):
        """Return the bytes that hooks have reduced, and those of all gradients."""
        return self.reduced, self.gradients

    def weights(self):
        return [parameter.detach().numpy() for parameter in self.model.parameters()]


# The other kinds of compression, which take as long as the first.
SLOW = [pytest.param(*one, marks=pytest.mark.nightly) for one in (("bf16", 0.5), ("powersgd", 0.35))]


@pytest.mark.parametrize(("compression", "share"), [(True, 0.5), *SLOW])
def test_compressed_gradients(local_ray, compression, share):
    """Fewer bytes reach the collective, all workers have the same weights, and the accuracy is still 93 %."""
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    axes = NamedSharding.from_shape(dp=2)
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Classifier, sharding_annotations=axes, enable_gradient_compression=compression
        ) as group,
    ):
        halves = [(x[:720], y[:720]), (x[720:1440], y[720:1440])]
        group.call("train", Shard(halves, "dp"), epochs=15).result()
        assert group.call("correct", x[1440:], y[1440:], collect=()).result() / len(x[1440:]) > 0.93
        (reduced, gradients), same = group.call("bytes").result()
        assert (reduced, gradients) == same
        assert 0 < reduced <= share * gradients
        ours, theirs = group.call("weights").result()
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_no_compression(local_ray):
    """Without compression torch's own reducer is used, and no hook."""
    x, y = np.ones((8, 64), np.float32), np.zeros(8, np.int64)
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Classifier) as group,
    ):
        group.call("train", (x, y), epochs=1).result()
        ((reduced, gradients),) = group.call("bytes").result()
        assert reduced == 0 < gradients


class Replica:
    """A replica of a model with buffers, which begins with parameters of its own."""

    def __init__(self):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(current_worker().rank + 10 * current_worker().group_epoch)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def connect(self):
        from fairlead_workergroup.torch import axis_group, broadcast_state, init_process_group, wrap_ddp

        init_process_group(timeout_s=60)
        broadcast_state(self.model, self.optimizer, group=axis_group("dp"))
        self.ddp = wrap_ddp(self.model, group=axis_group("dp"), compression="bf16", bucket_cap_mb=1)

    def train(self, steps):
        import torch
        import torch.distributed as dist

        from fairlead_workergroup.torch import axis_group

        for _ in range(steps):
            self.optimizer.zero_grad()
            self.ddp(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
        group = axis_group("dp")
        assert self.ddp.process_group is group
        return dist.get_world_size(), dist.get_world_size(group)

    def state(self):
        """Return the bits of the parameters and of the moments, and the number of steps that Adam has counted."""
        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        (steps,) = {int(state["step"]) for state in self.optimizer.state.values()}
        return [value.detach().numpy().tobytes() for value in (*self.model.parameters(), *moments)], steps

    def broadcast_other(self):
        import torch

        from fairlead_workergroup.torch import broadcast_state

        broadcast_state(torch.nn.Linear(4, 1 + current_worker().rank))


@pytest.mark.nightly
def test_process_groups_of_several_epochs(local_ray):
    """DDP with Adam grows, loses workers, and shrinks; after each change all replicas have the same state."""
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Replica,
            workers_per_node=[2],
            sharding_annotations=NamedSharding.from_shape(dp=2),
            elastic=Elastic(on_resize="connect"),
        ) as group,
    ):

        def train(taken):
            size = group.world_size
            assert group.call("train", 5, timeout=120).result() == [(size, size)] * size
            states = group.call("state").result()
            assert [steps for _, steps in states] == [taken] * size
            assert all(state == states[0] for state in states)

        group.call("connect", timeout=120).result()
        train(5)
        group.resize(dp=3)
        train(10)
        # The store is on the same port, in a new process; the state is that of those that stayed.
        kill(group, 0)
        assert group.restart_failed_workers() == [0]
        group.call("connect", timeout=120).result()
        train(15)
        group.resize(dp=2)
        train(20)
        # The state would be that of rank 1, because rank 0 has been restarted.
        with pytest.raises(ValueError, match="differ in shape or dtype from those of rank 1"):
            group.call("broadcast_other", timeout=120).result()


def test_outside_a_worker():
    """The helpers raise outside a worker."""
    from fairlead_workergroup import torch as helpers

    for use in (helpers.init_process_group, lambda: helpers.axis_group("dp")):
        with pytest.raises(RuntimeError, match="runs no worker"):
            use()
    with pytest.raises(ValueError, match="needs the axes"):
        helpers.axis_group()


def test_unknown_compression(local_ray):
    """An unknown compression is refused before anything starts."""
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        pytest.raises(ValueError, match=r"True, False or one of \['fp16', 'bf16', 'powersgd'\], got 'zip'"),
    ):
        RayWorkerGroup(cluster, Classifier, enable_gradient_compression="zip")
