# SPDX-License-Identifier: Apache-2.0
"""The data source and the data buffer of miles, with one ledger. It imports miles only when they are used."""

import asyncio
from typing import Any, ClassVar

from ._datasource import LedgerSource, iterate
from ._ledger import Ledger
from ._model import Claim, Completeness, ReadyFirst, Ref

__all__ = ["LedgerDataBuffer", "LedgerDataSource"]


class LedgerDataSource(LedgerSource):
    """Give out the prompts of miles' dataset by their id, and save in each checkpoint which of them are open.

    miles makes it if `--data-source-path` is `fairlead_rollouts.miles.LedgerDataSource`, together with
    `--custom-async-data-buffer-path fairlead_rollouts.miles.LedgerDataBuffer`. `--max-weight-staleness` is the bound K.
    `--async-unused-samples-handler retry` generates groups that are aborted or too old again, and `drop` drops them.
    These options go into the file of `--custom-config-path`:

    - `ledger_deadline_s`: a group that does not return within so many seconds is generated again; 3600 by default.
    - `ledger_missing`: what to do if a checkpoint has no snapshot, as in a run that began without a ledger: "restart"
      begins at prompt 0, "epoch" at the next epoch. By default it is an error.

    Args:
        args: the arguments of miles.

    Attributes:
        latest: the data source of this process.
    """

    latest: ClassVar["LedgerDataSource | None"] = None

    def __init__(self, args: Any) -> None:
        from miles.rollout.data_source import RolloutDataSource
        from miles.utils.types import Sample

        bound, retries = args.max_weight_staleness, args.async_unused_samples_handler == "retry"
        if bound == 0:
            raise ValueError(
                "max_weight_staleness is 0, but train_async.py generates a rollout before the last one is trained, so "
                "its groups are a version old. Set --max-weight-staleness to at least 1."
            )
        rules: dict[str, Any] = {"max_staleness": bound, "lookahead": None, "policy": ReadyFirst()}
        attempts = Completeness(max_attempts=1 << 30 if retries else 1, retry="group")
        on_stale = "requeue" if retries else "drop"
        super().__init__(args, RolloutDataSource(args), Sample, on_stale=on_stale, completeness=attempts, **rules)
        LedgerDataSource.latest = self


class LedgerDataBuffer:
    """Keep finished groups until a rollout takes them, as the ledger of the data source decides.

    A group that was aborted has failed. A group that `--dynamic-sampling-filter-path` does not keep is dropped. A group
    that took too long is being generated again, and its late result is left out.

    Args:
        input: what miles passes to a data buffer.
    """

    def __init__(self, input: Any) -> None:
        from miles.rollout.filter_hub.base_types import call_dynamic_filter
        from miles.utils.misc import load_function

        if LedgerDataSource.latest is None:
            raise ValueError("Set --data-source-path to fairlead_rollouts.miles.LedgerDataSource too.")
        self._args, self._source = input.args, LedgerDataSource.latest
        self._lock = self._source.lock
        self._batch: int = self._args.rollout_batch_size
        self._call_filter, self._filter = call_dynamic_filter, load_function(self._args.dynamic_sampling_filter_path)
        self._capacity = int(self._args.async_data_buffer_capacity_factor * self._batch)
        self._first: int | None = None  # the rollout that this process began with
        self._taken = 0
        # A new process may count the versions of its weights from the beginning.
        self._shift: int | None = None
        self._condition = asyncio.Condition()

    @property
    def _ledger(self) -> Ledger:
        return self._source.ledger  # `load` makes another one

    @property
    def _rollout(self) -> int:
        """The rollout that takes groups now.

        miles learns where to resume after it has copied its arguments into this process, so the ledger says it.
        """
        if self._first is None:
            self._first = self._ledger.last_trained or 0
        return self._first + self._taken // self._batch

    def _follow(self, version: int | None) -> int | None:
        """Report a version of the weights, and return it as the ledger counts."""
        if version is None:
            return None
        if self._shift is None:
            self._shift = self._ledger.version - version
        shifted, rollout = version + self._shift, self._rollout
        if shifted > self._ledger.version:
            # The rollout before this one may still be in training.
            self._ledger.advance(shifted, trained=rollout - 1 if rollout > 1 else None)
        return shifted

    def _record(self, entry: Any) -> None:
        lease = self._source.end(entry.prompt_group)
        if lease is None:
            return
        samples = list(iterate(entry.group))
        if any(sample.status == type(sample).Status.ABORTED for sample in samples):
            self._ledger.fail(lease, reason="aborted")
            return
        versions = [self._follow(sample.oldest_weight_version) for sample in samples]
        oldest = min([version for version in versions if version is not None], default=None)
        results = [(lease, sample, Ref(entry)) for sample in lease.samples]
        verdict = self._call_filter(self._filter, self._args, entry.group)
        if all(self._ledger.finish_many(results, oldest_version=oldest)) and not verdict.keep:
            self._ledger.drop([lease.prompt_id], getattr(verdict, "reason", None) or "filtered")

    async def put(self, input: Any) -> None:
        """Record a finished group, and wait while more groups are finished than the buffer holds."""
        async with self._condition:
            with self._lock:
                self._record(input)
            self._condition.notify_all()
            # Each of hundreds that wait here looks after each change, so it does not make the whole statistics.
            while len(self._ledger._book.by_state["finished"]) > self._capacity:  # noqa: SLF001  of this package
                await self._condition.wait()

    def _take(self, current_version: int | None) -> Any:
        """Claim the next group of the current rollout, or return None."""
        self._follow(current_version)
        claim = self._ledger.claim(self._rollout + 1, self._taken % self._batch + 1)
        if not isinstance(claim, Claim):
            return None
        self._taken += 1
        if self._taken % self._batch == 0:
            # Not on another thread: a group whose reader is cancelled would be lost.
            self._source.save_claims()
        return claim.groups[-1].samples[0].ref.value

    async def get(self, current_version: int | None = None, **_: Any) -> Any:
        """Claim one group for the current rollout, and wait until there is one.

        The last group of a rollout is returned when the claims of the rollout are on the disk.
        """
        async with self._condition:
            while True:
                with self._lock:
                    entry = self._take(current_version)
                if entry is not None:
                    self._condition.notify_all()
                    return entry
                await self._condition.wait()

    def get_metrics(self) -> dict[str, float]:
        """Return the numbers of the ledger, counted since it was made."""
        with self._lock:
            numbers = self._ledger.statistics()
        names = "pending", "leased", "finished", "claimed", "trained", "applied", "dropped", "regenerated", "fenced"
        metrics = {f"rollout/ledger/{name}": float(getattr(numbers, name)) for name in names}
        return {**metrics, "rollout/ledger/max_staleness": float(max(numbers.staleness, default=0))}
