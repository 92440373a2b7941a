# SPDX-License-Identifier: Apache-2.0
"""The calls and tasks of any job as a Chrome trace: a track for each actor, by Ray's task events."""

from collections.abc import Iterable
from typing import Any

from fairlead_placement.extension import group_pairs

from ._chrome import Event, choose_track, name_track, to_microseconds
from ._fleets import find_fleets
from ._show import clean
from .model import Snapshot, Span


def make_job_trace(snapshot: Snapshot, spans: Iterable[Span]) -> dict[str, Any]:
    """Return the file's content, in us from the first event; what has not ended ends at the look, and is marked."""
    by_track = group_pairs(((one.node_id, one.actor_id or f"pid {one.pid}"), one) for one in spans)
    names, addresses = _name_actors(snapshot), {one.node_id: one.address for one in snapshot.nodes}
    zero = min((one.began for there in by_track.values() for one in there), default=snapshot.looked_at)
    nodes = sorted({node for node, _ in by_track}, key=lambda node: (addresses.get(node, ""), node))
    events = [
        name_track("process_name", at, 0, f"node {node[:8]} ({addresses.get(node, 'not alive')})")
        for at, node in enumerate(nodes, 1)
    ]
    tracks = 0
    # Ranks in their order, then actors without one, then workers that run tasks.
    order = {actor: at for at, actor in enumerate(names)}
    for (node, key), there in sorted(by_track.items(), key=lambda one: (order.get(one[0][1], len(order)), one[0])):
        free_from: list[float] = []
        for one in sorted(there, key=lambda one: one.began):
            end = max(one.began, snapshot.looked_at if one.ended is None else one.ended)
            track = tracks + choose_track(free_from, one.began, end) + 1
            place = {"pid": nodes.index(node) + 1, "tid": track, "ts": to_microseconds(one.began - zero)}
            events += _draw(one, place, to_microseconds(end - one.began))
        name = names.get(key, f"tasks, {key}" if key.startswith("pid ") else f"actor {key[:8]}")
        for at in range(len(free_from)):
            text = name + (f" ({at + 1})" if at else "")
            events.append(name_track("thread_name", nodes.index(node) + 1, tracks + at + 1, clean(text)))
        tracks += len(free_from)
    jobs = {one.job_id: clean(one.entrypoint) for one in snapshot.jobs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"jobs": jobs, "began_s": zero}}


def _draw(one: Span, place: Event, duration: float) -> list[Event]:
    shown: Event = {"task": one.task_id, "process": one.pid, **({"running": True} if one.ended is None else {})}
    name = clean(one.name)
    called = f"{name} (running)" if one.ended is None else name
    found = [{"ph": "X", "name": called, "cat": "call", "dur": duration, "args": shown, **place}]
    if one.failed:
        place = {**place, "ts": place["ts"] + duration}
        found.append({"ph": "i", "name": f"{name} failed", "cat": "failure", "s": "t", **place})
    return found


def _name_actors(snapshot: Snapshot) -> dict[str, str]:
    """Return the name of the track of each actor: first ranks in their order, then the others."""
    members = [(fleet.name, one) for fleet in find_fleets(snapshot) for one in fleet.members]
    members.sort(key=lambda pair: (pair[0], pair[1].rank is None, pair[1].rank or pair[1].ordinal))
    named = {
        one.key: f"{name} {f'rank {one.rank}' if one.rank is not None else f'#{one.ordinal}'}" for name, one in members
    }
    return named | {
        one.actor_id: f"{one.class_name} {one.name or one.actor_id[:8]}"
        for one in snapshot.actors
        if one.actor_id not in named
    }
