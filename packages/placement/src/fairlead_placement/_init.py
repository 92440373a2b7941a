# SPDX-License-Identifier: Apache-2.0
"""Attaches to a Ray cluster or starts one on this machine, and identifies the one that this process is attached to."""

import contextlib
import hashlib
import logging
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import ray

from ._nodes.head import call_within
from ._ray_private import cluster_file, connect_to_head, connection_mark, find_cluster
from .exceptions import HeadTimeoutError, PlacementError

# A local cluster that this function started has a resource of this name, which distinguishes it from others.
_TAG = "fairlead-local-"
logger = logging.getLogger(__name__)
# A head answers within milliseconds. A busy one gets this long.
ATTACH_S = 15.0
_TOKEN = (
    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token) as on the cluster's head"
)


def init_ray(
    log_dir: str | os.PathLike[str] | None = None,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
) -> Any:
    """Attach to a running cluster if there is one, else start a local one.

    Args:
        log_dir: where a local cluster keeps its logs and session files; Ray's own folder when None. The path must
            be short: Ray puts sockets below it, and a socket's path is limited to 107 bytes.
        address: of the cluster to attach to, as for `ray.init`; "local" always starts a new one. None attaches to the
            cluster that `RAY_ADDRESS` names or that runs on this machine, except for a local cluster that this function
            started for other visible devices.
        num_cpus: CPUs of a local cluster; None for those of the machine. If this function attaches to a running
            cluster, that keeps its size, and a warning says so.
        num_gpus: GPUs of a local cluster; None for those of the machine.

    Returns:
        Ray's context, as of `ray.init`. `ray.shutdown()` ends what was started.

    Raises:
        ValueError: the address is not one.
        PlacementError: Ray is running in this process already and `address` names another cluster; the cluster at
            `address` cannot be reached; or it wants a token that is not there.
        HeadTimeoutError: something listens at the address, but no Ray head answered there within 15 s.

    `init_ray` passes nothing of this process's environment to the cluster and does not modify `os.environ`. (Ray itself
    records in it that a local cluster uses token authentication.)
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise PlacementError(f"Ray is connected to {here} already. Call ray.shutdown() before {address!r} is used.")
        rays = logging.getLogger("ray")
        level = rays.level
        try:
            # This call is not worth a line in the log, but ray.init sets the level for good.
            context = ray.init(ignore_reinit_error=True, logging_level="error")
        finally:
            rays.setLevel(level)
        _warn_of_no_effect(num_cpus=num_cpus, num_gpus=num_gpus)
        return context
    if (address or os.environ.get("RAY_ADDRESS")) != "local":
        context = attach_to(address)
        if context is not None:
            _warn_of_no_effect(num_cpus=num_cpus, num_gpus=num_gpus)
            return context
    options: dict[str, Any] = {}
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        options["_temp_dir"] = str(Path(log_dir).resolve())
    return ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources={_tag(): 1},
        include_dashboard=False,
        **options,
    )


def attach_to(named: str | None, **options: Any) -> Any | None:
    """Attach to the cluster at `named`; return None if none was named and none runs that is ours to use.

    Args:
        named: as the address of `init_ray`.
        options: further arguments of `ray.init`.
    """
    address = named if named not in (None, "auto") else find_cluster()
    named = named or os.environ.get("RAY_ADDRESS")
    if address is None or not _answers(address):
        if named:
            raise PlacementError(
                f"No Ray cluster answers at {named}. Start one with `ray start --head`, or correct the address (also "
                "RAY_ADDRESS)."
            )
        return None
    try:
        if "://" not in address and address != "auto":
            call_within(ATTACH_S, connect_to_head, address)
        context = ray.init(address=address, **options)
    except ray.exceptions.AuthenticationError as error:
        raise PlacementError(
            f"The Ray cluster at {address} ({_origin(address, named)}) wants a token and this process has none that it "
            f'takes. Set {_TOKEN}, or pass address="local" to start a cluster of your own. Ray said: {error}'
        ) from error
    except TimeoutError as error:
        raise HeadTimeoutError(
            f"Something listens at {address} ({_origin(address, named)}), but no Ray head answered there within "
            f"{ATTACH_S:g} s. Its cluster may have ended or hang: correct the address, end the rest of that cluster, "
            f'or pass address="local" to start a cluster of your own. If the cluster wants a token, set {_TOKEN}.'
        ) from error
    except (ConnectionError, ValueError, ray.exceptions.RpcError) as error:
        # A token that is missing or wrong looks like this too, after Ray has tried for a while.
        raise PlacementError(
            f"Something answers at {address}, but Ray cannot attach to it: {error}. If it is a Ray cluster that wants "
            f"a token, set {_TOKEN}."
        ) from error
    tags = [name for name in ray.cluster_resources() if name.startswith(_TAG)]
    if not named and tags and _tag() not in tags:
        # Somebody's local cluster for other devices: leave it alone.
        ray.shutdown()
        return None
    return context


def _origin(address: str, named: str | None) -> str:
    """Return where an address comes from."""
    if named and named == os.environ.get("RAY_ADDRESS"):
        return "from RAY_ADDRESS"
    if named and named != "auto":
        return "given as address"
    file = cluster_file()
    with contextlib.suppress(OSError):
        # Ray replaces a host that is this machine by the machine's own address.
        if file and Path(file).read_text(encoding="utf-8").strip().rpartition(":")[2] == address.rpartition(":")[2]:
            return f"from the file {file}, which Ray writes when it starts; delete it if that cluster has ended"
    return "the address of a Ray process that runs on this machine"


def _warn_of_no_effect(**wanted: int | None) -> None:
    """Warn if a cluster to which this process has attached differs from the local one that was requested."""
    resources = ray.cluster_resources()
    for name, amount in wanted.items():
        has = resources.get("CPU" if name == "num_cpus" else "GPU", 0)
        if amount is not None and amount != has:
            logger.warning(
                "init_ray(%s=%s) has no effect: it attached to a running Ray cluster, which has %g. Pass "
                'address="local" to start a cluster of this size.',
                name,
                amount,
                has,
            )


def _answers(address: str) -> bool:
    """Return whether anything listens at an address. Ray itself tries for minutes."""
    if "://" in address or address == "auto":
        return True  # Ray resolves it
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address must be 'host:port', 'auto' or 'local', got {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return True
    except OSError:
        return False


def _tag() -> str:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return _TAG + hashlib.sha256(devices.encode()).hexdigest()[:8]


def connection() -> str:
    """Return a text that identifies the Ray that this process is connected to; empty if it is connected to none.

    The text changes once `ray.shutdown()` has been called, also if the process joins the same cluster again, because
    what it held there before is gone. Check it before you call functions of Ray that would start a new local Ray.

    >>> connection()
    ''
    """
    global _latest
    # Every call of a worker group asks, and Ray's own functions take several times as long as a look at this.
    mark, latest = connection_mark(), _latest
    if mark is not None and latest is not None and latest[0]() is mark:
        return latest[1]
    if not ray.is_initialized():
        return ""
    here = ray.get_runtime_context()
    text = f"{here.get_session_name()} {here.get_worker_id()}"
    _latest = None if mark is None else (weakref.ref(mark), text)
    return text


# The mark of the latest connection that `connection` has described, and its text.
_latest: tuple[weakref.ref[Any], str] | None = None
