# SPDX-License-Identifier: Apache-2.0
"""Which accelerators Ray gave to each bundle."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..exceptions import PlacementTimeoutError
from .groups import Reserved

__all__ = ["accelerator_ids"]

# A task that reports an id has to start a process. It gets this long even when the reservation's own time is used up:
# the resources are held by then, and a reservation that takes only what is free now (0 s) would always fail.
LEAST_S = 10.0


def accelerator_ids(reserved: Sequence[Reserved], *, deadline: float) -> list[list[tuple[str, ...]]]:
    """Return the ids of the GPUs of every bundle, by group and bundle index.

    Ray tells them only to a process that holds them, and refuses a request that spans bundles: one short task per
    bundle, all at once. Without GPUs no task is run.

    Args:
        reserved: the groups.
        deadline: the end of the reservation's time, as of `time.monotonic`. The tasks get at least `LEAST_S`.

    Raises:
        PlacementTimeoutError: the tasks did not finish in time.
    """
    timeout_s = max(LEAST_S, deadline - time.monotonic())
    refs = [
        [
            _ask_ids()
            .options(
                num_cpus=0,
                num_gpus=bundle["GPU"],
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(one.group, index),
            )
            .remote()
            if bundle.get("GPU", 0) > 0
            else None
            for index, bundle in enumerate(one.bundles)
        ]
        for one in reserved
    ]
    asked = [ref for group in refs for ref in group if ref is not None]
    try:
        answers = dict(zip(asked, ray.get(asked, timeout=timeout_s), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise PlacementTimeoutError(
            f"The GPUs are reserved, but {len(asked)} tasks that ask for their ids did not finish within "
            f"{timeout_s:.0f} s. The nodes may be starting processes very slowly: wait longer (reserve_timeout_s, or "
            "timeout_s of replace_lost_nodes), or look at the nodes."
        ) from error
    return [[() if ref is None else tuple(answers[ref]) for ref in group] for group in refs]


def _ask_ids() -> Any:
    def ids() -> list[str]:
        held: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return held

    return ray.remote(ids)
