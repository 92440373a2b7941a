# SPDX-License-Identifier: Apache-2.0
"""One snapshot of a cluster: Ray's tables, and a look at each node that holds a process of a job."""

import dataclasses
import functools
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import ray

from fairlead_placement import PlacementError, PlacementTimeoutError
from fairlead_placement.extension import ask_head, run_in_thread, run_on_nodes

from . import _ray_private, model
from ._groups import read_labels
from ._node.look import look

_T = TypeVar("_T")
# By node: workers, and drivers.
_Pids = dict[str, tuple[set[int], set[int]]]
TIMEOUT_S, WINDOW_S = 5.0, 1.0
# Of the time for everything, the part that the head may take to list what there is.
HEAD_PART = 0.6


def look_at_cluster(
    job_id: str | None, *, window_s: float = WINDOW_S, timeout_s: float = TIMEOUT_S, own: bool = False
) -> model.Snapshot:
    """Return a snapshot of the jobs of the attached cluster, or of one; the job of this process only if it is `own`."""
    began, notes = time.monotonic(), list[str]()

    def ask(what: str, function: Callable[..., _T], *args: Any) -> _T:
        try:
            return ask_head(f"list the {what}", function, *args, timeout_s=timeout_s * HEAD_PART)
        except (AttributeError, ImportError) as error:  # a table has another shape
            raise PlacementError(
                f"fairlead-inspect cannot read the {what} of Ray {ray.__version__}: {error}. It gives no result, which "
                "could be wrong. Use a version of it that was tested with this Ray."
            ) from error

    def attempt(what: str, fallback: _T, read: Callable[[], _T]) -> _T:
        """Read what a snapshot can do without, and note if it is missing."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001
            notes.append(f"no {what}: {type(error).__name__}")
            return fallback

    me = "" if own else ray.get_runtime_context().get_job_id()
    jobs = [job for job in ask("jobs", _ray_private.read_jobs, job_id) if job_id is not None or job.job_id != me]
    nodes: list[dict[str, Any]] = ask("nodes", ray.nodes)
    actors, calls, finished = list[model.Actor](), list[model.Call](), dict[str, float]()
    for job in jobs:
        rows = ask(f"actors of job {job.job_id}", _ray_private.read_actors, job.job_id)
        what, nothing = f"task events of job {job.job_id}", (list[model.Call](), dict[str, float](), dict[str, float]())
        read = functools.partial(ask, what, _ray_private.read_calls, job.job_id)
        # Without task events fewer waits are known, and nothing else is lost.
        open_, over, created = attempt(what, nothing, read)
        # When it was created, not when its process was there: members of a worker set start one after the other.
        actors += [dataclasses.replace(row, created=created.get(row.actor_id, row.created)) for row in rows]
        calls += open_
        finished |= over
    read_groups = functools.partial(ask, "placement groups", _ray_private.read_reservations)
    pending = attempt("placement groups", list[model.Reservation](), read_groups)
    what = "nodes that an autoscaler starts"
    launches = attempt(what, 0, functools.partial(ask, what, _ray_private.read_launches))
    chosen = {job.job_id for job in jobs}
    wanted, alive = _choose(jobs, actors, calls), {node["NodeID"] for node in nodes if node["Alive"]}
    left = max(timeout_s - (time.monotonic() - began), window_s + 1.0)
    groups = run_in_thread(read_labels, chosen, left)
    answers = _probe({node: wanted[node] for node in wanted if node in alive}, window_s, left)
    seen = tuple(_describe_node(node, wanted, answers) for node in nodes if node["Alive"] or node["NodeID"] in wanted)
    addresses = {node.node_id: node.address for node in seen}
    processes = list[model.Process]()
    for node_id, answer in answers.items():
        if not isinstance(answer, str):
            processes += parse(node_id, answer)
            notes += [f"{addresses[node_id]}: {note}" for note in answer["notes"]]
    left = max(1.0, began + timeout_s - time.monotonic())
    no_labels: tuple[dict[str, dict[str, Any]], list[str]] = {}, []
    labels, missing = attempt("groups of Fairlead", no_labels, lambda: groups.result(left))
    return model.Snapshot(
        time.time(), tuple(jobs), tuple(actors), tuple(processes), seen, tuple(calls), finished,
        labels=labels, took_s=time.monotonic() - began, notes=tuple(dict.fromkeys([*notes, *missing])),
        reservations=tuple(group for group in pending if group.job_id in chosen), launches=launches,
    )  # fmt: skip


def _choose(jobs: Iterable[model.Job], actors: Iterable[model.Actor], calls: Iterable[model.Call]) -> _Pids:
    """Return the processes to look at."""
    wanted: _Pids = {}
    workers = [(actor.node_id, actor.pid) for actor in actors if actor.state == "ALIVE"]
    workers += [(call.node_id, call.pid) for call in calls if not call.actor_id]
    drivers = [(job.node_id, job.pid) for job in jobs if job.node_id]
    for kind, processes in enumerate((workers, drivers)):
        for node_id, pid in processes:
            if pid:
                wanted.setdefault(node_id, (set(), set()))[kind].add(pid)
    return wanted


def _probe(wanted: _Pids, window_s: float, timeout_s: float) -> dict[str, dict[str, Any] | str]:
    """Return the answer of each node, or why there is none."""
    arguments = {node: (*map(sorted, pids), window_s, timeout_s) for node, pids in wanted.items()}
    answers: dict[str, dict[str, Any] | str] = {}
    for node, result in run_on_nodes(look, arguments, timeout_s=timeout_s).items():
        if isinstance(result, PlacementTimeoutError):
            answers[node] = f"no answer within {timeout_s:.1f} s"
        elif isinstance(result, Exception):
            # Of a traceback the last line says what went wrong.
            reason = (str(result).strip().splitlines() or [""])[-1].strip()
            answers[node] = f"the probe failed: {reason or type(result).__name__}"
        else:
            answers[node] = result
    return answers


def _describe_node(row: Mapping[str, Any], wanted: Iterable[str], answers: Mapping[str, Any]) -> model.Node:
    node, address = row["NodeID"], row["NodeManagerAddress"]
    if not row["Alive"]:
        return model.Node(node, address, False, "lost", "Ray calls it dead")
    known = model.Node(node, address, resources=dict(row.get("Resources", {})))
    if node not in wanted:
        return dataclasses.replace(known, answer="unasked")
    answer = answers.get(node, "not asked")
    return dataclasses.replace(known, answer="silent", note=answer) if isinstance(answer, str) else known


def parse(node_id: str, answer: Mapping[str, Any]) -> list[model.Process]:
    """Return the processes in the answer of a node."""

    @functools.cache
    def read(stack: tuple[tuple[str, str, int], ...]) -> model.Stack:
        return tuple(model.Frame(*frame) for frame in stack)

    processes = []
    for row in answer["processes"]:
        threads = []
        for fields in row["threads"]:
            stacks = {"stack": read(fields["stack"]), "before": fields["before"] and read(fields["before"])}
            references = tuple(model.Reference(*reference) for reference in fields["references"])
            request = fields["request"] and model.Request(*fields["request"])
            threads.append(model.Thread(**{**fields, **stacks, "references": references, "request": request}))
        children = tuple(
            model.Child(**{**fields, "stack": read(fields.get("stack", ()))}) for fields in row["children"]
        )
        records = tuple(model.Record(*record) for record in row["records"])
        more = {"threads": tuple(threads), "children": children, "records": records}
        processes.append(model.Process(**{"node_id": node_id, **row, **more}))
    return processes


def look_here(*, window_s: float = WINDOW_S, timeout_s: float = TIMEOUT_S) -> model.Snapshot:
    """Return a snapshot of Ray's workers on this machine, without Ray: their actors are made up of their titles."""
    began = time.monotonic()
    answer = look(None, (), window_s, timeout_s, -1)
    workers = tuple(process for process in parse("here", answer) if not process.title.startswith("ray::IDLE"))
    actors = tuple(
        model.Actor(
            f"pid:{worker.pid}", worker.title[5:].partition(".")[0].strip(), "here", node_id="here", pid=worker.pid
        )
        for worker in workers
    )
    return model.Snapshot(
        time.time(), (model.Job("here", "workers of Ray on this machine"),), actors, workers,
        (model.Node("here", socket.gethostname()),), took_s=time.monotonic() - began, partial=True,
        notes=("Only this machine was looked at: ranks on others, the driver's waits and deaths are not known.",),
    )  # fmt: skip
