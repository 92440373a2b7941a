# SPDX-License-Identifier: Apache-2.0
"""Attaches to a Ray cluster, or starts one on this machine."""

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray

from ._discovery import describe_foreign_announcement, find_target, local_tag, refuse_client
from ._nodes.background import run_in_thread
from ._nodes.head import ask_head
from ._ray_private import connect_to_head, has_node_here
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

    Without an address, `init_ray` looks in this order, and says on one line which cluster it is and why:

    1. The cluster that `RAY_ADDRESS` names.
    2. The cluster that `ray start` of this user has announced on this machine.
    3. The local cluster that an `init_ray` of this user has started last, with the same `CUDA_VISIBLE_DEVICES` and the
       same session folder (`RAY_TMPDIR`).
    4. A new local cluster.

    It never joins the private Ray of another program, nor one that another user has announced.

    Args:
        log_dir: where a local cluster keeps its logs and session files; Ray's own folder when None. The path must
            be short: Ray puts sockets below it, and a socket's path is limited to 107 bytes.
        address: the `host:port` of the cluster to attach to; "local" always starts a new one. "auto" never starts one:
            without `RAY_ADDRESS` it attaches to the announced cluster, or to the only one that `init_ray` has started
            for this user and session folder.
        num_cpus: CPUs of a local cluster; None for those of the machine. If this function attaches to a running
            cluster, that keeps its size, and a warning says so.
        num_gpus: GPUs of a local cluster; None for those of the machine.

    Returns:
        Ray's context, as `ray.init` returns it. `ray.shutdown()` ends what was started.

    Raises:
        ValueError: the address is not one.
        PlacementError: Ray is running in this process already and `address` names another cluster; the cluster at
            `address` cannot be reached, has no node on this machine, or wants a token that is not there. "auto" found
            no cluster, or several. The address or the connection of this process is one of Ray Client (`ray://`).
        HeadTimeoutError: something listens at the address, but no Ray head answered there within 15 s.

    `init_ray` passes nothing of this process's environment to the cluster and does not modify `os.environ`. (Ray itself
    records in it that a local cluster uses token authentication.)
    """
    refuse_client()
    context: Any = None
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
    elif address != "local":
        context = attach_to(address)
    if context is not None:
        _warn_of_no_effect(num_cpus=num_cpus, num_gpus=num_gpus)
        return context
    options: dict[str, Any] = {}
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        options["_temp_dir"] = str(Path(log_dir).resolve())
    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources={local_tag(): 1},
        include_dashboard=False,
        **options,
    )
    _say(f"Started a Ray cluster on this machine: {_explain_start(address)}.")
    return context


def _explain_start(address: str | None) -> str:
    if address == "local":
        return "`address` is 'local'"
    if os.environ.get("RAY_ADDRESS") == "local":
        return "RAY_ADDRESS is 'local'"
    foreign = describe_foreign_announcement()
    return "none was named or announced" + (f" ({foreign})" if foreign else "")


def _say(line: str) -> None:
    """Log a line. If the program does not show its log, print it if standard error is a terminal."""
    logger.info("%s", line)
    if sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr)  # noqa: T201


def attach_to(
    named: str | None, *, timeout_s: float | None = None, private: bool = False, **options: Any
) -> Any | None:
    """Attach to the cluster that `find_target` finds; return None if there is none and this process may start one.

    The options are further arguments of `ray.init`. The head has `timeout_s` to answer, and then a node of this machine
    to appear; None is for `ATTACH_S`. With `private`, for commands, it may be the Ray of another program, and the token
    of the user is taken for a cluster that was named too, as Ray does for a cluster that it finds.
    """
    within_s = ATTACH_S if timeout_s is None else timeout_s
    target = find_target(named, private=private)
    if target is None:
        return None
    address = target.address

    try:
        # Without the token Ray's client would log that it is missing.
        find_token = private or not target.is_named
        run_in_thread(functools.partial(connect_to_head, address, find_token=find_token)).result(within_s)
        if not run_in_thread(has_node_here, address, within_s).result(2 * within_s):
            raise PlacementError(
                f"The Ray cluster at {address}, which {target.reason}, answers, but this process sees none of its "
                f"nodes on this machine within {within_s:g} s, and Ray attaches a process only to such a node. Run it "
                "on a node of the cluster, such as by `kubectl exec` or `ray job submit`, or start a node here with "
                f"`ray start --address={address}`. A container beside that of a node needs the same process "
                "namespace, and the session folder of Ray (/tmp/ray)."
            )
        context = ray.init(address=address, **options)
    except ray.exceptions.AuthenticationError as error:
        raise PlacementError(
            f"The Ray cluster at {address}, which {target.reason}, wants a token and this process has none that it "
            f'takes. Set {_TOKEN}, or pass address="local" to start a cluster of your own. Ray said: {error}'
        ) from error
    except TimeoutError as error:
        raise HeadTimeoutError(
            f"Something listens at {address}, which {target.reason}, but no Ray head answered there within "
            f"{within_s:g} s. Its cluster may have stopped or hang: {target.advice}stop the rest of that cluster, or "
            f'pass address="local" to start a cluster of your own. If the cluster wants a token, set {_TOKEN}.'
        ) from error
    except (ConnectionError, ValueError, ray.exceptions.RpcError) as error:
        # A token that is missing or wrong looks like this too, after Ray has tried for a while.
        raise PlacementError(
            f"Something answers at {address}, but Ray cannot attach to it: {error}. If it is a Ray cluster that wants "
            f"a token, set {_TOKEN}."
        ) from error
    _say(f"Attached to the Ray cluster at {address}, which {target.reason}.")
    return context


def _warn_of_no_effect(**wanted: int | None) -> None:
    """Warn if a cluster to which this process has attached differs from the local one that was requested."""
    if not any(wanted.values()):
        return
    resources = ask_head("list what the cluster has", ray.cluster_resources, timeout_s=ATTACH_S)
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
