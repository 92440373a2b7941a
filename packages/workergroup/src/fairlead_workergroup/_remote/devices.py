# SPDX-License-Identifier: Apache-2.0
"""Which accelerators a worker process sees. Shipped by value."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray

from .._ray_private import limit_devices


def show_devices(facts: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Limit which devices this process sees, before any code of the user is imported; return its LOCAL_RANK.

    Args:
        facts: as `device_facts` returns them.
        env: the variables of the worker. A variable that limits devices is taken as it is, and so is LOCAL_RANK if it
            is not the group's.

    Returns:
        Nothing for a process without devices, or with devices for which Ray has no variable.

    Raises:
        RuntimeError: the process has a device of another worker, or sees too few devices for its LOCAL_RANK.
    """
    own = {kind: ids for kind, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}
    if not facts or not own:
        return {}
    shown: dict[str, list[str] | None] = {}
    for kind, ids in own.items():
        near = [device for slot in facts["slots"] for device in slot.get(kind, ())]
        shared = [device for device in ids if Counter(near)[device] > 1]
        if shared and not facts["share"]:
            raise RuntimeError(
                f"other workers of the group on this node have {kind} {', '.join(shared)} too. Reserve a whole device "
                "for each worker, or pass worker=WorkerOptions(share_devices=True)."
            )
        seen = dict.fromkeys([*near, *ids]) if facts["visible"] == "node" else ids
        shown[kind] = limit_devices(kind, list(seen), env)
    kind, ids = next(iter(own.items()))
    visible = shown[kind]
    if visible is None:
        return {}
    rank = int(env.get("LOCAL_RANK", 0))
    if rank == facts["local_rank"] and ids[0] in visible:
        rank = visible.index(ids[0])
    if not 0 <= rank < len(visible):
        raise RuntimeError(
            f"LOCAL_RANK is {rank}, but the worker sees only {len(visible)} device(s) of kind {kind}: "
            f"{', '.join(visible)}. Look at what configure_worker returns."
        )
    return {"LOCAL_RANK": str(rank)}
