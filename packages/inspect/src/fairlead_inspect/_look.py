# SPDX-License-Identifier: Apache-2.0
"""A snapshot of a cluster for a program, and the label with which a process tells who it is."""

import json
import os
from collections.abc import Mapping

import ray

from fairlead_placement import init_ray

from ._fanout import TIMEOUT_S, WINDOW_S, look_at_cluster
from ._worker_sets import LABEL
from .model import Snapshot

# Of a label: environments travel, and are read while a job hangs.
MOST_BYTES = 1024


def look(
    address: str = "auto", *, job: str | None = None, window_s: float = WINDOW_S, timeout_s: float = TIMEOUT_S
) -> Snapshot:
    """Look once at the jobs of a cluster, without a signal to any process.

    In a process that is connected to Ray, it looks at that cluster, including the job of the process itself, for
    example from an actor that watches over its job. Else it attaches for it, and needs no job there.

    Args:
        address: the cluster, as for `fairlead_placement.init_ray`, but none is started.
        job: the id of the only job to look at; None for all that run.
        window_s: the seconds between its two parts, which tell what moves.
        timeout_s: the seconds for all of it. Nodes that have not answered by then are `silent`.

    Returns:
        The snapshot, for `diagnose`, `fold_stacks` and `write_report`. It can be pickled.

    Raises:
        ValueError: the address is not one or "local", a time is not positive, or no such job runs.
        PlacementError: the cluster cannot be reached.
        HeadTimeoutError: Ray's head did not answer.
        PlacementError: a private part of this version of Ray differs from what this package reads.
    """
    for name, value in (("window_s", window_s), ("timeout_s", timeout_s)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    if address == "local":
        raise ValueError('address="local" would start a cluster of its own; leave it out, or name a running one')
    is_inside = ray.is_initialized()
    if not is_inside:
        init_ray(address=address)
    try:
        snapshot = look_at_cluster(job, window_s=window_s, timeout_s=timeout_s, own=is_inside)
    finally:
        if not is_inside:
            ray.shutdown()
    if job is not None and not snapshot.jobs:
        raise ValueError(f"There is no running job {job!r}.")
    return snapshot


def label(
    *, rank: int, group: str, world_size: int | None = None, coords: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Tell who looks at this process which rank of which group it is.

    A process that sets `RANK` and `WORLD_SIZE`, or has a name such as "trainer-3", needs no label.

    Args:
        rank: its number in the group.
        group: the name of the group, which is that of its worker set.
        world_size: how many ranks the group has.
        coords: its coordinates by axis, for people.

    Returns:
        The environment variable that was set, for frameworks that set it in Ray's `runtime_env` instead.

    Raises:
        TypeError, ValueError: a value is not valid, or the label is longer than 1 kB.

    >>> label(rank=3, group="policy", world_size=8)
    {'FAIRLEAD_INSPECT_LABEL': '{"rank": 3, "group": "policy", "world_size": 8}'}
    """
    if not isinstance(group, str) or not group:
        raise TypeError(f"group must be the name of the group, got {group!r}")
    numbers = {"rank": rank, **({} if world_size is None else {"world_size": world_size}), **(coords or {})}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TypeError(f"{name} must be a whole number of at least 0, got {number!r}")
    if world_size is not None and rank >= world_size:
        raise ValueError(f"rank {rank} is beyond the world size {world_size}")
    given = {"rank": rank, "group": group, "world_size": world_size, "coords": dict(coords or {}) or None}
    text = json.dumps({name: value for name, value in given.items() if value is not None})
    if len(text.encode()) > MOST_BYTES:
        size = len(text.encode())
        raise ValueError(f"the label has {size} bytes, and {MOST_BYTES} are read: shorten the group's name")
    os.environ[LABEL] = text
    return {LABEL: text}
