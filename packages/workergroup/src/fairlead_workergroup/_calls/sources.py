# SPDX-License-Identifier: Apache-2.0
"""Arguments that other calls have to make: which calls these are, and who is late with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import ray
from ray import ObjectRef

from .._observe.failures import WorkerFacts
from .._observe.query import late_workers
from .._ray_private import actor_id_of_ref, still_referenced
from ..exceptions import listed_in_lines

if TYPE_CHECKING:
    from .sender import Dispatching

__all__ = ["Source", "describe_missing", "register"]

_groups: weakref.WeakSet[Dispatching] = weakref.WeakSet()


class Source(NamedTuple):
    """The objects that another call makes and a worker is given as an argument.

    Attributes:
        method: the other call's method; None for a plain ObjectRef.
        ids: the ids of the objects. A reference would keep the object in the store after its last use.
    """

    method: str | None
    ids: tuple[bytes, ...]


def register(group: Dispatching) -> None:
    """Note a group, so that an object can be traced to the worker that makes it."""
    _groups.add(group)


def describe_missing(sources: Iterable[Source]) -> str:
    """Return which calls have not made their objects yet and which of their ranks are late; empty if all are there."""
    pending: dict[tuple[str | None, str], list[WorkerFacts]] = {}
    others = 0
    for method, ref in _not_there(sources):
        actor = actor_id_of_ref(ref)
        group = next((group for group in list(_groups) if actor in group._facts), None)
        if group is None:
            others += 1
        else:
            pending.setdefault((method, group.name_prefix), []).append(group._facts[actor])
    lines = []
    for (method, name), workers in pending.items():
        what = "a call" if method is None else f"the call of {method!r}"
        lines.append(f"{what} of group {name!r}, not finished by:{listed_in_lines(late_workers(_distinct(workers)))}")
    if others:
        lines.append(f"{others} object(s) that no worker of a group makes")
    return "They wait for an argument that is not there yet, from " + "\nand from ".join(lines) if lines else ""


def _not_there(sources: Iterable[Source]) -> list[tuple[str | None, ObjectRef]]:
    """Return the objects that do not exist yet, each with the method that makes it."""
    method_of = {one: source.method for source in sources for one in source.ids}
    refs = still_referenced(method_of) if method_of else []
    if not refs:
        return []
    _, pending = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return [(method_of[ref.binary()], ref) for ref in pending]


def _distinct(workers: Sequence[WorkerFacts]) -> list[WorkerFacts]:
    return sorted({worker.rank: worker for worker in workers}.values(), key=lambda worker: worker.rank)
