# SPDX-License-Identifier: Apache-2.0
"""Every use of Ray that is not public, each with its reason."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ray.actor import ActorClass
from ray.remote_function import RemoteFunction


def unwrap_remote(target: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function or class under `@ray.remote` and its options; anything else as it is, without options.

    Nothing public reads either of them.
    """
    if isinstance(target, RemoteFunction):
        return target._function, dict(target._default_options)
    if isinstance(target, ActorClass):
        return target.__ray_actor_class__, dict(target._default_options)
    return target, {}


@contextlib.contextmanager
def no_announcement() -> Iterator[None]:
    """Keep `ray.cluster_utils.Cluster` from announcing its address, and from removing what `ray start` announced.

    Drivers of other programs would join it, or not find the cluster of `ray start`.
    """
    with mock.patch("ray._private.utils.write_ray_address"), mock.patch("ray._common.utils.reset_ray_address"):
        yield
