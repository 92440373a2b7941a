# SPDX-License-Identifier: Apache-2.0
"""A sampler for the single controller of NeMo RL, with a ledger. It imports nothing of NeMo RL."""

import asyncio
from collections.abc import Callable
from typing import Any

from ._ledger import Ledger
from ._mirror import MirrorLedger
from ._policies import OldestFirst, Policy, ReadyFirst, WeightFifo, Windowed

__all__ = ["LedgerSampler"]

POLL_S = 0.005


class LedgerSampler:
    """Choose the groups of each step with a ledger, which counts what becomes of every group.

    NeMo RL makes it if `async_rl.sampler` has the name `custom` and the target `fairlead_rollouts.nemo:LedgerSampler`;
    the other keys are the arguments below.

    Args:
        buffer: the replay buffer of NeMo RL.
        groups_per_version: the groups that are trained between two updates of the weights.
        policy: "oldest_first" waits for old groups, so that none becomes too old. "windowed", "ready_first" and
            "weight_fifo" choose as the samplers of NeMo RL with these names.
        max_staleness_versions: the bound K; with "ready_first" only how far generation may run ahead.
        sample_freshest_first: with "windowed", whether groups with newer weights come first.

    Attributes:
        ledger: the ledger, which has one sample for each group.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        groups_per_version: int,
        policy: str = "oldest_first",
        max_staleness_versions: int = 1,
        sample_freshest_first: bool = False,
    ) -> None:
        policies: dict[str, Policy] = {
            "oldest_first": OldestFirst(),
            "ready_first": ReadyFirst(),
            "weight_fifo": WeightFifo(),
            "windowed": Windowed(freshest_first=sample_freshest_first),
        }
        if policy not in policies:
            raise ValueError(f"policy is {policy!r}; use one of {sorted(policies)}.")
        if max_staleness_versions < 0:
            raise ValueError(f"max_staleness_versions is {max_staleness_versions}; it must be at least 0.")
        waits = policy == "oldest_first"
        self._gated, self._window = policy != "windowed", max_staleness_versions
        self._bound = None if policy == "ready_first" else max_staleness_versions
        self._mirror = MirrorLedger(
            groups_per_version,
            self._bound,
            policy=policies[policy],
            lookahead=self._bound if waits else None,
            on_stale="wait" if waits else "drop",
        )
        self.ledger: Ledger = self._mirror
        self._buffer, self._dispatched = buffer, -1

    @property
    def _keys(self) -> list[str]:
        keys: list[str] = self._buffer._group_ids  # noqa: SLF001  the only name of a group in generation
        return keys

    def _update(self, version: int) -> None:
        buffer, keys = self._buffer, self._keys
        ready = {key for key, is_ready in zip(keys, buffer.ready_list, strict=True) if is_ready}
        self._mirror.update(dict(zip(keys, buffer.start_weight_list, strict=True)), ready, ())
        self._mirror.follow(version)

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until the next batch of prompts may be dispatched.

        Returns:
            None: batches have no target step.
        """
        while self._gated and self._dispatched >= trainer_version_fn() + self._window:
            await asyncio.sleep(POLL_S)
        self._dispatched += 1
        return None

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any, int]:
        """Claim groups and take them out of the buffer.

        Returns:
            Their data and their number, or None and 0 if the ledger refuses the claim.
        """
        self._update(current_train_weight)
        keys = self._mirror.take(max_prompt_groups, min_prompt_groups)
        if keys is None:
            return None, 0
        place_of = {key: place for place, key in enumerate(self._keys)}
        places = [place_of[key] for key in keys]
        first, *others = [self._buffer.meta_list[place] for place in places]
        try:
            await self._buffer.remove(places, remove_in_dp=False)
        except BaseException:
            self._mirror.give_back()
            raise
        return first.concat(*others), len(keys)

    async def evict(self, *, current_train_weight: int) -> int:
        """Remove the groups that are too old from the buffer, and return their number."""
        self._update(current_train_weight)
        stale = self._mirror.find_stale()
        places = [place for place, key in enumerate(self._keys) if key in stale]
        return int(await self._buffer.remove(places, remove_in_dp=True)) if places else 0

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Return whether no claim can accept a group of these weights any more."""
        return self._bound is not None and start_weight_version < current_train_weight - self._bound

    @property
    def is_on_policy(self) -> bool:
        """Whether groups are trained with the weights that generated them."""
        return self._window == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        """Return the groups that the buffer must hold, or None."""
        return groups_per_step * (self._window + 1) if self._gated else None

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Continue at a step of a checkpoint."""
        self._dispatched = resume_from_step - 1
