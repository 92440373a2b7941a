# SPDX-License-Identifier: Apache-2.0
"""Attach to a Ray cluster, or start one on this machine."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import ray

from .exceptions import PlacementError

__all__ = ["init_ray"]

logger = logging.getLogger(__name__)

# A local cluster that this function started carries a resource of this name, so that it can be told from others.
_TAG = "fairlead-local-"


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
        address: of the cluster to attach to, as for `ray.init`; "local" always starts a new one. None: the cluster
            that `RAY_ADDRESS` names or that runs on this machine. A local cluster that this function started for
            other visible devices is not attached to.
        num_cpus: CPUs of a local cluster; None: those of the machine.
        num_gpus: GPUs of a local cluster; None: those of the machine.

    Returns:
        Ray's context, as of `ray.init`. `ray.shutdown()` ends what was started.

    Raises:
        PlacementError: Ray is running in this process already and `address` names another cluster; the cluster at
            `address` cannot be reached; or it wants a token that is not there.

    Nothing of this process's environment is handed to the cluster, and `os.environ` is not edited (Ray itself
    records in it that a local cluster uses token authentication).
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise PlacementError(f"Ray is connected to {here} already. Call ray.shutdown() before {address!r} is used.")
        return ray.init(ignore_reinit_error=True, logging_level=logging.ERROR)
    if address != "local":
        context = _attach(address)
        if context is not None:
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


def _attach(address: str | None) -> Any | None:
    """The cluster at `address`; None if none was named and none runs that is ours to use."""
    try:
        context = ray.init(address=address or "auto")
    except ray.exceptions.AuthenticationError as error:
        raise PlacementError(
            f"The Ray cluster at {address or 'this machine'} wants a token and this process has none that it takes. "
            "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token) as on the "
            f"cluster's head. Ray said: {error}"
        ) from error
    except (ConnectionError, ValueError) as error:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            logger.info("no running Ray cluster found (%s): starting a local one", error)
            return None
        where = address or f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
        raise PlacementError(f"No Ray cluster answers at {where}: {error}") from error
    tags = [name for name in ray.cluster_resources() if name.startswith(_TAG)]
    if address is None and tags and _tag() not in tags:
        # Somebody's local cluster for other devices: leave it alone.
        ray.shutdown()
        return None
    return context


def _tag() -> str:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return _TAG + hashlib.sha256(devices.encode()).hexdigest()[:8]
