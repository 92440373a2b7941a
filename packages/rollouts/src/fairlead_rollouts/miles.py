# SPDX-License-Identifier: Apache-2.0
"""The data source and the data buffer of miles, with one ledger. It imports miles only when they are used."""

import asyncio
import pickle
import uuid
from pathlib import Path
from typing import Any, ClassVar

from ._datasource import LedgerSource
from ._ledger import Ledger
from ._model import Claim, Completeness, Lease, Ref
from ._policies import ReadyFirst
from ._store.snapshot import write_file

__all__ = ["LedgerDataBuffer", "LedgerDataSource"]


class LedgerDataSource(LedgerSource):
    """Give out the prompts of miles' dataset by ordinal, and save in each checkpoint which of them are open.

    miles makes it if `--data-source-path` is `fairlead_rollouts.miles.LedgerDataSource`, together with
    `--custom-async-data-buffer-path fairlead_rollouts.miles.LedgerDataBuffer`. `--max-weight-staleness` is the bound K.
    `--async-unused-samples-handler retry` generates groups that are aborted or too old again, and `drop` drops them.
    With `ledger_keep: disk` (`--custom-config-path`) finished groups are files below `--save` until a checkpoint covers
    them, so that a resume does not generate them again.

    Args:
        args: the arguments of miles.

    Attributes:
        latest: the data source of this process.
        keeps: whether finished groups are files.
    """

    latest: ClassVar["LedgerDataSource | None"] = None

    def __init__(self, args: Any) -> None:
        from miles.rollout.data_source import RolloutDataSource
        from miles.utils.types import Sample

        self.keeps: bool = getattr(args, "ledger_keep", None) == "disk"
        if getattr(args, "ledger_keep", None) not in (None, "disk"):
            raise ValueError(f"ledger_keep is {args.ledger_keep!r}; it must be 'disk', or left out.")
        if self.keeps and args.save is None:
            raise ValueError("ledger_keep is 'disk', and its files are below --save, which is not set. Set --save.")
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

    def end(self, ordinal: int) -> Lease | None:
        """Return the lease of a group that has come back, once."""
        return self._leases.pop(ordinal, None)


class LedgerDataBuffer:
    """Keep finished groups until a rollout takes them, as the ledger of the data source decides.

    A group that was aborted has failed. A group that `--dynamic-sampling-filter-path` does not keep is dropped.

    Args:
        input: what miles passes to a data buffer.
    """

    def __init__(self, input: Any) -> None:
        from miles.rollout.filter_hub.base_types import call_dynamic_filter
        from miles.utils.misc import load_function

        if LedgerDataSource.latest is None:
            raise ValueError("Set --data-source-path to fairlead_rollouts.miles.LedgerDataSource too.")
        args, self._source = input.args, LedgerDataSource.latest
        self._lock = self._source.lock
        self._args, self._call, self._filter = (
            args,
            call_dynamic_filter,
            load_function(args.dynamic_sampling_filter_path),
        )
        self._capacity, self._batch = (
            int(args.async_data_buffer_capacity_factor * args.rollout_batch_size),
            args.rollout_batch_size,
        )
        self._first: int = getattr(args, "start_rollout_id", None) or 0
        self._taken = 0
        # A new process may count the versions of its weights from the beginning.
        self._shift: int | None = None
        self._condition = asyncio.Condition()

    @property
    def _ledger(self) -> Ledger:
        return self._source.ledger  # `load` makes another one

    def _follow(self, version: int | None) -> int | None:
        """Report a version of the weights, and return it as the ledger counts."""
        if version is None:
            return None
        if self._shift is None:
            self._shift = self._ledger.version - version
        shifted = version + self._shift
        rollout = self._first + self._taken // self._batch
        if shifted > self._ledger.version:
            # The rollout before this one may still be in training.
            self._ledger.advance(shifted, trained=rollout - 1 if rollout > 1 else None)
        return shifted

    def _record(self, entry: Any, ref: Ref) -> None:
        samples = _flatten(entry)
        ordinal = samples[0].group_index
        lease = self._source.end(ordinal)
        if lease is None:
            self._source.release(ref, "fenced")
            return
        if _is_aborted(samples):
            self._ledger.fail(lease, reason="aborted")
            return
        found = [self._follow(one.oldest_weight_version) for one in samples]
        oldest = min((version for version in found if version is not None), default=None)
        results = [(lease, sibling, ref) for sibling in lease.siblings]
        kept = self._call(self._filter, self._args, entry.group)
        if all(self._ledger.seal_many(results, oldest_version=oldest)) and not kept.keep:
            self._ledger.drop([ordinal], getattr(kept, "reason", None) or "filtered")

    async def put(self, input: Any) -> None:
        """Record a finished group, and wait while more groups are finished than the buffer holds."""
        ref = Ref(input)
        if self._source.keeps and not _is_aborted(_flatten(input)):
            # On another thread, because the disk may be slow and this one serves all groups in generation.
            ref = Ref(str(self._source.kept / uuid.uuid4().hex), durable=True)
            await asyncio.to_thread(_write, Path(ref.value), input)
        async with self._condition:
            with self._lock:
                self._record(input, ref)
            self._condition.notify_all()
            # Each of hundreds that wait here looks after each change, so it does not make the whole statistics.
            while len(self._ledger._book.by_state["sealed"]) > self._capacity:  # noqa: SLF001  of this package
                await self._condition.wait()

    async def get(self, current_version: int | None = None, **_: Any) -> Any:
        """Claim one group for the current rollout, and wait until there is one."""
        async with self._condition:
            while True:
                with self._lock:
                    self._follow(current_version)
                    step = self._first + self._taken // self._batch + 1
                    claim = self._ledger.claim(step, 1)
                if isinstance(claim, Claim):
                    self._taken += 1
                    self._condition.notify_all()
                    ref = claim.groups[0].samples[0].ref
                    # Not on another thread: a group whose reader is cancelled would be lost.
                    return pickle.loads(Path(ref.value).read_bytes()) if ref.durable else ref.value
                await self._condition.wait()

    def get_metrics(self) -> dict[str, float]:
        """Return the numbers of the ledger, counted since it was made."""
        with self._lock:
            numbers = self._ledger.statistics()
        names = "pending", "leased", "sealed", "claimed", "trained", "applied", "dropped", "regenerated", "fenced"
        metrics = {f"rollout/ledger/{name}": float(getattr(numbers, name)) for name in names}
        return {**metrics, "rollout/ledger/max_staleness": float(max(numbers.staleness, default=0))}


def _flatten(entry: Any) -> list[Any]:
    """Return the samples of a group, each of which may be a list of turns."""
    return [one for item in entry.group for one in (item if isinstance(item, list) else [item])]


def _is_aborted(samples: list[Any]) -> bool:
    return any(one.status == type(one).Status.ABORTED for one in samples)


def _write(path: Path, entry: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, pickle.dumps(entry, protocol=pickle.HIGHEST_PROTOCOL))
