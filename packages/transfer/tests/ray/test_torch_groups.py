# SPDX-License-Identifier: Apache-2.0
"""A policy under FSDP2 and tensor parallelism sends its parameters to generators that shard them otherwise."""

import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Link
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup

SLOTS = 8

pytest.importorskip("torch", reason="needs torch")
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(400)]

SHAPES = {"up.weight": (32, 16), "up.bias": (32,), "down.weight": (16, 32), "down.bias": (16,), "norm.weight": (16,)}
# Which dim of each parameter tensor parallelism splits.
SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Policy:
    """A small model under FSDP2 over dp, and tensor parallelism over tp if there is such an axis."""

    def __init__(self, shape, reshard_after_forward=True):
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from fairlead_workergroup.torch import init_process_group

        torch.set_num_threads(1)
        init_process_group()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.up, self.model.down, self.model.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.RMSNorm(16)
        self.model.forward = lambda x: self.model.norm(self.model.down(torch.relu(self.model.up(x))))
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        if "tp" in shape:
            parallelize_module(self.model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self):
        import torch

        self.model(torch.ones(4, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_probabilities(self):
        import torch

        with torch.no_grad():
            return float(self.model(torch.ones(4, 16)).sum())

    def weights(self):
        return dict(self.model.named_parameters())

    def full(self, dtype=None):
        """Return the bits of all parameters."""
        import torch

        with torch.no_grad():
            full = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        if dtype is not None:
            full = {name: value.to(getattr(torch, dtype)).to(torch.float32) for name, value in full.items()}
        return {name: value.numpy().tobytes() for name, value in full.items()}


class Generator:
    """The parameters only, split over tp and replicated over other axes."""

    def __init__(self, shape):
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from fairlead_workergroup.torch import init_process_group

        torch.set_num_threads(1)
        self.parameters = {name: torch.zeros(sizes) for name, sizes in SHAPES.items()}
        if shape:
            init_process_group()
            mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
            for name, value in self.parameters.items():
                place = Shard(SPLIT[name]) if name in SPLIT else Replicate()
                placements = [place if axis == "tp" else Replicate() for axis in shape]
                self.parameters[name] = distribute_tensor(value, mesh, placements)

    def weights(self):
        return self.parameters

    def full(self):
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().tobytes()
            for name, value in self.parameters.items()
        }


POLICIES = [{"dp": 2, "tp": 2}, pytest.param({"dp": 4}, marks=pytest.mark.nightly)]
GENERATORS = [pytest.param({"tp": 4}, marks=pytest.mark.nightly), {"replica": 2, "tp": 2}, {}]


@pytest.fixture(scope="module", params=POLICIES, ids=["fsdp-tp", "fsdp"])
def policy(request, slots):
    builder = RayWorkerBuilder(Policy, request.param, "tp" in request.param)
    sharding = NamedSharding.from_shape(**request.param)
    with RayWorkerGroup(slots[:4], builder, sharding_annotations=sharding) as policy:
        yield policy


@pytest.fixture(scope="module", params=GENERATORS, ids=["tp4", "tp2x2", "whole"])
def generator(request, slots):
    sharding = NamedSharding.from_shape(**(request.param or {"replica": 1}))
    chosen = slots[4 : 4 + sharding.size]
    with RayWorkerGroup(chosen, RayWorkerBuilder(Generator, request.param), sharding_annotations=sharding) as generator:
        yield generator


def test_parameters_are_bit_equal(policy, generator):
    """After optimizer steps, forwards without a gradient and sends, all parameters are those of the policy."""
    with Link(policy, generator, source="weights", target="weights") as link:
        for version in range(4):
            policy.call("train").result()
            if version == 2:
                # FSDP2 leaves the parameters of the root whole until a backward.
                policy.call("log_probabilities").result()
            link.send(version, timeout=120)
            assert generator.call("full", collect=()).result() == policy.call("full", collect=()).result()
    with Link(policy, generator, source="weights", target="weights", dtype="bfloat16") as link:
        link.send(0, timeout=120)
        assert generator.call("full", collect=()).result() == policy.call("full", "bfloat16", collect=()).result()
