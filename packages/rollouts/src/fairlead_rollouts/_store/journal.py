# SPDX-License-Identifier: Apache-2.0
"""The journal: the durable samples of open groups in a SQLite file, so that a crash does not regenerate them."""

import ctypes
import json
import os
import socket
import sqlite3
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from .._model import Sample
from .._record import Record
from ..exceptions import JournalError, JournalLockedError, SnapshotError
from .schema import (
    SCHEMA,
    TABLES,
    StoredSample,
    insert,
    read_meta,
    read_prompts,
    read_runs,
    read_samples,
    store_sample,
    write_meta,
)
from .snapshot import Snapshot, pack_snapshot, unpack_snapshot

__all__ = ["Journal", "read_steps"]

BUFFERED_ROWS = 256
# What SQLite says of a file that is no journal. Anything else is the machine's fault, and the file may be whole.
DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
# SQLite often says no more than "disk I/O error".
REMEDY = "Make room on its disk, or use a path on a local disk, in a folder that exists, which this user may write."
STEPS = "create table if not exists step (step integer primary key, snapshot blob not null);"


def leave_to_parent() -> None:
    """Let nothing in a forked process close a journal, not even the end of the process."""
    for journal in journals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(journal._connection))  # noqa: SLF001  of this module


journals: weakref.WeakSet["Journal"] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=leave_to_parent)


def read_steps(database: sqlite3.Connection) -> list[int]:
    """Return the steps whose snapshots a journal holds, in ascending order."""
    return [step for (step,) in database.execute("select step from step order by step")]


class Journal:
    """Keep durable samples on a local disk between checkpoints.

    A ledger works without a journal: then a restart generates every sample again that the checkpoint does not list.
    One process uses a journal at a time, and none that it forks. A damaged file, that of another job, or one that the
    process of the checkpoint has not used is moved aside with a warning. If the disk is full, `seal`, `flush`,
    `prepare` and, with `keep_steps`, `advance` and `commit` raise `JournalError`, and can be called again. Until then
    rows stay in memory, and no durable payload is released. A ledger calls the methods that take its records; you call
    `flush` and `close`.

    Args:
        path: a file on a local disk. Its write-ahead log stands beside it.
        keep_steps: for how many of the last trained steps the journal keeps a snapshot. With 2 or more, `restore` needs
            no directory. That is for a trainer whose checkpoints cannot hold the snapshot: report each step with
            `advance` before you save it.

    Attributes:
        kept_step: the last step whose snapshot this process has kept; None without one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Journal(f"{folder}/journal") as journal:
    ...     config = LedgerConfig(group_size=1, groups_per_version=1, max_staleness=0)
    ...     ledger = Ledger(config, ["a"], journal=journal)
    ...     ledger.seal(ledger.lease(1)[0], 0, Ref("store/a", durable=True))
    True
    """

    def __init__(self, path: str | Path, *, keep_steps: int = 0) -> None:
        if keep_steps < 0:
            raise ValueError(f"keep_steps is {keep_steps}; it must be at least 0.")
        self._path = Path(path)
        self.keep_steps = keep_steps
        self.kept_step: int | None = None
        self._pid = os.getpid()
        self._connection = self._open()
        # SQLite in a forked process would take the file for its own, and remove the log that this process writes.
        journals.add(self)
        self._changed: dict[tuple[int, int], StoredSample | None] = {}
        self._prompts: dict[int, tuple[int, int, str] | None] = {}
        self._known: set[int] = set()

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def _database(self) -> sqlite3.Connection:
        if self._pid != os.getpid():
            raise JournalLockedError(str(self._path), f"process {self._pid}, which has forked this one")
        return self._connection

    def _open(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        except sqlite3.OperationalError as error:
            raise self._error("opened", error) from None
        holder = self._path.with_name(self._path.name + ".holder")
        try:
            # In this order no file for shared memory is made, and another process is refused immediately.
            for pragma in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = full"):
                database.execute(f"pragma {pragma}")
            database.executescript(f"begin exclusive; {TABLES} {STEPS} commit;")
            if database.execute("pragma quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            read_prompts(database), read_samples(database), read_meta(database)
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            database.close()
            raise self._error("opened", error) from None
        except (sqlite3.DatabaseError, ValueError) as error:
            database.close()
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                known = holder.read_text().strip() if holder.exists() else "an unknown process"
                raise JournalLockedError(str(self._path), known) from None
            if code not in DAMAGES:
                raise self._error("opened", error) from None
            self._move_aside(f"it is damaged ({error})")
            return self._open()
        return database

    def _error(self, what: str, error: Exception) -> JournalError:
        return JournalError(str(self._path), f"{what}: {error}", REMEDY)

    def _move_aside(self, reason: str) -> None:
        aside = next(
            name
            for number in range(1, 1 << 30)
            if not (name := self._path.with_name(f"{self._path.name}.aside-{number}")).exists()
        )
        os.replace(self._path, aside)
        self._path.with_name(self._path.name + "-wal").unlink(missing_ok=True)
        warnings.warn(f"The journal {str(self._path)!r} was moved to {aside.name!r}: {reason}.", stacklevel=2)

    def load(
        self, ledger: str, runs: tuple[int, ...]
    ) -> tuple[dict[int, tuple[int, object]], list[StoredSample]] | None:
        """Return the prompts and samples of a ledger after these runs; None if the journal holds none of it."""
        meta = read_meta(self._database)
        found = meta.get("ledger")
        if found is None:
            return None
        if found != ledger:
            reason = f"it belongs to the ledger {found}, not to {ledger}"
        elif read_runs(meta)[: len(runs)] != runs:
            # Its samples may be of weights that another branch of the job has replaced.
            reason = "the process that wrote the checkpoint has not used it"
        else:
            return read_prompts(self._database), read_samples(self._database)
        self._database.close()
        self._move_aside(reason)
        self._connection = self._open()
        return None

    def reset(self, ledger: str, runs: tuple[int, ...], records: Iterable[Record], last_step: int) -> None:
        """Replace the content by what a ledger holds now, and forget the snapshots of steps after `last_step`."""
        self._changed, self._prompts, self._known = {}, {}, set()
        for record in records:
            self.put(record, record.samples.values())
        with self._transaction() as database:
            database.execute("delete from sample")
            database.execute("delete from prompt")
            database.execute("delete from step where step > ?", (last_step,))
            write_meta(database, {"schema": SCHEMA, "ledger": ledger, "runs": json.dumps(runs)})

    def put(self, record: Record, samples: Iterable[Sample]) -> None:
        """Store the durable ones among the samples of a group, with the next flush."""
        for sample in samples:
            if not sample.ref.durable:
                continue
            if record.ordinal not in self._known:
                self._known.add(record.ordinal)
                self._prompts[record.ordinal] = record.ordinal, record.attempt, json.dumps(record.prompt)
            self._changed[record.ordinal, sample.sibling] = store_sample(record.ordinal, sample)

    def make_room(self) -> None:
        """Flush if many samples wait, before a ledger changes anything."""
        if len(self._changed) >= BUFFERED_ROWS:
            self.flush()

    def remove(self, ordinal: int, sibling: int) -> None:
        """Remove a sample, with the next flush."""
        if ordinal in self._known:
            self._changed[ordinal, sibling] = None

    def settle(self, ordinal: int) -> None:
        """Remove the prompt and the samples of a group that is settled, with the next flush."""
        if ordinal in self._known:
            self._known.discard(ordinal)
            self._prompts[ordinal] = None

    def keep(self, snapshot: Snapshot) -> None:
        """Keep the snapshot of a trained step, and forget those before the last `keep_steps`."""
        row = snapshot.step, pack_snapshot(snapshot)
        oldest = "select step from step order by step desc limit 1 offset ?"
        with self._transaction() as database:
            database.execute("insert or replace into step values (?, ?)", row)
            database.execute(f"delete from step where step < ({oldest})", (self.keep_steps - 1,))
        self.kept_step = snapshot.step

    def read_step(self, step: int) -> Snapshot:
        """Return the snapshot of a trained step.

        Raises:
            SnapshotError: The journal does not hold it.
        """
        row = self._database.execute("select snapshot from step where step = ?", (step,)).fetchone()
        if row is None:
            steps = read_steps(self._database)
            held = f"the journal holds steps {', '.join(map(str, steps))}" if steps else "the journal holds none"
            remedy = "Pass a step that it holds" if steps else "Make the journal with keep_steps"
            raise SnapshotError(
                str(self._path), f"there is no snapshot of step {step}; {held}", f"{remedy}, or the directory."
            )
        return unpack_snapshot(row[0], self._path)

    def flush(self) -> None:
        """Write everything that was stored or removed, in one transaction that survives a power cut.

        Raises:
            JournalError: The disk is full, for example. Nothing was written, and the next flush tries again.
        """
        if self._changed or self._prompts:
            with self._transaction():
                pass

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Write what the caller and the buffers hold, or nothing."""
        database = self._database
        removed = [key for key, row in self._changed.items() if row is None]
        settled = {ordinal for ordinal, row in self._prompts.items() if row is None}
        samples = [row for row in self._changed.values() if row is not None and row[0] not in settled]
        try:
            database.execute("begin")
            yield database
            database.executemany("delete from sample where ordinal = ? and sibling = ?", removed)
            insert(database, [row for row in self._prompts.values() if row is not None], samples)
            for table in ("sample", "prompt"):
                database.executemany(f"delete from {table} where ordinal = ?", [(one,) for one in settled])
            database.execute("commit")
        except sqlite3.OperationalError as error:
            raise self._error("written", error) from None
        finally:
            if database.in_transaction:  # most errors end it, and Ctrl-C does not
                database.execute("rollback")
        self._changed, self._prompts = {}, {}

    def close(self) -> None:
        """Flush and release the file. It can be repeated, and does nothing in a forked process."""
        if self._pid == os.getpid():
            self.flush()
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
