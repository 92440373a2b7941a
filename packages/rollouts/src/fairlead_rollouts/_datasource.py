# SPDX-License-Identifier: Apache-2.0
"""The data source of miles and slime, with a ledger: prompts by their id, and a snapshot beside each checkpoint."""

import copy
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ._ledger import Ledger
from ._model import Lease, LedgerConfig
from ._snapshot import NAME
from .exceptions import SnapshotError

__all__ = ["LedgerSource", "iterate"]

logger = logging.getLogger(__name__)

# The key of the token of a lease in the metadata of its samples.
TOKEN = "ledger_token"
PROMPTS = range(1 << 62)


def iterate(group: list[Any]) -> Iterator[Any]:
    """Yield the samples of a group, whose trajectories may be lists of samples."""
    for item in group:
        yield from item if isinstance(item, list) else (item,)


class LedgerSource:
    """Give out the prompts of a dataset by their id, and save which of them are open.

    Each sample has the token of its lease in its `metadata`, so that a group that comes back late is distinguished
    from the one that has replaced it.

    Args:
        args: the arguments of the framework.
        reader: the framework's own data source, of which only the dataset is used.
        sample: the framework's class of samples.
        config: the settings of the ledger, except for the sizes that the arguments have.

    Attributes:
        ledger: the ledger; the prompt id of a group is its `group_index`.
        dataset: the dataset.
        lock: is held while the ledger is used or replaced.
    """

    def __init__(self, args: Any, reader: Any, sample: Any, **config: Any) -> None:
        self._args, self._reader, self._sample = args, reader, sample
        self._interval: int = getattr(args, "update_weights_interval", 1)
        self._missing: str | None = getattr(args, "ledger_missing", None)
        if self._missing not in (None, "restart", "epoch"):
            raise ValueError(f"ledger_missing is {self._missing!r}; it must be 'restart' or 'epoch', or left out.")
        self._config = LedgerConfig(
            group_size=args.n_samples_per_prompt, groups_per_version=args.rollout_batch_size * self._interval, **config
        )
        self.ledger = Ledger(self._config, PROMPTS)
        self._leases: dict[int, Lease] = {}
        self._returned: dict[int, tuple[list[Any], int]] = {}
        # The worker of a framework asks from a thread of its own.
        self.lock = threading.RLock()

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
            return [self._make_group(lease) for lease in leases]

    def _make_group(self, lease: Lease) -> list[Any]:
        group, start_version = self._returned.pop(lease.prompt_id, ([], lease.start_version))
        group = group or self._read_group(lease.prompt_id)
        # A group that was taken back continues tokens of older weights.
        self._leases[lease.token] = replace(lease, start_version=min(start_version, lease.start_version))
        for sample in iterate(group):
            sample.metadata = {**(sample.metadata or {}), TOKEN: lease.token}
        return group

    def _read_group(self, prompt_id: int) -> list[Any]:
        dataset, size = self.dataset, self._config.group_size
        if dataset is None:
            prompt = self._sample()
        else:
            epoch, place = divmod(prompt_id, len(dataset))
            if self._args.rollout_shuffle:
                dataset.shuffle(epoch)
            prompt = dataset.samples[place]
        group = [copy.deepcopy(prompt) for _ in range(size)]
        for number, sample in enumerate(group):
            sample.group_index, sample.index = prompt_id, prompt_id * size + number
        return group

    def end(self, group: list[Any]) -> Lease | None:
        """Return the lease under which a group was given out, once. It may have expired."""
        for sample in iterate(group):
            token = (getattr(sample, "metadata", None) or {}).get(TOKEN)
            if token is not None:
                return self._leases.pop(token, None)
        # A generate function has made samples without the metadata of its input.
        prompt_id = next(iterate(group)).group_index
        tokens = [token for token, lease in self._leases.items() if lease.prompt_id == prompt_id]
        return self._leases.pop(tokens[0]) if len(tokens) == 1 else None

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take back aborted groups. They are given out again, with what has been generated."""
        with self.lock:
            for group in samples:
                lease = self.end(group)
                if lease is not None and self.ledger.cancel(lease):
                    self._returned[lease.prompt_id] = group, lease.start_version

    def save(self, rollout_id: int) -> None:
        """Write the ledger's snapshot beside the checkpoint of a rollout, which the framework has saved before."""
        with self.lock:
            folder = self._find_folder(self._args.save, rollout_id)
            folder.mkdir(parents=True, exist_ok=True)
            self.ledger.prepare(rollout_id + 1, folder)
            self.ledger.commit(rollout_id + 1)

    def save_claims(self) -> None:
        """Write the claims to the disk, so that a checkpoint of the model that follows is covered by the file."""
        try:
            self.ledger.flush()
        except SnapshotError as error:
            logger.warning("%s A crash before the next checkpoint is complete needs ledger_missing.", error)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue after the checkpoint of a rollout. Groups that it does not cover are generated again.

        Without a snapshot of this rollout, the file that the last process has written between the checkpoints is used.

        Raises:
            SnapshotError: Neither covers the rollout, and `ledger_missing` is not set. The framework's own data source
                would begin at prompt 0.
        """
        with self.lock:
            self.ledger.close()
            self._leases, self._returned = {}, {}
            file = None if self._args.save is None else self._find_file(self._args.save)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            if self._args.load is None or rollout_id is None or rollout_id < 0:
                self.ledger = Ledger(self._config, PROMPTS, file=file)
                return
            numbers: dict[str, Any] = {"step": rollout_id + 1, "version": (rollout_id + 1) // self._interval}
            snapshot, last_file = self._find_folder(self._args.load, rollout_id), self._find_file(self._args.load)
            if last_file.exists() and not Path(snapshot, NAME).exists():
                snapshot = last_file
            try:
                self.ledger = Ledger.restore(self._config, PROMPTS, directory=snapshot, file=file, **numbers)
            except SnapshotError as error:
                if self._missing is None:
                    remedy = (
                        "Set ledger_missing to 'restart' (at prompt 0) or 'epoch' (at the next epoch) to begin anyway."
                    )
                    raise SnapshotError(error.path, error.found, remedy) from error
                prompt_id = 0 if self._missing == "restart" else self._find_epoch(rollout_id + 1)
                logger.warning("%s The ledger begins at prompt %d.", error, prompt_id)
                self.ledger = Ledger.begin(self._config, PROMPTS, prompt_id=prompt_id, file=file, **numbers)

    def _find_epoch(self, step: int) -> int:
        """Return the first prompt of the first epoch that the steps until now have not begun."""
        used: int = step * self._args.rollout_batch_size
        size = used if self.dataset is None else len(self.dataset)
        return -(-used // size) * size

    @staticmethod
    def _find_folder(root: str, rollout_id: int) -> Path:
        return Path(root, "rollout", f"ledger_{rollout_id}")

    @staticmethod
    def _find_file(root: str) -> Path:
        return Path(root, "rollout", NAME)

    def get_buffer_length(self) -> int:
        """Return the number of groups that were taken back."""
        return len(self._returned)

    def __len__(self) -> int:
        return len(self._reader)
