# SPDX-License-Identifier: Apache-2.0
"""A timeline as a Chrome trace, which Perfetto and chrome://tracing open."""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from fairlead_placement import PlacementError
from fairlead_placement.spi import head_deadline
from fairlead_workergroup import GroupHandle, RayWorkerGroup, WorkerGroupError
from fairlead_workergroup.exceptions import format_coords
from fairlead_workergroup.spi import CallObserver

from ._chrome import Event, choose_track, name_track, to_microseconds, write_file
from ._timeline import Request, Timeline, WorkerTimeline, read_own_timeline

# The processes of the trace: the driver, then the nodes.
DRIVER = 1
# Errors within so many seconds share one trace.
SHARED_S = 10.0
# How long Ray's head may take to name the agents; the error is not held up for longer.
HEAD_S = 5.0
NOTE = "The trace"


def trace(group: RayWorkerGroup | GroupHandle, path: str | os.PathLike[str]) -> None:
    """Write what a group has done lately as a Chrome trace, which Perfetto opens.

    It has the latest 512 finished calls of each worker, those that run, the calls of the process that made the group
    with arrows to the workers, reported steps, failures and restarts, all by one clock. It holds names and times, and
    never arguments or results. The workers are not asked: the agents of their nodes read it.

    Args:
        group: the group, or a handle of it.
        path: the file.

    Raises:
        OSError: the file cannot be written.
        WorkerGroupError: the group, or its Ray, has been shut down.
        HeadTimeoutError: Ray's head did not answer in time.
    """
    write_trace(read_own_timeline(group), path)


def make_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the file's content: a track for each worker and for the driver's calls, in us from the first event."""
    group = timeline.group
    starts = [span.start for one in timeline.workers for span in one.spans]
    starts += [request.start for request in timeline.requests]
    zero = min(starts, default=timeline.read_at)
    nodes = sorted({(one.worker.address, one.worker.node_id) for one in timeline.workers})
    process_of = {node_id: DRIVER + 1 + at for at, (_, node_id) in enumerate(nodes)}
    names = {DRIVER: f"driver of {group.name}, pid {group.driver['pid']}"}
    names |= {process_of[node_id]: f"node {node_id[:8]} ({address})" for address, node_id in nodes}
    events = [name_track("process_name", process, 0, name) for process, name in names.items()]
    # Where the arrows of requests end: by the task, which is unique within one worker.
    reached: dict[bytes, list[Event]] = {}
    for one in timeline.workers:
        events += _draw_worker(one, process_of[one.worker.node_id], zero, timeline.read_at, reached)
    events += _draw_driver(timeline.requests, zero, timeline.read_at, reached)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "group": group.name,
            "id": group.group_id,
            "class": group.class_name,
            "mesh": dict(group.shape),
            "clock_error_us": {
                "driver": to_microseconds(timeline.error_s),
                **{str(one.worker.rank): to_microseconds(one.error_s) for one in timeline.workers},
            },
        },
    }


def _draw_worker(
    one: WorkerTimeline, process: int, zero: float, until: float, reached: dict[bytes, list[Event]]
) -> list[Event]:
    worker = one.worker
    track = worker.rank + 1
    events = [name_track("thread_name", process, track, f"rank {worker.rank}{format_coords(worker.coords)}")]
    for span in one.spans:
        place = {"pid": process, "tid": track, "ts": to_microseconds(span.start - zero)}
        shown: Event = {"call": span.number, "rank": worker.rank}
        if span.end is None:
            shown["running"] = True
        if span.waited_s:
            shown["waited_us"] = to_microseconds(span.waited_s)
        if span.weights is not None:
            shown["weights"] = span.weights
        end = until if span.end is None else span.end
        duration = to_microseconds(max(0.0, end - span.start))
        event = {"ph": "X", "name": span.method, "cat": "call", "dur": duration, "args": shown, **place}
        events.append(event)
        if span.task:
            reached.setdefault(span.task, []).append(event)
        if span.failed:
            place_of_end = {**place, "ts": to_microseconds(end - zero)}
            events.append({"ph": "i", "name": f"{span.method} failed", "cat": "failure", "s": "t", **place_of_end})
        if span.number == 1 and worker.incarnation:
            events.append({"ph": "i", "name": f"restart {worker.incarnation}", "cat": "restart", "s": "t", **place})
    name = f"step of rank {worker.rank}"
    for when, step in one.steps:
        at = max(0.0, to_microseconds(when - zero))
        events.append({"ph": "C", "name": name, "pid": process, "tid": track, "ts": at, "args": {"step": step}})
    return events


def _draw_driver(
    requests: tuple[Request, ...], zero: float, until: float, reached: dict[bytes, list[Event]]
) -> list[Event]:
    events: list[Event] = []
    # Calls of the driver may overlap: each goes to the first track that is free.
    free_from: list[float] = []
    for number, request in enumerate(sorted(requests, key=lambda one: one.start), 1):
        place: Event = {"pid": DRIVER, "tid": 1, "ts": to_microseconds(request.start - zero)}
        if request.is_moment:
            events.append({"ph": "i", "name": request.method, "cat": "failure", "s": "g", **place})
            continue
        there = [event for task in request.tasks for event in reached.get(task, ())]
        ends = [zero + (event["ts"] + event["dur"]) / 1e6 for event in there]
        # The caller did not wait for it, so it lasted as long as its workers.
        end = request.end or max(ends, default=until)
        place["tid"] = choose_track(free_from, request.start, end) + 1
        shown = {"workers": request.workers, "failed": request.failed}
        kind = "request" if request.workers else "transfer"
        duration = to_microseconds(max(0.0, end - request.start))
        events.append({"ph": "X", "name": request.method, "cat": kind, "dur": duration, "args": shown, **place})
        for at, event in enumerate(there):
            arrow = {"name": "calls", "cat": "request", "id": number * 1000 + at}
            events.append({"ph": "s", **arrow, **place})
            events.append({"ph": "f", "bp": "e", **arrow, **{key: event[key] for key in ("pid", "tid", "ts")}})
    events += [name_track("thread_name", DRIVER, track + 1, f"calls {track + 1}") for track in range(len(free_from))]
    return events


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the trace into a file, which is complete or not there."""
    write_file(make_trace(timeline), path)


class TraceSaver(CallObserver):
    """Saves the timeline of a group in the folder that `FAIRLEAD_TRACE_DIR` names when a call fails."""

    def __init__(self, read: Callable[[], Timeline]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._saved: tuple[float, Path] | None = None

    def explain(self, error: BaseException) -> None:
        """Save a trace if the variable is set, and note its path in an error. Errors of a few seconds share a trace."""
        folder = os.environ.get("FAIRLEAD_TRACE_DIR")
        if not folder or any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
            return
        with self._lock:
            if self._saved is None or time.monotonic() - self._saved[0] > SHARED_S:
                try:
                    path = self._save(Path(folder))
                except (OSError, PlacementError, WorkerGroupError, ray.exceptions.RayError) as failed:
                    error.add_note(f"{NOTE} could not be saved in {folder}: {failed}")
                    return
                self._saved = (time.monotonic(), path)
            error.add_note(f"{NOTE} of the last minutes is {self._saved[1]}; open it in https://ui.perfetto.dev.")

    def _save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        with head_deadline(HEAD_S):
            timeline = self._read()
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", timeline.group.name)
        path = folder / f"{name}-{timeline.group.group_id[:6]}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        write_trace(timeline, path)
        return path
