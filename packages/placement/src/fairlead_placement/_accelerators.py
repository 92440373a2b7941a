# SPDX-License-Identifier: Apache-2.0
"""Which accelerators Ray gave to each bundle."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ._groups import Reserved
from .exceptions import PlacementTimeoutError

__all__ = ["accelerator_ids"]


def accelerator_ids(reserved: Sequence[Reserved], *, timeout_s: float) -> list[list[tuple[str, ...]]]:
    """The ids of the GPUs of every bundle, by group and bundle index.

    Ray tells them only to a process that holds them, and refuses a request that spans bundles: one short task per
    bundle, all at once. Without GPUs no task is run.
    """
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
            f"{len(asked)} tasks that ask which GPUs were reserved did not finish within {timeout_s:.0f} s. "
            "The nodes may be starting processes very slowly: try again, or look at the nodes."
        ) from error
    return [[() if ref is None else tuple(answers[ref]) for ref in group] for group in refs]


def _ask_ids() -> Any:
    def ids() -> list[str]:
        held: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return held

    return ray.remote(ids)
