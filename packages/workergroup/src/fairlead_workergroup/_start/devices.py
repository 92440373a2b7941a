# SPDX-License-Identifier: Apache-2.0
"""The options of workers: the accelerators of its node that a worker sees, Ray's options, and the master port."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from fairlead_placement import Slot

from .. import _ray_private
from .._model import Place
from .options import check_ray_options


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The accelerators of its node that a worker sees, the Ray options of its actor, and the master port.

    Attributes:
        visible_devices: which accelerators a worker with accelerators sees. "own": those of its slot, and LOCAL_RANK is
            0, as code expects that runs one process for each device. "node": those of all workers of the group on its
            node, in the order of the ranks, and LOCAL_RANK is the index of its first one, as with torchrun.
        share_devices: let workers of the group have the same device, such as parts of one. Otherwise such a worker does
            not start.
        ray_options: options of Ray's actors, such as `{"runtime_env": {"nsight": "default"}}`, merged over those of the
            class. Those that the group sets, which decide for example where a worker runs, are refused.
        master_port: the master port, or the first and the last port of a range of which one is leased on the node of
            rank 0; None for the `port_range` of the cluster. With one port, all epochs have the same, and the group
            cannot be resized, because a resize needs a second port while the old workers use the first.
    """

    visible_devices: Literal["own", "node"] = "own"
    share_devices: bool = False
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    master_port: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.visible_devices not in ("own", "node"):
            raise ValueError(f"visible_devices must be 'own' or 'node', got {self.visible_devices!r}")
        check_ray_options(self.ray_options)
        read_master_ports(self)


def read_master_ports(options: WorkerOptions) -> tuple[int, int] | None:
    """Return the first and the last port that the master port may be; None for those of the cluster."""
    ports = options.master_port
    if ports is None:
        return None
    bounds = (ports, ports) if isinstance(ports, int) else ports
    if isinstance(bounds, tuple) and [type(port) for port in bounds] == [int, int]:
        first, last = bounds
        if 1 <= first <= last <= 65535:
            return first, last
    raise ValueError(
        f"master_port must be a port, or the first and the last port of a range, such as (29500, 29503), got {ports!r}"
    )


@functools.cache
def _limit() -> bytes:
    pickled: bytes = ray.cloudpickle.dumps(_ray_private.limit_devices)
    return pickled


def device_facts(place: Place, near: Sequence[Slot], chosen: WorkerOptions) -> dict[str, Any]:
    """Return the facts for `show_devices`, as plain data; nothing without accelerators in the slot.

    Args:
        place: the place of the worker.
        near: the slots of the group on the worker's node, in the order of the ranks.
        chosen: the options of the group.
    """
    if not place.slot.accelerators:
        return {}
    return {
        "visible": chosen.visible_devices,
        "share": chosen.share_devices,
        "slots": [dict(slot.accelerators) for slot in near],
        "local_rank": place.local_rank,
        "limit": _limit(),
    }
