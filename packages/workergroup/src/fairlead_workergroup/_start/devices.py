# SPDX-License-Identifier: Apache-2.0
"""Which accelerators of its node a worker sees, and what its process has to know to limit that."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray

from fairlead_placement import Slot

from .. import _ray_private
from .._membership.model import Place
from .options import check_ray_options


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The accelerators of its node that a worker sees, and the Ray options of its actor.

    Attributes:
        visible_devices: which accelerators a worker with accelerators sees. "own": those of its slot, and LOCAL_RANK is
            0, as code expects that runs one process for each device. "node": those of all workers of the group on its
            node, in the order of the ranks, and LOCAL_RANK is the index of its first one, as with torchrun.
        share_devices: let workers of the group have the same device, such as parts of one. Otherwise such a worker does
            not start.
        ray_options: options of Ray's actors, such as `{"runtime_env": {"nsight": "default"}}`, merged over those of the
            class. Those that the group sets, which decide for example where a worker runs, are refused.
    """

    visible_devices: Literal["own", "node"] = "own"
    share_devices: bool = False
    ray_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.visible_devices not in ("own", "node"):
            raise ValueError(f"visible_devices must be 'own' or 'node', got {self.visible_devices!r}")
        check_ray_options(self.ray_options)


# Workers need not have this package.
ray.cloudpickle.register_pickle_by_value(_ray_private)


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
