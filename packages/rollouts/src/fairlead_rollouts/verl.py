# SPDX-License-Identifier: Apache-2.0
"""The replay buffer of verl's asynchronous trainers, with a ledger. It needs verl 0.9.1 or later."""

from typing import TYPE_CHECKING, Any

from ._ledger import Ledger
from ._model import Claim, Completeness, Event, Lease, LedgerConfig, Ref

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
        config = LedgerConfig(
            group_size=1,
            groups_per_version=given["groups_per_version"],
            max_staleness=bound,
            lookahead=bound if waits else None,
            on_stale="wait" if waits else "drop",
            completeness=Completeness(max_attempts=1),
        )
        self.ledger: Ledger = Ledger(config, checkpoints=False, on_event=self._note)
        self._ordinals: dict[str, int] = {}  # of the open groups
        self._keys: dict[int, str] = {}
        self._leases: dict[str, Lease] = {}
        self._closed: dict[str, str] = {}  # the reason for each group that verl still lists, and the ledger has closed
        self._step, self._sampling = 0, False
        self._claim: Claim | None = None

    def _note(self, event: Event) -> None:
        key, final = self._keys.get(event.ordinal), event.after in ("applied", "dropped")
        if key is not None and (final or event.reason == "stale"):
            self._closed.setdefault(key, event.reason or "applied")
        if key is not None and final:
            del self._keys[event.ordinal], self._ordinals[key]

    def _advance(self, global_steps: int) -> None:
        """Report the step of the trainer, which is the version of its weights. Earlier batches are trained."""
        if global_steps > self.ledger.version:
            self.ledger.advance(global_steps, trained=self._step or None)

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Read the states of all prompts, and bring the ledger up to date."""
        super()._sync_metadata_from_transfer_queue()
        steps, ledger = self.prompt_global_steps[TRAIN], self.ledger
        self._closed = {key: reason for key, reason in self._closed.items() if key in steps}
        for key in sorted((one for one in steps if one not in self._ordinals | self._closed), key=steps.__getitem__):
            self._advance(steps[key])
            (ordinal,) = ledger.offer([key])
            self._ordinals[key], self._keys[ordinal] = ordinal, key
            self._lease()
        self._lease()
        for key, lease in list(self._leases.items()):
            if key in self.finished_keys[TRAIN]:
                ledger.seal(lease, 0, Ref(key), oldest_version=steps[key])
            elif key in self.failure_keys[TRAIN] or key not in steps or key in self._closed:
                ledger.fail(lease, reason="failed")
            else:
                continue
            del self._leases[key]

    def _lease(self) -> None:
        """Lease the groups that verl generates. Without room, they wait in the ledger although verl generates them."""
        for lease in self.ledger.lease(max(1, len(self._ordinals))):
            self._leases[lease.prompt] = lease

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> tuple[Any, ...]:
        """Return the stale, filtered and failed groups. verl removes them and generates other prompts."""
        if partition_id != TRAIN:
            return super()._terminal_eviction_reasons(global_steps, partition_id)
        self._advance(global_steps)
        self.ledger.sweep()
        _, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        self.ledger.drop([self._ordinals[key] for key in filtered & self._find_sealed()], "no_signal")
        return {key for key, reason in self._closed.items() if reason == "stale"}, filtered, failed, counts

    def _find_sealed(self) -> set[str]:
        return {key for key, ordinal in self._ordinals.items() if self.ledger.state(ordinal) == "sealed"}

    def _sampleable_terminal_keys(self, partition_id: str, eviction_reasons: Any) -> set[str]:
        keys = super()._sampleable_terminal_keys(partition_id, eviction_reasons)
        return keys & self._find_sealed() if partition_id == TRAIN else keys

    def _has_enough_samples(self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: Any) -> bool:
        """Claim a batch if `sample` asks, and count groups otherwise."""
        if partition_id != TRAIN or not self._sampling:
            return len(sampleable_keys) >= batch_size
        claim = self.ledger.claim(self._step + 1, batch_size)
        self._claim = claim if isinstance(claim, Claim) else None
        return self._claim is not None

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> tuple[Any, ...]:
        """Return the claimed groups, the oldest first."""
        selected, *listed = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if self._claim is not None and partition_id == TRAIN:
            selected = [sample.ref.value for group in self._claim.groups for sample in group.samples]
            self._step, self._claim = self._claim.step, None
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
