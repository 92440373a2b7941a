# SPDX-License-Identifier: Apache-2.0
"""Every call on Ray that is not public, each with its reason and what happens without it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

__all__ = [
    "LiveActor",
    "autoscaler_is_there",
    "block_shutdown",
    "clean_runtime_env",
    "draining_nodes",
    "driver_of",
    "find_cluster",
    "free_per_node",
    "job_of_placement_group",
    "live_actors",
    "never_connect",
    "node_of_worker",
    "visible_gpus",
    "worker_is_alive",
]

_never_connecting = threading.local()
# Seconds that the head may take to say which nodes are alive.
ALIVE_S = 5.0


def free_per_node() -> Mapping[str, Mapping[str, float]]:
    """Free resources by node id. A resource that is used up is absent, not zero.

    `ray.available_resources()` is public but sums over the cluster, and a sum says nothing about what fits where.
    There is no other way to know, so this has no fallback.
    """
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return found


def draining_nodes() -> frozenset[str]:
    """The ids of the nodes that are about to go.

    Without this call they look like any other and are found out when they die.
    """
    ask: Any = getattr(ray._private.state.state, "get_draining_nodes", None)
    return frozenset(ask()) if ask is not None else frozenset()


def job_of_placement_group(placement_group_id: str) -> str:
    """The job that made a placement group: the last four bytes of its id (the state API says it, given a dashboard)."""
    return placement_group_id[-8:]


def find_cluster() -> str | None:
    """The `host:port` that `ray.init(address="auto")` would attach to, or None.

    Ray says it only by attaching, and attaching to a cluster that has died is tried for minutes. Without this call
    the address is "auto", and that is what happens.
    """
    try:
        from ray._private.services import canonicalize_bootstrap_address
    except ImportError:
        return "auto"
    try:
        found: str | None = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return None
    return found


def autoscaler_is_there() -> bool:
    """Whether an autoscaler has told Ray what it may add.

    Only it reports a cluster configuration, and nothing public says so. Without this call a request that the present
    nodes cannot hold is refused at once.
    """
    ask: Any = getattr(ray._private.state.state, "get_max_resources_from_cluster_config", None)
    return ask is not None and ask() is not None


@dataclass(frozen=True)
class LiveActor:
    """An actor that is not dead, and what it holds.

    Attributes:
        actor_id: hexadecimal, as the other ids.
        class_name: its class.
        name: its name, or nothing.
        job_id: the job that made it.
        node_id: where it runs; empty as long as it does not.
        group_id: its placement group, or nothing.
        resources: amounts; in a placement group by Ray's names for the group's, such as "CPU_group_<id>".
        gpus: Ray's numbers, on its node, of the GPUs it holds a part of: not their ids.
    """

    actor_id: str
    class_name: str
    name: str
    job_id: str
    node_id: str
    group_id: str
    resources: Mapping[str, float]
    gpus: tuple[int, ...]


def live_actors() -> tuple[LiveActor, ...]:
    """Every actor that is not dead.

    `ray.util.state.list_actors` is public but needs the dashboard, which many clusters run without, and says nothing
    about which GPUs an actor has. Where the private table has another shape, no actor is named in errors.
    """
    try:
        from ray.core.generated.gcs_pb2 import ActorTableData

        table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None)
        rows = [ActorTableData.FromString(raw) for raw in table]
    except (ImportError, AttributeError, TypeError):
        return ()
    return tuple(
        LiveActor(
            actor_id=row.actor_id.hex(),
            class_name=row.class_name,
            name=row.name,
            job_id=row.job_id.hex(),
            node_id=row.address.node_id.hex().replace("f" * 56, ""),
            group_id=row.placement_group_id.hex(),
            resources={one.name: sum(held.quantity for held in one.resource_ids) for one in row.resource_mapping},
            gpus=tuple(
                sorted(
                    {
                        held.index
                        for one in row.resource_mapping
                        if one.name == "GPU" or one.name.startswith("GPU_group_")
                        for held in one.resource_ids
                    }
                )
            ),
        )
        for row in rows
        if row.state != ActorTableData.DEAD
    )


def visible_gpus() -> Callable[[], list[str] | None]:
    """A function, for a task, that tells the ids of all GPUs of its node, or None when they are 0, 1, ...

    Ray tells a process only the ids that it holds. Without this attribute the ids are taken to be 0, 1, ...
    """

    def ids() -> list[str] | None:
        visible: dict[str, list[str] | None] = getattr(
            ray._private.worker.global_worker, "original_visible_accelerator_ids", {}
        )
        return visible.get("GPU")

    return ids


def never_connect() -> None:
    """Have what this thread asks of Ray fail when Ray has ended.

    Otherwise `ray.get` and the like connect to whatever cluster they find, or start one: after a `ray.shutdown()` on
    another thread, a background thread would join a stranger's cluster. Ray has a switch for that only for whole
    processes, before it is imported. Without this the thread still looks before each round whether Ray is there.
    """
    from ray._private import auto_init_hook

    connect = getattr(auto_init_hook, "auto_init_ray", None)
    if connect is not None and not hasattr(connect, "_fairlead"):

        def connect_unless_told() -> None:
            if not getattr(_never_connecting, "told", False):
                connect()

        connect_unless_told._fairlead = True  # type: ignore[attr-defined]
        auto_init_hook.auto_init_ray = connect_unless_told
    _never_connecting.told = True


@contextlib.contextmanager
def block_shutdown() -> Iterator[None]:
    """Make `ray.shutdown()` on other threads wait while this thread uses Ray, or drops references to Ray's objects.

    Ray ends the process, with exit code 1 and without a traceback, when one thread shuts Ray down and another one frees
    an object reference or an actor handle at that moment. `ray.init` and `ray.shutdown` take a lock, and this takes the
    same one. Without the lock nothing is blocked, and that can happen.
    """
    lock = getattr(ray._private.worker, "_connect_or_shutdown_lock", None)
    with contextlib.nullcontext() if lock is None else lock:
        yield


def driver_of(job_id: str) -> str:
    """Return the worker id of a job's driver: the job's id, filled up. Ray makes it so and does not say it."""
    return job_id.ljust(56, "f")


def _worker_row(worker_id: str) -> Any | None:
    """Return what Ray's head knows of a process, or None if it knows nothing.

    `ray.util.state.list_workers` is public but needs the dashboard and lists them all. Without this call nobody's end
    is noticed, and node agents end with the process that asked for them first.
    """
    try:
        from ray.core.generated.gcs_pb2 import WorkerTableData

        accessor = ray._private.state.state._connect_and_get_accessor()
        raw = accessor.get_worker_info(ray.WorkerID(bytes.fromhex(worker_id)))
        return None if raw is None else WorkerTableData.FromString(raw)
    except (ImportError, AttributeError, TypeError, ray.exceptions.RaySystemError):
        return None


def _node_of(row: Any) -> bytes:
    address = row.worker_address
    # It had another name before.
    found: bytes = getattr(address, "node_id", b"") or getattr(address, "raylet_id", b"")
    return found


def node_of_worker(worker_id: str) -> str | None:
    """Return the id of a process's node, or None if it is unknown."""
    row = _worker_row(worker_id)
    return _node_of(row).hex() or None if row is not None else None


def worker_is_alive(worker_id: str) -> bool | None:
    """Return whether a process and its node are alive, or None if that is unknown. Two small requests."""
    row = _worker_row(worker_id)
    if row is None:
        return None
    if not row.is_alive:
        return False
    # When a node dies, Ray does not mark its processes as dead. The request takes ids of this class alone.
    node_id = ray.NodeID(_node_of(row))
    try:
        (alive,) = ray._private.worker.global_worker.gcs_client.check_alive([node_id], timeout=ALIVE_S)
    except (AttributeError, TypeError):
        return None
    return bool(alive)


def clean_runtime_env() -> Any | None:
    """Return the options with which an actor gets the job's runtime_env, not that of the process which makes it.

    Ray merges the environment of the process into that of its children and has no way to leave it out. A value of
    None, which the public constructor drops, removes one. Without it an agent would run in a worker's Python, which
    may exist on that worker's node alone.
    """
    from ray.runtime_env import RuntimeEnv

    context = ray.get_runtime_context()
    if context.get_worker_id() == driver_of(context.get_job_id()):
        return None
    mine = dict(context.runtime_env)
    try:
        config = ray._private.worker.global_worker.core_worker.get_job_config()
        of_job = RuntimeEnv.deserialize(config.runtime_env_info.serialized_runtime_env or "{}")
    except AttributeError:
        return None
    if mine == dict(of_job):
        return None
    clean = RuntimeEnv()
    dict.update(clean, {key: of_job.get(key, [] if isinstance(mine[key], list) else None) for key in mine})
    variables = dict.fromkeys(mine.get("env_vars") or {}, "") | (of_job.get("env_vars") or {})
    if variables:
        dict.__setitem__(clean, "env_vars", variables)
    return clean
