# SPDX-License-Identifier: Apache-2.0
"""Wraps every use of a Ray API that is not public, each with its reason.

If a version of Ray lacks such a part, its function returns what its last line says, and whatever needs it goes without.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

_K = TypeVar("_K")
_never_connecting = threading.local()
# How often a wait outside of Ray looks whether Ray is still there.
LOOK_EVERY_S = 0.1
# What the use of a private part raises if a version of Ray lacks it.
_MISSING = (ImportError, AttributeError, TypeError)


def free_per_node() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources by node id. A resource that is used up is absent, not zero.

    Reason: `ray.available_resources()` is public but sums over the cluster, which does not show what fits where. There
    is no plan without it.
    """
    return dict(ray._private.state.available_resources_per_node())


def drain_deadlines() -> dict[str, float]:
    """Return when nodes that are draining end at the latest, by `time.time()`; infinity if Ray was not told.

    Reason: `ray.nodes()` lists them like any other node.
    """
    with contextlib.suppress(*_MISSING):
        deadlines = ray._private.state.state.get_draining_nodes()
        return {node_id: at_ms / 1000 or math.inf for node_id, at_ms in deadlines.items()}
    return {}


def connection() -> object | None:
    """Return an object that identifies the connection of this process to Ray; None without one, or with Ray Client.

    Each `ray.init` makes another one, even for the same cluster: what the process held there before is gone.
    Reason: Ray's public ids of a connection are several calls, between which another thread may shut Ray down.
    """
    worker: Any = ray._private.worker
    return worker._global_node if worker.global_worker.connected else None


@dataclass(frozen=True)
class Raylet:
    """A raylet on this machine: its cluster's head, its node, the process that started it, and its user."""

    address: str
    node_id: str
    parent: int
    user: int

    @property
    def starter(self) -> str:
        """The process that started it, with its script or program, without arguments, which may be secrets."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.parent}/cmdline").read_text(errors="replace").split("\0")
            return f"process {self.parent} `{next((word for word in words if word.endswith('.py')), words[0])}`"
        return f"process {self.parent}"


def list_raylets() -> list[Raylet]:
    """Return the raylets on this machine whose processes this one sees by the same pids, and may read.

    One in a container of its own is left out, even if it shares the pids: its network or its files may be others.
    Reason: no public function says which clusters and which nodes run here.
    """
    import psutil  # Ray brings it along

    raylets: list[Raylet] = []
    if os.readlink("/proc/self") != str(os.getpid()):  # its pids are those of another namespace
        return raylets
    for process in psutil.process_iter():
        # The process may exit, belong to another user who hides it, or have other arguments than those of today.
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            if process.name() != "raylet":
                continue
            links = [(f"/proc/{process.pid}/ns/{space}", f"/proc/self/ns/{space}") for space in ("pid", "net", "mnt")]
            if any(os.readlink(its) != os.readlink(mine) for its, mine in links):
                continue
            pairs = (argument.partition("=") for argument in process.cmdline())
            options = {name.lstrip("-"): value for name, _, value in pairs}
            raylets.append(Raylet(options["gcs-address"], options["node_id"], process.ppid(), process.uids().real))
    return raylets


def is_client() -> bool:
    """Return whether this process is connected to Ray through Ray Client, for which most of Ray's functions fail.

    Reason: `ray.is_initialized()` is true of such a process too.
    """
    with contextlib.suppress(*_MISSING):
        from ray.util.client import ray as client

        return bool(client.is_connected())
    return False


def cluster_file() -> str | None:
    """Return the path of the file in which Ray keeps the address of the cluster started last on this machine.

    Reason: nothing public names the file.
    """
    with contextlib.suppress(*_MISSING):
        return str(ray._private.utils.get_ray_address_file(None))
    return None


def connect_to_head(address: str, find_token: bool) -> None:
    """Connect to the head at an address, and return once it has answered. Raise what `ray.init` raises without a token.

    With `find_token`, turn authentication on if the user has a token and has not configured it, as Ray does for a
    cluster that it finds itself. In a cluster without authentication, Ray's head could not reach such a process.
    Reason: `ray.init` tries for minutes, and cannot be interrupted by a deadline as it has to run in the main thread.
    """
    with contextlib.suppress(*_MISSING):
        from ray._private.authentication import authentication_token_setup as token
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        # Earlier versions of Ray do not have it, and start local clusters without authentication.
        enable = getattr(token, "maybe_enable_token_auth_if_token_available", None)
        if find_token and enable is not None:
            enable(warn_if_disabled=False)
        # Without a token that it needs, the client would abort the process.
        token.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        GcsClient(address=address)


def autoscaler_is_there() -> bool:
    """Return whether an autoscaler (version 2) that may add nodes has reported its state to Ray.

    Reason: nothing public shows what an autoscaler has reported.
    """
    # Each head has one, which launches nothing if the head lacks the instance id that launchers give to nodes.
    with contextlib.suppress(*_MISSING):
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

        status = GetClusterStatusReply.FromString(ray._private.worker.global_worker.gcs_client.get_cluster_status())
        nodes = status.cluster_resource_state.node_states
        has_reported = status.autoscaling_state.last_seen_cluster_resource_state_version > 0
        return has_reported and any(node.instance_id for node in nodes)
    return False


@dataclass(frozen=True)
class LiveActor:
    """An actor that is not dead, and what it holds: in a placement group, resources such as "CPU_group_<id>"."""

    actor_id: str
    class_name: str
    name: str
    job_id: str
    node_id: str
    resources: Mapping[str, float]


def actor_id_of(handle: Any) -> str:
    """Return the id of an actor. Reason: a handle has it in a private attribute only."""
    return str(handle._actor_id.hex())


def live_actors() -> tuple[LiveActor, ...]:
    """Return every actor that is not dead.

    Reason: `ray.util.state.list_actors` is public but needs the dashboard, which many clusters run without.
    """
    with contextlib.suppress(*_MISSING):
        from ray.core.generated.gcs_pb2 import ActorTableData

        table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, None)
        return tuple(
            LiveActor(
                actor_id=row.actor_id.hex(),
                class_name=row.class_name,
                name=row.name,
                job_id=row.job_id.hex(),
                node_id=row.address.node_id.hex().replace("f" * 56, ""),
                resources={held.name: sum(u.quantity for u in held.resource_ids) for held in row.resource_mapping},
            )
            for row in map(ActorTableData.FromString, table)
            if row.state != ActorTableData.DEAD
        )
    return ()


def visible_gpus() -> list[str] | None:
    """Return the ids of all GPUs of this node, or None when they are 0, 1, ...

    Reason: Ray reports to a process only the ids that it holds.
    """
    gpus = getattr(ray._private.worker.global_worker, "original_visible_accelerator_ids", {}).get("GPU")
    return None if gpus is None else list(gpus)


class _MayConnect:
    """Ray's switch for automatic connections, which is off on threads that must never connect."""

    def __bool__(self) -> bool:
        return not getattr(_never_connecting, "forbidden", False)


def never_connect() -> None:
    """Make Ray's functions fail on this thread once Ray has ended, instead of starting or joining a Ray.

    Reason: `ray.get` and the like connect to any cluster they find, or start one. Ray's own switch applies to whole
    processes.
    """
    _never_connecting.forbidden = True
    with contextlib.suppress(*_MISSING):
        from ray._private import auto_init_hook

        if auto_init_hook.enable_auto_connect is True:
            auto_init_hook.enable_auto_connect = _MayConnect()


@contextlib.contextmanager
def block_shutdown() -> Iterator[None]:
    """Make `ray.shutdown()` on other threads wait during a block, which must not wait for anything itself.

    Reason: Ray (2.60) ends the process, without a traceback, if one thread shuts Ray down while another one sends a
    request, waits for an object, or frees a reference. `ray.init` and `ray.shutdown` take a lock, and so does this.
    """
    lock = getattr(ray._private.worker, "_connect_or_shutdown_lock", None)
    with contextlib.nullcontext() if lock is None else lock:
        yield


def collect(requests: Mapping[_K, Callable[[], Any]], timeout_s: float) -> dict[_K, tuple[Any, Exception | None]]:
    """Send requests, and return each answer with its error, without a wait of Ray's, during which it may be shut down.

    Each request returns the reference to its answer. The error of one that is late is a `GetTimeoutError`. If Ray is
    shut down, this raises a `RaySystemError`.
    """
    futures: dict[_K, Future[Any]] = {}  # which have the references
    until = time.monotonic() + timeout_s
    try:
        with block_shutdown():
            if ray.is_initialized():
                futures.update((key, send().future()) for key, send in requests.items())
        while ray.is_initialized():
            left = max(0.0, until - time.monotonic())
            if left and wait(futures.values(), min(LOOK_EVERY_S, left)).not_done:
                continue
            late = ray.exceptions.GetTimeoutError(f"No answer within {timeout_s:g} s.")
            errors: dict[_K, Any] = {key: sent.exception() if sent.done() else late for key, sent in futures.items()}
            return {key: (futures[key].result() if error is None else None, error) for key, error in errors.items()}
        raise ray.exceptions.RaySystemError("Ray has been shut down.")
    finally:
        with block_shutdown():
            futures.clear()


def _bare_runtime_env() -> Any | None:
    """Return a runtime_env that leaves out what this process's would pass on; None if there is nothing to leave out.

    Reason: Ray merges the environment of the process that creates an actor or a task into theirs, and
    `RuntimeEnv.serialize` drops the values of None that would leave it out. A slow pip install of the job would delay
    what has to answer within seconds, and a Python that exists on one node alone would make it fail.
    """
    mine = dict(ray.get_runtime_context().runtime_env)
    if not mine:
        return None
    from ray.runtime_env import RuntimeEnv

    class Bare(RuntimeEnv):  # type: ignore[misc]
        def serialize(self) -> str:
            removed: dict[str, Any] = dict.fromkeys(mine)
            if variables := mine.get("env_vars"):
                # Ray merges these one by one. On the node, each gets the value there, or "" if it has none.
                removed["env_vars"] = {name: f"${{{name}}}" for name in variables}
            return json.dumps(removed, sort_keys=True)

    return Bare()


def create_actor(actor_class: Any, args: Sequence[Any], **options: Any) -> Any:
    """Create an actor of a remote class without the environment of this process; return its handle.

    Of the options of `ray.remote`, the class has none but those that describe its methods.
    Reason: the public `options` copies the environment, and drops what the bare one adds.
    """
    if (bare := _bare_runtime_env()) is not None:
        return actor_class._remote(args=tuple(args), runtime_env=bare, **options)
    return actor_class.options(**options).remote(*args)


def start_task(remote_function: Any, args: Sequence[Any], **options: Any) -> Any:
    """Start a task without the environment of this process; return the reference to its result.

    The options of `ray.remote` do not count. Reason: as for `create_actor`.
    """
    if (bare := _bare_runtime_env()) is not None:
        from ray._private.utils import get_runtime_env_info

        info = get_runtime_env_info(bare, is_job_runtime_env=False, serialize=True)
        return remote_function._remote(args=tuple(args), serialized_runtime_env_info=info, **options)
    return remote_function.options(**options).remote(*args)
