# SPDX-License-Identifier: Apache-2.0
"""Asking Ray what dead workers died of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from .failures import WorkerFacts, as_failures

if TYPE_CHECKING:
    from .._group import RayWorkerGroup

__all__ = ["note_causes"]


def note_causes(group: RayWorkerGroup, dead: Sequence[WorkerFacts], *, within_s: float) -> None:
    """Have a group know what these of its workers died of, as far as Ray does and says so in time."""
    workers = list(group.workers)  # empty after a shutdown
    # It may have been replaced since it was seen dead: then it is its successor that would be asked.
    unknown = [who for who in dead if workers and group._workers_now[who.rank] is who and who.rank not in group._lost]
    # Of a dead actor this is answered at once, with what it died of.
    asked = {workers[who.rank].__ray_ready__.remote(): who for who in unknown}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=within_s) if asked else ([], [])
    errors: dict[int, BaseException] = {}
    for ref in answered:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            errors[asked[ref].rank] = error
    if failures := as_failures(errors, {who.rank: who for who in unknown}):
        group._note_lost(failures)
