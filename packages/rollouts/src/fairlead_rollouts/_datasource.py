# SPDX-License-Identifier: Apache-2.0
"""The data source of miles and slime, with a ledger: prompts by ordinal, and a snapshot beside each checkpoint."""

import copy
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ._ledger import Ledger
from ._model import Lease, LedgerConfig, Ref

__all__ = ["LedgerSource"]


class LedgerSource:
    """Give out the prompts of a dataset by ordinal, and save which of them are open.

    Args:
        args: the arguments of the framework.
        reader: the framework's own data source, of which only the dataset is used.
        sample: the framework's class of samples.
        config: the rules of the ledger, but for the sizes that the arguments have.

    Attributes:
        ledger: the ledger; the ordinal of a group is its `group_index`.
        dataset: the dataset.
        lock: held during each call of the ledger.
    """

    def __init__(self, args: Any, reader: Any, sample: Any, **config: Any) -> None:
        self._args, self._reader, self._sample = args, reader, sample
        self._interval: int = getattr(args, "update_weights_interval", 1)
        self._config = LedgerConfig(
            group_size=args.n_samples_per_prompt, groups_per_version=args.rollout_batch_size * self._interval, **config
        )
        self.ledger: Ledger = Ledger(self._config, range(1 << 62), on_release=self.release)
        self._leases: dict[int, Lease] = {}
        self._returned: dict[int, list[Any]] = {}
        # The worker of a framework may ask from a thread of its own.
        self.lock: AbstractContextManager[Any] = threading.RLock()

    @property
    def kept(self) -> Path:
        """The folder of the groups that are kept on disk. A durable reference is the path of such a file."""
        return Path(self._args.save, "rollout", "groups")

    def release(self, ref: Ref, reason: str) -> None:
        """Delete the file of a group. Those of another run, whose checkpoint was loaded, stay."""
        if ref.durable and Path(ref.value).parent == self.kept:
            Path(ref.value).unlink(missing_ok=True)

    @property
    def dataset(self) -> Any:
        """The dataset of the framework's own data source."""
        return self._reader.dataset

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return up to `num_samples` groups, none if there is no room for another one."""
        with self.lock:
            now = time.monotonic()
            self.ledger.expire(now)
            leases = self.ledger.lease(num_samples, deadline=now + getattr(self._args, "ledger_deadline_s", 3600.0))
            self._leases |= {lease.ordinal: lease for lease in leases}
            return [self._returned.pop(lease.ordinal, []) or self._make_group(lease.ordinal) for lease in leases]

    def _make_group(self, ordinal: int) -> list[Any]:
        dataset, size = self.dataset, self._config.group_size
        if dataset is None:
            prompt = self._sample()
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
        with self.lock:
            for group in samples:
                lease = self._leases.pop(group[0].group_index, None)
                if lease is not None and self.ledger.cancel(lease):
                    self._returned[lease.ordinal] = group

    def save(self, rollout_id: int) -> None:
        """Write the ledger's snapshot beside the checkpoint of a rollout. Call it after the model is saved."""
        with self.lock:
            folder = self._find_folder(self._args.save, rollout_id)
            folder.mkdir(parents=True, exist_ok=True)
            self.ledger.prepare(rollout_id + 1, folder)
            self.ledger.commit(rollout_id + 1)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue after the checkpoint of a rollout. Groups that it does not cover are generated again.

        Raises:
            SnapshotError: The checkpoint has no snapshot. The framework's own data source would begin at prompt 0.
        """
        if self._args.load is None or rollout_id is None or rollout_id < 0:
            return
        with self.lock:
            step, folder = rollout_id + 1, self._find_folder(self._args.load, rollout_id)
            there: set[str] = set()

            def exists(ref: Ref) -> bool:
                there.update([ref.value] if Path(ref.value).exists() else [])
                return ref.value in there

            self.ledger = Ledger.restore(
                self._config,
                range(1 << 62),
                step=step,
                version=step // self._interval,
                directory=folder,
                exists=exists,
                on_release=self.release,
            )
            self._leases, self._returned = {}, {}
            # What the process that ended has kept since this checkpoint is generated again.
            for file in self.kept.glob("*") if self._args.load == self._args.save else ():
                if str(file) not in there:
                    file.unlink()

    @staticmethod
    def _find_folder(root: str, rollout_id: int) -> Path:
        return Path(root, "rollout", f"ledger_{rollout_id}")

    def get_buffer_length(self) -> int:
        """Return the number of groups that were taken back."""
        return len(self._returned)

    def __len__(self) -> int:
        return len(self._reader)
