# SPDX-License-Identifier: Apache-2.0
"""A whole `RayWorkerGroup`, the shipped one, on pretended nodes: its cluster, its class, and what its methods do."""

import dataclasses
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any

from fairlead_placement import PlacementError, RayVirtualCluster, Slot
from fairlead_sharding import NamedSharding
from fairlead_workergroup import Elastic, RayWorkerGroup, Restart, Timeouts

from .actors import HANG, Takes, Worker
from .ray import PretendedRay
from .scheduler import SimulationError
from .seam import WorkerClass, describe

START_S = 40.0
# A method that meets others waits at most this long for them; `START_S` would end it later.
MEET_S = 30.0


class Model:
    """The class of the user; `Behaviour` says what its methods do in pretended workers."""

    def step(self) -> None: ...
    def meet(self, number: int) -> None: ...
    def slow(self) -> None: ...
    def fail(self) -> None: ...
    def on_restart(self) -> None: ...
    def on_resize(self) -> None: ...
    def clean_up(self) -> None: ...


@cache
def _describe() -> WorkerClass:
    return describe(Model)


def describe_model(*_: Any, **__: Any) -> WorkerClass:
    """Return the description of the class, which is made once for all runs."""
    return _describe()


class PretendedCluster(RayVirtualCluster):
    """A cluster with some slots on each pretended node."""

    port_range = None  # type: ignore[assignment]

    def __init__(self, ray: PretendedRay, each: int) -> None:
        self.num_gpus_per_node = 0
        self.communication_backend = "gloo"
        self._ray = ray
        self._slots = [
            _make_slot(node, number, at) for number, node in enumerate(ray.nodes.values()) for at in range(each)
        ]

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots as they are now."""
        return tuple(self._slots)

    def replace_lost_nodes(self, **_: Any) -> Any:
        """Reserve slots on living nodes in place of those on dead ones."""
        self._ray.world.point("replaces lost nodes")
        living = [node for node in self._ray.nodes.values() if node.is_alive]
        if not living:
            raise PlacementError("no node is left")
        for at, slot in enumerate(self._slots):
            if not self._ray.nodes[slot.node_id].is_alive:
                node = living[0]
                group = SimpleNamespace(id=b"again" + bytes([at]), bundle_specs=slot.placement_group.bundle_specs)
                local_rank = sum(one.node_id == node.id for one in self._slots)
                self._slots[at] = dataclasses.replace(
                    slot, placement_group=group, node_id=node.id, node_ip=node.ip, local_rank=local_rank
                )


def _make_slot(node: Any, number: int, at: int) -> Slot:
    bundles = [{"CPU": 1.0}] * (at + 1)
    return Slot(
        placement_group=SimpleNamespace(id=node.id.encode(), bundle_specs=bundles),
        bundle_index=at,
        node_idx=number,
        node_id=node.id,
        node_ip=node.ip,
        node_rank=number,
        local_rank=at,
        worker_resources={"CPU": 1.0},
    )


@dataclasses.dataclass
class Behaviour:
    """What the methods of the class do in pretended workers.

    Attributes:
        hook_fault: what a hook does on the first rank that runs it: "", "raises" or "hangs".
        meets_on_restart: whether `on_restart` waits for all ranks of the group.
    """

    ray: PretendedRay
    hook_fault: str = ""
    meets_on_restart: bool = False
    _met: dict[Any, set[int]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def install(self) -> None:
        """Give the pretended workers these methods."""
        self.ray.methods |= {
            "meet": lambda worker, number: self._meet(worker, "meet", number),
            "slow": lambda worker: Takes(5.0),
            "fail": self._fail,
            "on_restart": self._on_restart,
            "on_resize": lambda worker: self._hook(worker) or self._meet(worker, "on_resize", worker.epoch),
            "clean_up": lambda worker: None,
        }

    def _fail(self, worker: Worker) -> None:
        raise RuntimeError("the method fails")

    def _on_restart(self, worker: Worker) -> Any:
        if (outcome := self._hook(worker)) is not None or not self.meets_on_restart:
            return outcome
        return self._meet(worker, "on_restart", worker.epoch)

    def _hook(self, worker: Worker) -> Any:
        fault, self.hook_fault = self.hook_fault, self.hook_fault and "done"
        if fault == "raises":
            raise RuntimeError("the hook fails")
        return HANG if fault == "hangs" else None

    def _meet(self, worker: Worker, method: str, key: Any) -> Takes:
        """Wait in a worker until all ranks of its epoch run the method, or one of them is lost."""
        ray, epoch, size = self.ray, worker.epoch, worker.facts["world_size"]
        met = self._met[method, key]
        met.add(worker.facts["rank"])

        def is_over() -> bool:
            return len(met) >= size or len(self._peers(epoch)) < size

        def give_up() -> None:
            missing = sorted(set(range(size)) - met)
            if not self.hook_fault and not is_over() and worker.actor.is_running and not worker.actor.is_killed:
                text = f"rank {worker.facts['rank']} has waited {MEET_S:g} s in {method} of epoch {epoch} for {missing}"
                ray.world.fail(SimulationError(f"waits in vain: {text}"))

        return Takes(MEET_S, None, is_over, give_up)

    def _peers(self, epoch: int) -> set[int]:
        """Return the ranks whose processes run and are of this epoch, or get its facts soon."""
        running = [actor.worker for actor in self.ray.actors if actor.is_running and not actor.is_killed]
        return {worker.facts["rank"] for worker in running if "rank" in worker.facts and worker.epoch <= epoch}


def make_group(ray: PretendedRay, *, workers: int = 2, each: int = 3, restart: Restart | None = None) -> RayWorkerGroup:
    """Start the shipped group on pretended nodes that have `each` slots."""
    cluster = PretendedCluster(ray, each)
    return RayWorkerGroup(
        cluster,
        Model,
        workers_per_node=[workers // len(ray.nodes)] * len(ray.nodes),
        name_prefix="simulated",
        sharding_annotations=NamedSharding.from_shape(dp=workers),
        restart=dataclasses.replace(restart or Restart(), method="on_restart"),
        elastic=Elastic(on_resize="on_resize"),
        timeouts=Timeouts(start_s=START_S),
    )
