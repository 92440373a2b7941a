# SPDX-License-Identifier: Apache-2.0
"""The calls and tasks of any job as a Chrome trace: a track for each actor, by Ray's task events."""

from collections.abc import Iterable
from typing import Any

from fairlead_placement.extension import group_pairs

from ._show import clean
from ._worker_sets import find_worker_sets
from .model import Call, Snapshot


def make_timeline(snapshot: Snapshot, spans: Iterable[Call]) -> dict[str, Any]:
    """Return the file's content, in us from the first event; what has not ended ends at the snapshot, and is marked."""
    by_track = group_pairs(((span.node_id, span.actor_id or f"pid {span.pid}"), span) for span in spans)
    names, addresses = _name_actors(snapshot), {node.node_id: node.address for node in snapshot.nodes}
    zero = min((span.began for track in by_track.values() for span in track), default=snapshot.looked_at)
    nodes = sorted({node for node, _ in by_track}, key=lambda node: (addresses.get(node, ""), node))
    events = [
        _name_track("process_name", number, 0, f"node {node[:8]} ({addresses.get(node, 'not alive')})")
        for number, node in enumerate(nodes, 1)
    ]
    tracks = 0
    # Ranks in their order, then actors without one, then workers that run tasks.
    order = {actor: number for number, actor in enumerate(names)}
    for (node, key), track in sorted(by_track.items(), key=lambda pair: (order.get(pair[0][1], len(order)), pair[0])):
        process, free_from = nodes.index(node) + 1, list[float]()  # spans of one track must not overlap
        for span in sorted(track, key=lambda span: span.began):
            end = max(span.began, snapshot.looked_at if span.ended is None else span.ended)
            lane = next((number for number, free in enumerate(free_from) if free <= span.began), len(free_from))
            free_from[lane : lane + 1] = [end]
            events += _draw(span, zero, end, {"pid": process, "tid": tracks + lane + 1})
        name = names.get(key, f"tasks, {key}" if key.startswith("pid ") else f"actor {key[:8]}")
        for lane in range(len(free_from)):
            text = name + (f" ({lane + 1})" if lane else "")
            events.append(_name_track("thread_name", process, tracks + lane + 1, clean(text)))
        tracks += len(free_from)
    jobs = {job.job_id: clean(job.entrypoint) for job in snapshot.jobs}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"jobs": jobs, "began_s": zero}}


def _name_track(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _draw(span: Call, zero: float, end: float, place: dict[str, int]) -> list[dict[str, Any]]:
    running = {"running": True} if span.ended is None else {}
    name = clean(span.name)
    times = {"ts": round((span.began - zero) * 1e6, 3), "dur": round((end - span.began) * 1e6, 3)}
    shown = {"task": span.task_id, "process": span.pid, **running}
    event = {"ph": "X", "name": f"{name} (running)" if running else name, "cat": "call", "args": shown}
    failure = {"ph": "i", "name": f"{name} failed", "cat": "failure", "s": "t", "ts": times["ts"] + times["dur"]}
    return [{**event, **times, **place}, *([{**failure, **place}] if span.state == "FAILED" else [])]


def _name_actors(snapshot: Snapshot) -> dict[str, str]:
    """Return the name of the track of each actor: first ranks in their order, then the others."""
    members = [(workers.name, member) for workers in find_worker_sets(snapshot) for member in workers.members]
    members.sort(key=lambda pair: (pair[0], pair[1].rank is None, pair[1].rank or pair[1].ordinal))
    named = {member.key: f"{name} {member.label}" for name, member in members}
    others = (actor for actor in snapshot.actors if actor.actor_id not in named)
    return named | {actor.actor_id: f"{actor.class_name} {actor.name or actor.actor_id[:8]}" for actor in others}
