# SPDX-License-Identifier: Apache-2.0
"""Attaches to a Ray cluster, or starts one on this machine."""

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray

from ._nodes.background import run_in_thread
from ._nodes.head import CLIENT_REMEDY, refuse_client
from ._ray_private import cluster_file, connect_to_head, list_raylets
from .exceptions import HeadTimeoutError, PlacementError

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
    """Attach to the cluster that was named or announced, else start a local one.

    Without an address, that is the cluster that `RAY_ADDRESS` names, else the one that `ray start` of this user has
    announced on this machine, else a new one. One line says which it is and why. `init_ray` does not join the Ray that
    another program has started for itself, unless `address` says so. It passes nothing of this process's environment to
    the cluster and does not modify `os.environ`, in which Ray itself records that a local cluster uses token
    authentication.

    Args:
        log_dir: where a local cluster keeps its logs and session files; Ray's own folder when None. The path must
            be short: Ray puts sockets below it, and a socket's path is limited to 107 bytes.
        address: the `host:port` of the cluster to attach to; "local" always starts a new one. "auto" never starts one,
            and takes the only Ray that this user runs on this machine if none is named or announced.
        num_cpus: CPUs of a new local cluster; None for those of the machine. One that runs already keeps its size.
        num_gpus: GPUs of a new local cluster; None for those of the machine.

    Returns:
        Ray's context, as `ray.init` returns it. `ray.shutdown()` ends what was started.

    Raises:
        ValueError: the address is not one.
        PlacementError: Ray is running in this process already and `address` names another cluster; the cluster at
            `address` cannot be reached, has no node on this machine, or wants a token that is not there. "auto" found
            no cluster, or several. The address or the connection of this process is one of Ray Client (`ray://`).
        HeadTimeoutError: something listens at the address, but no Ray head answered there within 15 s.
    """
    refuse_client()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise PlacementError(f"Ray is connected to {here} already. Call ray.shutdown() before {address!r} is used.")
        # Ray sets the level of its logger for good.
        return ray.init(ignore_reinit_error=True, logging_level=logging.getLogger("ray").level)
    if address != "local" and (context := attach_to(address)) is not None:
        return context
    options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        options["_temp_dir"] = str(Path(log_dir).resolve())
    context = ray.init(address="local", include_dashboard=False, **options)
    is_named = "local" in (address, os.environ.get("RAY_ADDRESS"))
    _say(f"Started a Ray cluster on this machine: {'as requested' if is_named else 'none was named or announced'}.")
    return context


def _say(line: str) -> None:
    """Log a line. If the program does not show its log, print it if standard error is a terminal."""
    logger.info("%s", line)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)  # noqa: T201


def attach_to(named: str | None, *, timeout_s: float | None = None, find_token: bool = False, **options: Any) -> Any:
    """Attach to the cluster that `find_target` finds; return None if there is none and this process may start one.

    The head has `timeout_s` to answer; None is for `ATTACH_S`. With `find_token`, for commands, the token of the user
    is taken for a cluster that was named too.
    """
    within_s = ATTACH_S if timeout_s is None else timeout_s
    if (target := find_target(named)) is None:
        return None
    address, reason, is_named = target
    which = f"{address}, which {reason}"
    try:
        run_in_thread(connect_to_head, address, find_token or not is_named).result(within_s)
        context = ray.init(address=address, **options)
    except TimeoutError as error:
        raise HeadTimeoutError(
            f"Something listens at {which}, but no Ray head answered there within {within_s:g} s. Its cluster may have "
            "stopped or hang: stop the rest of it and correct the address (or delete the file), or pass "
            f'address="local" to start a cluster of your own. If the cluster wants a token, set {_TOKEN}.'
        ) from error
    except (ConnectionError, ValueError, ray.exceptions.AuthenticationError, ray.exceptions.RpcError) as error:
        # A token that is missing or wrong looks like the end of a connection too, after Ray has tried for a while.
        raise PlacementError(
            f"Something answers at {which}, but Ray cannot attach to it: {error}. If it is a Ray cluster that wants "
            f'a token, set {_TOKEN}; address="local" starts a cluster of your own. If none of its nodes is on this '
            f"machine, or in a container that this process does not see into: {CLIENT_REMEDY}"
        ) from error
    _say(f"Attached to the Ray cluster at {which}.")
    return context


def find_target(named: str | None) -> tuple[str, str, bool] | None:
    """Return the cluster's address, where it is from, and if it was named; None if this process is to start a cluster.

    It is the cluster that is named, that `RAY_ADDRESS` names, or that is announced. "auto" also takes the only Ray that
    this user runs on this machine.
    """
    from_env = os.environ.get("RAY_ADDRESS") if named in (None, "auto") else None
    if from_env == "local" and named is None:
        return None
    may_start = named is None and from_env != "auto"
    if (address := from_env or ("auto" if named is None else named)) != "auto":
        if address == "local":
            raise PlacementError("RAY_ADDRESS is 'local', which names no running cluster. Pass the address of one.")
        if "://" in address:  # Ray connects to any such address through Ray Client.
            raise PlacementError(
                f"{address!r} is an address of Ray Client, which Fairlead does not support. {CLIENT_REMEDY} Correct "
                "the address, or RAY_ADDRESS."
            )
        if not _answers(address):
            raise PlacementError(
                f"No Ray cluster answers at {address}. Start one with `ray start --head`, or correct the address (also "
                "RAY_ADDRESS)."
            )
        return address, "RAY_ADDRESS names" if from_env else "`address` names", True
    file = cluster_file() or ""
    with contextlib.suppress(OSError, ValueError), open(file, encoding="utf-8") as opened:
        is_mine, address = os.fstat(opened.fileno()).st_uid == os.getuid(), opened.read(300).strip()
        if is_mine and _answers(address):
            return address, f"`ray start` announced in {file}", False
    if may_start:
        return None
    mine = {raylet.address: raylet for raylet in list_raylets() if raylet.user == os.getuid()}
    others = [raylet for raylet in mine.values() if _answers(raylet.address)]
    if len(others) == 1:
        return others[0].address, f"{others[0].starter} started", False
    listed = ", ".join(f"{raylet.address} ({raylet.starter})" for raylet in others) or "none"
    elsewhere = "" if others else ", run this on one of its nodes, or start one with `ray start --head`"
    raise PlacementError(
        f'"auto" found no Ray cluster that is named or announced. You run on this machine: {listed}. Name the cluster '
        f"by HOST:PORT (`address` of init_ray, --address of a command, or RAY_ADDRESS){elsewhere}."
    )


def _answers(address: str) -> bool:
    """Return whether anything listens at an address; a ValueError if it is none. Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not host.isprintable() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address must be 'host:port', 'auto' or 'local', got {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return True
    except OSError:
        return False
