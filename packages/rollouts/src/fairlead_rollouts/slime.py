# SPDX-License-Identifier: Apache-2.0
"""The data source and the rollout function of slime, with a ledger. It imports slime only when they are used."""

import copy
import threading
import time
from pathlib import Path
from typing import Any

from ._ledger import Ledger
from ._model import Claim, Lease, LedgerConfig, Ref
from ._policies import ReadyFirst

__all__ = ["LedgerDataSource", "generate_rollout"]


class LedgerDataSource:
    """Give out the prompts of slime's dataset by ordinal, and save in each checkpoint which of them are open.

    slime makes it if `--data-source-path` is `fairlead_rollouts.slime.LedgerDataSource`, together with
    `--rollout-function-path fairlead_rollouts.slime.generate_rollout`. Generation waits if it runs ahead by more than
    `ledger_max_staleness` versions, which is 1 unless `--custom-config-path` sets it. A group that does not return
    within `ledger_deadline_s` seconds, by default 3600, is generated again. `ledger_prefetch` is 1 by default, for
    `train_async.py`, which generates a rollout before the last one is trained; set it to 0 for `train.py`.

    Args:
        args: the arguments of slime.

    Attributes:
        ledger: the ledger; the ordinal of a group is its `group_index`.
        metadata: as in the data source of slime.
    """

    def __init__(self, args: Any) -> None:
        from slime.rollout.data_source import RolloutDataSource

        self._args, self._reader = args, RolloutDataSource(args)
        self._interval, self._prefetch = args.update_weights_interval, getattr(args, "ledger_prefetch", 1)
        staleness = getattr(args, "ledger_max_staleness", 1)
        if staleness * self._interval < self._prefetch:
            raise ValueError(
                f"ledger_max_staleness is {staleness} and ledger_prefetch is {self._prefetch}: a rollout that is "
                "generated before the last one is trained is a version old. Set ledger_max_staleness to at least 1."
            )
        self._config = LedgerConfig(
            group_size=args.n_samples_per_prompt,
            groups_per_version=args.rollout_batch_size * self._interval,
            max_staleness=None,
            lookahead=staleness,
            policy=ReadyFirst(),
            on_stale="drop",
        )
        self.ledger: Ledger = Ledger(self._config, range(1 << 62))
        self.metadata: dict[str, Any] = {}
        self._leases: dict[int, Lease] = {}
        self._returned: dict[int, list[Any]] = {}
        # slime's worker asks from a thread of its own.
        self._lock = threading.RLock()

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return up to `num_samples` groups, none if there is no room for another one."""
        with self._lock:
            now = time.monotonic()
            self.ledger.expire(now)
            leases = self.ledger.lease(num_samples, deadline=now + getattr(self._args, "ledger_deadline_s", 3600.0))
            self._leases |= {lease.ordinal: lease for lease in leases}
            return [self._returned.pop(lease.ordinal, []) or self._make_group(lease.ordinal) for lease in leases]

    def _make_group(self, ordinal: int) -> list[Any]:
        dataset, size = self._reader.dataset, self._config.group_size
        if dataset is None:
            from slime.utils.types import Sample

            prompt = Sample()
        else:
            epoch, place = divmod(ordinal, len(dataset))
            if self._args.rollout_shuffle:
                dataset.shuffle(epoch)
            prompt = dataset.samples[place]
        group = [copy.deepcopy(prompt) for _ in range(size)]
        for sibling, sample in enumerate(group):
            sample.group_index, sample.index = ordinal, ordinal * size + sibling
        return group

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take back aborted groups. They are given out again, with what has been generated."""
        with self._lock:
            for group in samples:
                lease = self._leases.pop(group[0].group_index, None)
                if lease is not None and self.ledger.cancel(lease):
                    self._returned[lease.ordinal] = group

    def begin(self, rollout_id: int) -> None:
        """Report that a rollout begins. slime has trained all rollouts before it, but `ledger_prefetch` of them."""
        trained = rollout_id - self._prefetch
        with self._lock:
            if trained > 0:
                self.ledger.advance(max(self.ledger.version, trained // self._interval), trained=trained)

    def take(self, rollout_id: int, groups: list[list[Any]]) -> None:
        """Record the groups of a rollout, which slime has chosen: they are finished and claimed in one step.

        Raises:
            RuntimeError: A group was not given out, or its lease has expired, so it is generated a second time.
        """
        with self._lock:
            for group in groups:
                lease = self._leases.pop(group[0].group_index, None)
                accepted = lease is not None and self.ledger.seal_many(
                    [(lease, sibling, Ref(group[0].group_index)) for sibling in lease.siblings]
                )
                if not accepted or not all(accepted):
                    raise RuntimeError(
                        f"Rollout {rollout_id} has group {group[0].group_index}, which is generated again because it "
                        "took too long. Raise ledger_deadline_s."
                    )
            claim = self.ledger.claim(rollout_id + 1, len(groups))
            if not isinstance(claim, Claim):
                raise RuntimeError(f"Rollout {rollout_id} with {len(groups)} groups cannot be claimed: {claim}.")

    def save(self, rollout_id: int) -> None:
        """Write the ledger's snapshot beside the checkpoint of a rollout. slime calls it after the model is saved."""
        with self._lock:
            folder = self._find_folder(self._args.save, rollout_id)
            folder.mkdir(parents=True, exist_ok=True)
            self.ledger.prepare(rollout_id + 1, folder)
            self.ledger.commit(rollout_id + 1)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue after the checkpoint of a rollout. Groups that it does not cover are generated again.

        Raises:
            SnapshotError: The checkpoint has no snapshot. slime's own data source would begin at prompt 0.
        """
        if self._args.load is None or rollout_id is None or rollout_id < 0:
            return
        with self._lock:
            step, folder = rollout_id + 1, self._find_folder(self._args.load, rollout_id)
            version = step // self._interval
            self.ledger = Ledger.restore(self._config, range(1 << 62), step=step, version=version, directory=folder)
            self._leases, self._returned = {}, {}

    @staticmethod
    def _find_folder(root: str, rollout_id: int) -> Path:
        return Path(root, "rollout", f"ledger_{rollout_id}")

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Update `metadata`, as in the data source of slime."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return `metadata`."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return the number of groups that were taken back."""
        return len(self._returned)

    def __len__(self) -> int:
        return len(self._reader)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Call slime's fully asynchronous rollout function, and record what it returns.

    The argument `ledger_rollout_function` of slime may name another function with this signature.

    Args:
        args: the arguments of slime.
        rollout_id: the rollout.
        data_source: a `LedgerDataSource`.
        evaluation: as in slime.
    """
    from slime.utils.misc import load_function

    path = getattr(args, "ledger_rollout_function", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    if not evaluation:
        data_source.begin(rollout_id)
    result = load_function(path)(args, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        data_source.take(rollout_id, getattr(result, "samples", result))
    return result
