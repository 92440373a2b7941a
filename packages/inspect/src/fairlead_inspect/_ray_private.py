# SPDX-License-Identifier: Apache-2.0
"""Wraps every use of a Ray API that is not public. A test checks all of them against the installed Ray.

Reason: the state API needs a dashboard, takes 15 times as long, stops at 10,000 rows, and names neither the worker of a
driver nor who has requested a placement group, and when.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray

from fairlead_placement.extension import COMMAND_MARK

from .model import Actor, Call, Death, Job, Reservation

# The numbers of these in Ray's task events.
FINISHED, FAILED, RUNNING = 11, 12, 8
_CREATION = 1
# The driver is a task too. Its id begins like this, as those of the tasks that create actors.
_DRIVER = "f" * 16
# The states of placement groups for which no process waits.
_PLACED = ("CREATED", "REMOVED")
# Parts of a runtime environment that take time.
_INSTALLED = ("pip", "uv", "conda", "container", "image_uri", "working_dir", "py_modules", "java_jars")


def read_jobs(job_id: str | None = None) -> list[Job]:
    """Return the jobs that have not ended, or one of them, with their drivers; without an id none of a command."""
    from ray.core.generated.gcs_pb2 import JobTableData

    rows = [JobTableData.FromString(raw) for raw in _accessor().get_job_table()]
    return [
        Job(job.job_id.hex(), job.entrypoint, job.driver_pid, driver.node_id.hex(), driver.worker_id.hex())
        for job, driver in ((row, row.driver_address) for row in rows if not row.is_dead)
        if (COMMAND_MARK not in job.config.metadata if job_id is None else job.job_id.hex() == job_id)
    ]


def read_actors(job_id: str) -> list[Actor]:
    """Return the actors of a job, also those that are dead."""
    from ray.core.generated.gcs_pb2 import ActorTableData

    table = _accessor().get_actor_table(ray.JobID.from_hex(job_id), None)
    return [_parse_actor(ActorTableData, ActorTableData.FromString(raw)) for raw in table]


def _parse_actor(kind: Any, row: Any) -> Actor:
    return Actor(
        row.actor_id.hex(),
        row.class_name,
        row.job_id.hex(),
        kind.ActorState.Name(row.state),
        row.name,
        row.ray_namespace,
        row.node_id.hex() or row.address.node_id.hex(),
        row.pid,
        row.address.worker_id.hex(),
        row.owner_address.worker_id.hex(),
        (row.start_time or row.timestamp) / 1e3,
        _parse_death(row) if row.state == kind.DEAD else None,
        dict(row.required_resources),
        _find_installs(row.serialized_runtime_env),
        row.function_descriptor.python_function_descriptor.module_name,
    )


def _find_installs(environment: str) -> tuple[str, ...]:
    """Return the parts of a runtime environment that are installed or downloaded before a worker starts."""
    parts = json.loads(environment or "{}")
    return tuple(name for name in _INSTALLED if parts.get(name))


def _parse_death(row: Any) -> Death:
    field = row.death_cause.WhichOneof("context") or ""
    context: Any = getattr(row.death_cause, field, None)
    reason = ""
    if field == "actor_died_error_context":
        reason = type(context).DESCRIPTOR.fields_by_name["reason"].enum_type.values_by_number[context.reason].name
    message = getattr(context, "error_message", "") or field.removesuffix("_context").replace("_", " ")
    intended = reason in ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED") or "INTENDED" in message
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Worker exit detail")), (lines or ["unknown cause"])[0])
    return Death(said.removeprefix("Worker exit detail: ")[:300], intended, row.end_time / 1e3)


def read_calls(job_id: str) -> tuple[list[Call], dict[str, float], dict[str, float]]:
    """Return the open calls and tasks of a job, when the others ended, and when actors were created."""
    latest: dict[str, Any] = {}
    for event in _read_events(job_id):
        task_id = event.task_id.hex()
        if task_id not in latest or latest[task_id].attempt_number <= event.attempt_number:
            latest[task_id] = event
    calls, finished, created = [], dict[str, float](), dict[str, float]()
    for task_id, event in latest.items():
        times = event.state_updates.state_ts_ns
        if event.task_info.type == _CREATION:
            created[task_id[16:48]] = min(times.values(), default=0) / 1e9
        elif FINISHED in times or FAILED in times:
            finished[task_id] = max(times.values()) / 1e9
        elif times and event.task_info.name and not task_id.startswith(_DRIVER):
            calls.append(_parse_call(event))
    return calls, finished, created


def read_spans(job_id: str) -> list[Call]:
    """Return the calls and tasks of a job that have begun, also those that are over, and each attempt of them."""
    return [
        _parse_call(event)
        for event in _read_events(job_id)
        if RUNNING in event.state_updates.state_ts_ns
        and (event.task_info.type == _CREATION or not event.task_id.hex().startswith(_DRIVER))
    ]


def _read_events(job_id: str) -> Iterator[Any]:
    from ray.core.generated.gcs_pb2 import TaskEvents

    events = map(TaskEvents.FromString, _accessor().get_task_events())
    return (event for event in events if event.task_id.hex().endswith(job_id))  # a task's id ends with that of its job


def _parse_call(event: Any) -> Call:
    from ray.core.generated.common_pb2 import TaskStatus

    task_id, info, times = event.task_id.hex(), event.task_info, dict(event.state_updates.state_ts_ns)
    latest = next((state for state in (FAILED, FINISHED, RUNNING) if state in times), max(times, key=times.__getitem__))
    return Call(
        task_id,
        info.name,
        task_id[16:48] if info.type == _CREATION else info.actor_id.hex(),
        TaskStatus.Name(latest),
        times.get(RUNNING, min(times.values())) / 1e9,
        event.state_updates.worker_pid,
        event.state_updates.node_id.hex(),
        info.parent_task_id.hex(),
        dict(info.required_resources),
        _find_installs(info.runtime_env_info.serialized_runtime_env),
        times[latest] / 1e9 if latest in (FAILED, FINISHED) else None,
    )


def read_reservations() -> list[Reservation]:
    """Return the placement groups of all jobs that are not placed."""
    from ray.core.generated.gcs_pb2 import PlacementGroupStats, PlacementGroupTableData

    rows = map(PlacementGroupTableData.FromString, _accessor().get_placement_group_table())
    kinds, reasons = PlacementGroupTableData.PlacementGroupState, PlacementGroupStats.SchedulingState
    return [
        Reservation(
            row.placement_group_id.hex(),
            row.creator_job_id.hex(),
            row.name,
            "" if row.creator_actor_id.startswith(b"\xff" * 12) else row.creator_actor_id.hex(),
            reasons.Name(row.stats.scheduling_state),
            write_bundles(dict(bundle.unit_resources) for bundle in row.bundles),
            row.placement_group_creation_timestamp_ms / 1e3,
        )
        for row in rows
        if kinds.Name(row.state) not in _PLACED
    ]


def read_launches() -> int:
    """Return how many nodes an autoscaler requests or starts, which `ray status` does not say; 0 if none runs."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return len(status.pending_nodes) + sum(int(launch.count) for launch in status.pending_launches)


def write_bundles(bundles: Iterable[Mapping[str, float]]) -> str:
    """Return the bundles of a placement group as text, such as "2 x 1 CPU, 1 GPU"."""
    texts = [", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items())) for bundle in bundles]
    return "; ".join(f"{count} x {text}" for text, count in Counter(texts).items())


def _accessor() -> Any:
    return ray._private.state.state._connect_and_get_accessor()
