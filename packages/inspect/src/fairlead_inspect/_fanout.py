# SPDX-License-Identifier: Apache-2.0
"""One look at a cluster: Ray's tables, and a look or a probe on each node that holds a process of a job."""

import dataclasses
import functools
import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import ray

from fairlead_placement import HeadTimeoutError, PlacementTimeoutError
from fairlead_placement.extension import Job as _Job
from fairlead_placement.extension import ask_head, find_here, run_in_thread, run_on_nodes

from . import _ray_private
from ._groups import read_labels
from ._node.look import look, look_from_task
from .model import (
    Actor,
    Call,
    Child,
    Frame,
    Job,
    Node,
    Process,
    Record,
    Reference,
    Reservation,
    Snapshot,
    Stack,
    Thread,
)

_T = TypeVar("_T")
_Labels = tuple[dict[str, dict[str, Any]], list[str]]
# By node: workers, and drivers.
_Pids = dict[str, tuple[set[int], set[int]]]
TIMEOUT_S, WINDOW_S = 5.0, 1.0
# Of the time for everything, the part that the head may take to list what there is.
HEAD_PART = 0.6


def look_at_cluster(
    job_id: str | None, *, window_s: float = WINDOW_S, timeout_s: float = TIMEOUT_S, own: bool = False
) -> Snapshot:
    """Return one look at the jobs of the cluster that this process is attached to, or at one of them.

    Args:
        job_id: the only job to look at; None for all, this process's `own` job included or not.
        window_s: seconds between the two parts of the look.
        timeout_s: seconds for all of it.
        own: see `job_id`.

    Raises:
        HeadTimeoutError: Ray's head did not answer.
        RayVersionError: a private part of this version of Ray differs from what a look reads.
    """
    _ray_private.check_ray()
    began, head_s = time.monotonic(), timeout_s * HEAD_PART
    notes: list[str] = []
    me = "" if own else ray.get_runtime_context().get_job_id()
    jobs = ask_head("list the jobs", _ray_private.read_jobs, job_id, timeout_s=head_s)
    jobs = [one for one in jobs if job_id is not None or one.job_id != me]
    nodes: list[dict[str, Any]] = ask_head("list the nodes", ray.nodes, timeout_s=head_s)
    actors: list[Actor] = []
    calls: list[Call] = []
    finished: set[str] = set()
    for job in jobs:
        rows = ask_head(f"list the actors of job {job.job_id}", _ray_private.read_actors, job.job_id, timeout_s=head_s)
        # Without task events fewer waits are known, and nothing else is lost.
        nothing, what = (list[Call](), frozenset[str](), dict[str, float]()), f"task events of job {job.job_id}"
        events = _try(notes, what, nothing, _ray_private.read_calls, job.job_id, timeout_s=head_s)
        # When it was created, not when its process was there: members of one fleet start one after the other.
        actors += [dataclasses.replace(one, created=events[2].get(one.actor_id, one.created)) for one in rows]
        calls += events[0]
        finished |= events[1]
    pending = _try(notes, "placement groups", list[Reservation](), _ray_private.read_reservations, timeout_s=head_s)
    launches = _try(notes, "nodes that an autoscaler starts", 0, _ray_private.read_launches, timeout_s=head_s)
    chosen = {one.job_id for one in jobs}
    reservations = tuple(one for one in pending if one.job_id in chosen)
    wanted = _choose(jobs, actors, calls)
    alive = {one["NodeID"]: one["NodeManagerAddress"] for one in nodes if one["Alive"]}
    left = max(timeout_s - (time.monotonic() - began), window_s + 1.0)
    groups = run_in_thread(read_labels, chosen, left)
    answers = _probe({node: wanted[node] for node in wanted if node in alive}, window_s, left)
    processes = [one for node, answer in answers.items() if isinstance(answer, dict) for one in parse(node, answer)]
    notes += [
        f"{alive[node]}: {note}"
        for node, answer in answers.items()
        if isinstance(answer, dict)
        for note in answer["notes"]
    ]
    labels = _take_labels(notes, groups, max(1.0, began + timeout_s - time.monotonic()))
    seen = tuple(_describe_node(one, wanted, answers) for one in nodes if one["Alive"] or one["NodeID"] in wanted)
    return Snapshot(
        time.time(), tuple(jobs), tuple(actors), tuple(processes), seen, tuple(calls), frozenset(finished),
        labels=labels, took_s=time.monotonic() - began, notes=tuple(dict.fromkeys(notes)), reservations=reservations,
        launches=launches,
    )  # fmt: skip


def _try(notes: list[str], what: str, fallback: _T, ask: Callable[..., _T], *args: Any, timeout_s: float) -> _T:
    """Ask Ray's head for something that a look can do without; note what is missing then."""
    try:
        return ask_head(f"list the {what}", ask, *args, timeout_s=timeout_s)
    except (HeadTimeoutError, ray.exceptions.RayError) as error:
        notes.append(f"no {what}: {type(error).__name__}")
        return fallback


def _take_labels(notes: list[str], reading: _Job[_Labels], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return the labels of the members of Fairlead's groups; without them the rest of the look still counts."""
    try:
        labels, missing = reading.result(timeout_s)
    except Exception as error:  # noqa: BLE001
        notes.append(f"no groups of Fairlead: {type(error).__name__}")
        return {}
    notes += missing
    return labels


def _choose(jobs: Iterable[Job], actors: Iterable[Actor], calls: Iterable[Call]) -> _Pids:
    """Return the processes to look at."""
    wanted: _Pids = {}
    for one in actors:
        if one.state == "ALIVE" and one.pid:
            wanted.setdefault(one.node_id, (set(), set()))[0].add(one.pid)
    for call in calls:
        if not call.actor_id and call.pid:
            wanted.setdefault(call.node_id, (set(), set()))[0].add(call.pid)
    for job in jobs:
        if job.node_id and job.pid:
            wanted.setdefault(job.node_id, (set(), set()))[1].add(job.pid)
    return wanted


def _probe(wanted: _Pids, window_s: float, timeout_s: float) -> dict[str, dict[str, Any] | str]:
    """Return the answer of each node, or why there is none. A task looks at those that this process cannot see."""
    here = find_here(wanted)
    elsewhere = {
        node: (sorted(pids), sorted(drivers), window_s, timeout_s)
        for node, (pids, drivers) in wanted.items()
        if node not in here
    }
    looking = (
        run_in_thread(functools.partial(run_on_nodes, look_from_task, elsewhere, timeout_s=timeout_s))
        if elsewhere
        else None
    )
    answers = _look_at({node: wanted[node] for node in wanted if node in here}, window_s, timeout_s)
    for node, answer in looking.result(math.inf).items() if looking is not None else ():
        if isinstance(answer, PlacementTimeoutError):
            answers[node] = f"no answer within {timeout_s:.1f} s"
        elif isinstance(answer, Exception):
            # Of a traceback the last line says what went wrong.
            reason = (str(answer).strip().splitlines() or [""])[-1].strip()
            answers[node] = f"the probe failed: {reason or type(answer).__name__}"
        else:
            answers[node] = answer
    return answers


def _look_at(wanted: _Pids, window_s: float, timeout_s: float) -> dict[str, dict[str, Any] | str]:
    """Look at processes of nodes that this process sees. The kernel can hold up who reads one, so with a deadline."""
    if not wanted:
        return {}
    pids, drivers = (sorted(set[int]().union(*of)) for of in zip(*wanted.values(), strict=True))
    try:
        answer = run_in_thread(look_from_task, pids, drivers, window_s, timeout_s).result(timeout_s)
    except OSError as error:  # a TimeoutError is one too
        return dict.fromkeys(wanted, str(error))
    return {
        node: {**answer, "processes": [row for row in answer["processes"] if row[0] in own | others]}
        for node, (own, others) in wanted.items()
    }


def _describe_node(row: Mapping[str, Any], wanted: Iterable[str], answers: Mapping[str, Any]) -> Node:
    node, address = row["NodeID"], row["NodeManagerAddress"]
    if not row["Alive"]:
        return Node(node, address, False, "lost", "Ray calls it dead")
    known = Node(node, address, resources=dict(row.get("Resources", {})))
    if node not in wanted:
        return dataclasses.replace(known, answer="unasked")
    answer = answers.get(node, "not asked")
    return dataclasses.replace(known, answer="silent", note=answer) if isinstance(answer, str) else known


def parse(node: str, answer: Mapping[str, Any]) -> list[Process]:
    """Return the processes in the answer of a node."""
    stacks: list[Stack] = [tuple(Frame(*frame) for frame in stack) for stack in answer["stacks"]]
    found = []
    for pid, title, states, ticks, window_s, threads, environ, children, *rest in answer["processes"]:
        seen = tuple(
            Thread(
                tid, name, stacks[at], stacks[before] if before >= 0 else None, states, ticks, switches, last_ran_s,
                inside, tuple(Reference(*one) for one in references), unread, waits_on,
            )
            for tid, name, at, before, states, ticks, switches, last_ran_s, inside, references, unread, waits_on
            in threads
        )  # fmt: skip
        below = tuple(
            Child(child, name, states_, ticks_, tuple(Frame(*frame) for frame in stack), waits_on, since_s)
            for child, name, states_, ticks_, stack, waits_on, since_s in children
        )
        rest[-1] = tuple(Record(*one) for one in rest[-1])
        found.append(Process(node, pid, title, states, ticks, window_s, seen, environ, below, *rest))
    return found


def look_here(*, window_s: float = WINDOW_S, timeout_s: float = TIMEOUT_S) -> Snapshot:
    """Return a look at the workers of Ray on this machine, without Ray: their actors are made up of their titles."""
    began = time.monotonic()
    processes = parse("here", look(None, (), window_s, -1, timeout_s))
    workers = [one for one in processes if not one.title.startswith("ray::IDLE")]
    actors = tuple(
        Actor(
            f"pid:{one.pid}",
            one.title.removeprefix("ray::").partition(".")[0].strip(),
            "here",
            node_id="here",
            pid=one.pid,
        )
        for one in workers
    )
    return Snapshot(
        time.time(), (Job("here", "workers of Ray on this machine"),), actors, tuple(workers),
        (Node("here", socket.gethostname()),), took_s=time.monotonic() - began, partial=True,
        notes=("Only this machine was looked at: ranks on others, the driver's waits and deaths are not known.",),
    )  # fmt: skip
