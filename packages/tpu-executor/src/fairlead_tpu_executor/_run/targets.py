# SPDX-License-Identifier: Apache-2.0
"""Where the parts of some work go, and what is started there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .. import _host, _ray_private
from .._accelerators.config import AcceleratorConfigType, TpuAcceleratorConfig
from .._accelerators.slices import SliceInfo
from .._reserve.leases import Lease
from .environment import Variables
from .work import Work

__all__ = ["Place", "places_of", "start", "submit"]

# fairlead-tpu-executor need not be installed on the hosts.
ray.cloudpickle.register_pickle_by_value(_host)
ray.cloudpickle.register_pickle_by_value(_ray_private)


@dataclass(frozen=True)
class Place:
    """A host to run on.

    Attributes:
        slice: its slice.
        at: number of the slice.
        worker: its TPU worker id.
        group: the placement group of the slice, whose bundle `worker` it is.
        facts: what the process needs to know of the host, as plain data.
        options: what the task asks Ray for.
    """

    slice: SliceInfo
    at: int
    worker: int
    group: Any
    facts: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def node_id(self) -> str:
        """Ray's id of the host."""
        return self.slice.node_ids[self.worker]

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Where Ray is to put what runs here."""
        return PlacementGroupSchedulingStrategy(self.group, self.worker)


def places_of(
    work: Work,
    config: AcceleratorConfigType,
    leases: Sequence[Lease],
    variables: Callable[[int, int], Variables],
) -> list[list[Place]]:
    """A place on every host, a list per slice.

    Args:
        work: what is to run there.
        config: of the pool.
        leases: the slices.
        variables: of slice and worker.
    """
    runtime_env = work.runtime_env(config)
    tpu = config if isinstance(config, TpuAcceleratorConfig) else None
    places: list[list[Place]] = []
    for at, lease in enumerate(leases):
        options = {**work.remote_options(config, lease.slice), **({"runtime_env": runtime_env} if runtime_env else {})}
        places.append([])
        for worker, node_id in enumerate(lease.slice.node_ids):
            facts = {
                # A host has one process of ours at a time, whoever's pool it is in; without chips, each bundle has.
                "name": node_id if tpu else f"{lease.group.id.hex()}-{worker}",
                "env": {**work.env_vars, **variables(at, worker)},
                "zone": lease.slice.zone if tpu else "",
                "lock_files": tpu.lock_files if tpu else (),
            }
            places[-1].append(Place(lease.slice, at, worker, lease.group, facts, options))
    return places


def submit(place: Place, payload: Any, *, raw: bool = False, dedicated: bool = False) -> Any:
    """Start the task of a host.

    Args:
        place: where.
        payload: reference to the function and its arguments.
        raw: the reference is the user's: it has what the function returns, in a process of its own from the start.
        dedicated: have a process of its own from the start.
    """
    options = dict(place.options)
    if raw or dedicated:
        # Only tasks with this very environment share processes, and each of them ends its process.
        options["runtime_env"] = _own_process(options.get("runtime_env"))
    facts = {**place.facts, "dedicated": raw or dedicated}
    task = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(_host.call_raw if raw else _host.call)
    # In a list, so that it is unpickled on the host only after its environment is set.
    return task.options(**options, scheduling_strategy=place.strategy).remote(facts, [payload])


def start(place: Place, payload: Any) -> Any:
    """Start the actor of a host; its instance of the user's class is made with its first call."""
    options = {**place.options, "runtime_env": _own_process(place.options.get("runtime_env"))}
    actor = ray.remote(_host.HostActor).options(**options, scheduling_strategy=place.strategy, max_restarts=0)
    return actor.remote(dict(place.facts), [payload])


def _own_process(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """An environment that no other task of the job has, and so no process that one ran in."""
    own = dict(runtime_env or {})
    return {**own, "env_vars": {**(own.get("env_vars") or {}), "FAIRLEAD_OWN_PROCESS": "1"}}
