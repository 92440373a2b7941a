# SPDX-License-Identifier: Apache-2.0
"""The ledger: every transition of every group, without a clock."""

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from ._book import APPLIED
from ._callbacks import Callbacks, changes
from ._file import SnapshotFile
from ._model import LedgerConfig, Ref
from ._snapshot import NAME, Snapshot, choose_snapshot, set_aside, write_snapshot
from ._sources import PromptSource
from ._statistics import Statistics, count, explain_group, explain_ledger
from ._transitions import Transitions

__all__ = ["Ledger"]

PathLike = str | os.PathLike[str]


class Ledger(Transitions):
    """Record who generates every prompt, with which weights, and which step trained on it.

    It has no clock, and every method is deterministic in its arguments. Methods that refuse a call change nothing. Any
    thread may call it. An exception of `on_release` is logged, and raised at the next `flush`.

    With a `file` the ledger keeps its state on a disk, so that a crash between two checkpoints does not generate
    durable samples again. The file is written in the background at most once a second if something has changed, and at
    each `advance` and `prepare`. A crash costs at most the samples that finished within the last second, or within 20
    times the processor time that a snapshot takes if that is longer. Durable payloads are released after the file no
    longer lists them. One process uses a file at a time, and none that it forks.

    Args:
        config: the group size, the bound on staleness and the other settings of the ledger.
        source: where prompts come from, or a sequence of them.
        file: a file for the state between checkpoints; None for none.
        checkpoints: whether trained groups wait for `commit`. Without, they are applied when they are trained.
        on_release: called once with each reference that is no longer needed, and the reason.
    """

    def __init__(
        self,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any],
        *,
        file: PathLike | None = None,
        checkpoints: bool = True,
        on_release: Callable[[Ref, str], object] | None = None,
    ) -> None:
        # The tokens of a process begin with these bits, which no other process of the job shares.
        run = random.SystemRandom().getrandbits(48)
        super().__init__(config, source, Callbacks(on_release), run, checkpoints)
        self._runs = [run]
        self._file: SnapshotFile | None = None
        if file is not None:
            self._use(SnapshotFile(Path(file)), new=True)

    def _use(self, file: SnapshotFile, *, new: bool = False) -> None:
        """Write the state to a file, and every change from now on. What a new ledger would overwrite is set aside."""
        if new and file.path.exists():
            set_aside(file.path)
        self._file = self._book.callbacks.file = file
        try:
            file.begin(lambda: self._take_snapshot(None), self._lock)
        except BaseException:
            file.close()
            raise

    def _take_snapshot(self, step: int | None) -> Snapshot:
        return self._book.take_snapshot(self._runs, step, self._source.state())

    # Checkpoints.

    def prepare(self, step: int, directory: PathLike) -> Path:
        """Write a snapshot into the directory of the trainer's checkpoint, before the checkpoint is complete.

        The snapshot counts the claims of steps up to `step` as applied, and everything else as open.

        Args:
            step: the last step that the checkpoint contains.
            directory: of the checkpoint. It must exist.

        Returns:
            The file, which has been synced.

        Raises:
            SnapshotError: The disk is full, for example. The ledger goes on, and the call can be repeated.
        """
        book = self._book
        if not Path(directory).is_dir():
            raise ValueError(f"directory is {str(directory)!r}, which is no directory. Make the checkpoint's first.")
        with self._lock:
            if book.last_applied is not None and step < book.last_applied:
                raise ValueError(f"step is {step}, and step {book.last_applied} has been committed. Prepare a later.")
            snapshot = self._take_snapshot(step)
            book.prepare(step)
        path = Path(directory, NAME)
        write_snapshot(path, snapshot)
        self._save()
        return path

    @changes
    def commit(self, step: int) -> None:
        """Report that the checkpoint of a prepared step is durable: its groups are applied for good.

        It does nothing if a later step has been committed, as when checkpoints are completed out of order.
        """
        book = self._book
        if book.last_applied is not None and step <= book.last_applied:
            return
        if step not in book.prepared:
            prepared = sorted(book.prepared)
            raise ValueError(f"step is {step}, and steps {prepared} are prepared. Call prepare() first.")
        book.train(step)
        book.apply(step)
        book.callbacks.changed = True

    def flush(self) -> None:
        """Write the file, if there is one, and return when it is on the disk and releases that waited for it are made.

        Raises:
            SnapshotError: The file cannot be written now.
            Exception: the first error of `on_release` since the last call, which has been logged.
        """
        self._save()
        callbacks = self._book.callbacks
        if callbacks.errors:
            error, callbacks.errors = callbacks.errors[0], []
            raise error

    def _save(self) -> None:
        if self._file is not None:
            self._file.save()
        self._call_back()

    @changes
    def _call_back(self) -> None:
        """Make the calls that are due, such as releases that waited for the file."""

    def close(self) -> None:
        """Write the last changes to the file and unlock it. A ledger without a file needs no `close`."""
        if self._file is not None:
            self._file.close()
            self._call_back()

    @classmethod
    def begin(
        cls,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any],
        *,
        step: int,
        version: int,
        prompt_id: int = 0,
        file: PathLike | None = None,
        **options: Any,
    ) -> Self:
        """Return a ledger for a job that has trained some steps without one.

        Args:
            config: the group size, the bound on staleness and the other settings of the ledger.
            source: where prompts come from.
            step: the last step that was trained.
            version: the version of its weights.
            prompt_id: the first prompt to generate. Those before it count as applied.
            file: as for a new ledger.
            options: as for a new ledger.
        """
        ledger = cls(config, source, **options)
        book = ledger._book
        book.version, book.last_trained, book.last_applied = version, step, step
        book.fates = bytearray([APPLIED]) * prompt_id
        ledger._source.restore(b"", prompt_id)
        if file is not None:
            ledger._use(SnapshotFile(Path(file)), new=True)
        return ledger

    @classmethod
    def restore(
        cls,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any],
        *,
        step: int,
        version: int,
        directory: PathLike | None = None,
        file: PathLike | None = None,
        exists: Callable[[Ref], bool] | None = None,
        **options: Any,
    ) -> Self:
        """Return a ledger that continues after a checkpoint.

        Applied groups stay so, and groups that were dropped before the checkpoint. Every other group is open again. A
        durable sample is kept if its weights exist in the checkpoint: versions after `version` are lost, and their
        numbers will mean other weights.

        Args:
            config: the settings of the ledger; `group_size` must be as before.
            source: the same source as before. Its state is restored.
            step: the last step that the checkpoint contains.
            version: the version of its weights.
            directory: of the checkpoint, or the path of a snapshot. None for the file alone, which has the last step
                that was committed, and those after it.
            file: that of the process that ended, or a new one. It is read if it continues the checkpoint.
            exists: tells whether a durable payload can still be read. Without a file it is needed if payloads are
                deleted when they are released, because the snapshot may list some of them.
            options: as for a new ledger.

        Raises:
            SnapshotError: The snapshot is missing or damaged, or it is of another step or group size.
        """
        if directory is None and file is None:
            raise ValueError("restore() needs the directory of the checkpoint, or the file of the process that ended.")
        opened = None if file is None else SnapshotFile(Path(file))
        try:
            path = None if directory is None else Path(directory)
            saved = choose_snapshot(opened.path if opened else None, path, step, config.group_size)
            ledger = cls(config, source, **options)
            ledger._book.callbacks.file = opened  # payloads that it lists are released after it is written again
            ledger._runs = [*saved.runs, *ledger._runs]
            ledger._book.restore(saved, step=step, version=version, exists=exists)
            ledger._source.restore(saved.source, len(saved.fates))
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        if opened is not None:
            ledger._use(opened)
        ledger._call_back()
        return ledger

    # For people.

    def explain(self, prompt_id: int) -> str:
        """Return what the ledger knows of a group, in a sentence or two."""
        return explain_group(self._book, prompt_id, self.state(prompt_id))

    def statistics(self) -> Statistics:
        """Return the state of the ledger in numbers."""
        with self._lock:
            return count(self._book)

    def show(self) -> None:
        """Print the groups in each state, the staleness of claims and the three oldest groups."""
        with self._lock:
            text = explain_ledger(self._book, count(self._book))
        sys.stdout.write(f"{text}\n")
