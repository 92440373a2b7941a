# SPDX-License-Identifier: Apache-2.0
"""The replay buffer of verl's asynchronous trainers, with a ledger. It needs verl 0.9.1 or later."""

from typing import TYPE_CHECKING, Any

from ._ledger import Ledger
from ._mirror import MirrorLedger

__all__ = ["LedgerReplayBuffer"]

if TYPE_CHECKING:

    class ReplayBufferAsync:
        """The members of verl's class that the adapter uses."""

        prompt_global_steps: dict[str, dict[str, int]]
        finished_keys: dict[str, set[str]]
        failure_keys: dict[str, set[str]]

        def __init__(self, *settings: Any, **options: Any) -> None: ...
        def _sync_metadata_from_transfer_queue(self) -> None: ...
        def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> tuple[Any, ...]: ...
        def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]: ...
        def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> tuple[Any, ...]: ...
        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]: ...

else:
    try:
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    except ModuleNotFoundError as _error:
        if _error.name != "verl":
            raise
        ReplayBufferAsync = object  # The documentation describes this module where verl is not installed.

OPTIONS = ("groups_per_version", "filter_groups_metric")
TRAIN = "train"


class LedgerReplayBuffer(ReplayBufferAsync):
    """Sample batches that never exceed verl's off-policy threshold, and count what becomes of every prompt.

    verl makes it if `trainer.v1.sampler.custom_sampler` has the path `pkg://fairlead_rollouts.verl` and the name
    `LedgerReplayBuffer`. The threshold t is the bound K = t - 1. The strategy "drop" replaces groups that are too old;
    "wait" waits for old groups, and replaces those that became too old nevertheless.

    `sampler_kwargs` has these options: `groups_per_version`, the groups that are trained between two updates of the
    weights (verl passes no batch size), and `filter_groups_metric`, the metric whose groups with equal values are
    replaced.

    Attributes:
        ledger: the ledger, which has one sample for each group.
    """

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Any,
        **options: Any,
    ) -> None:
        given = dict(sampler_kwargs or {})
        if "groups_per_version" not in given or not given.keys() <= set(OPTIONS):
            raise ValueError(
                f"trainer.v1.sampler.sampler_kwargs has {sorted(given)}; groups_per_version is needed, and "
                f"{' and '.join(OPTIONS)} are known. Set groups_per_version to data.train_batch_size."
            )
        settings = trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs
        super().__init__(*settings, filter_groups_metric=given.get("filter_groups_metric"), **options)
        bound = None if max_off_policy_threshold is None else max_off_policy_threshold - 1
        waits = bound is not None and max_off_policy_strategy == "wait"
        lookahead, on_stale = (bound, "wait") if waits else (None, "drop")
        self._mirror = MirrorLedger(given["groups_per_version"], bound, lookahead=lookahead, on_stale=on_stale)
        self.ledger: Ledger = self._mirror
        self._sampling, self._claimed = False, list[str]()

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Read the states of all prompts, and bring the ledger up to date."""
        super()._sync_metadata_from_transfer_queue()
        listed, finished = self.prompt_global_steps[TRAIN], self.finished_keys[TRAIN]
        self._mirror.update(listed, finished, self.failure_keys[TRAIN])

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> tuple[Any, ...]:
        """Return the stale, filtered and failed groups. verl removes them and generates other prompts."""
        if partition_id != TRAIN:
            return super()._terminal_eviction_reasons(global_steps, partition_id)
        self._mirror.follow(global_steps)
        stale = self._mirror.find_stale()
        _, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        self.ledger.drop([self._mirror.ordinals[key] for key in filtered & self._mirror.find_sealed()], "no_signal")
        return stale, filtered, failed, counts

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        keys = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        return keys & self._mirror.find_sealed() if partition_id == TRAIN else keys

    def _has_enough_samples(self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: Any) -> bool:
        """Claim a batch if `sample` asks, and count groups otherwise."""
        if partition_id != TRAIN or not self._sampling:
            return len(sampleable_keys) >= batch_size
        self._claimed = self._mirror.take(batch_size) or []
        return bool(self._claimed)

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> tuple[Any, ...]:
        """Return the claimed groups, the oldest first."""
        selected, *listed = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == TRAIN:
            selected = self._claimed
        return selected, *listed

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return a batch and metrics, as verl's own buffer does.

        Args:
            global_steps: the trainer's step.
            partition_id: "train" or "val". Validation does not concern the ledger.
            batch_size: the number of groups.
        """
        self._sampling = partition_id == TRAIN
        try:
            batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        finally:
            self._sampling = False
        if partition_id == TRAIN:
            numbers = self.ledger.statistics()
            names = "pending", "leased", "sealed", "applied", "dropped", "waits"
            metrics.update({f"training/rollouts/{name}": getattr(numbers, name) for name in names})
        return batch, metrics
