# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a ledger: one file, which exists as a whole or not at all."""

import base64
import hashlib
import json
import os
import threading
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._model import Ref, Sample
from .exceptions import SnapshotError

__all__ = ["NAME", "Snapshot", "choose_snapshot", "read_snapshot", "set_aside", "write_snapshot"]

NAME = "rollouts.ledger"
SCHEMA = 3
# Groups in each line of the file. `json.dumps` stops all threads, so each call of it is short.
PIECE = 64
DIGEST_BYTES = 65  # of the last line
# A prompt id, its attempt, its prompt, the step that has claimed it or None, and its samples.
StoredGroup = tuple[int, int, Any, int | None, tuple[Sample, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger at some moment, as a later process restores it."""

    runs: list[int]  # the processes that have led to this one, and its own
    step: int | None  # the step of the checkpoint that it belongs to; None for the file beside the checkpoints
    version: int
    group_size: int
    last_applied: int | None
    last_step: int | None  # the last step that was claimed or trained
    steps: list[tuple[int, int, int]]  # the version and the places of each step that may still count
    drops: list[tuple[int, int, Any, int]]  # see `Book.drops`
    source: bytes
    fates: bytes  # see `Book.fates`
    groups: list[StoredGroup]

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last step after which the state can be derived."""
        if self.step is not None:
            return self.step, self.step
        return -1 if self.last_applied is None else self.last_applied, self.last_step or 0

    def covers(self, step: int) -> bool:
        """Return whether the state after a step can be derived."""
        first, last = self.bounds
        return first <= step <= last


# The members that are written as they are.
HEADER = ("runs", "step", "version", "group_size", "last_applied", "last_step", "steps", "drops")


def _encode(snapshot: Snapshot) -> Iterator[bytes]:
    """Yield the lines of the file, but for the last one, which is the checksum of the others."""
    header = {"schema": SCHEMA} | {name: getattr(snapshot, name) for name in HEADER}
    header["source"] = base64.b64encode(snapshot.source).decode()
    header["fates"] = base64.b64encode(zlib.compress(snapshot.fates, 1)).decode()
    yield json.dumps(header).encode() + b"\n"
    for first in range(0, len(snapshot.groups), PIECE):
        rows = [
            (
                *group,
                [
                    (sample.index, sample.oldest_version, sample.newest_version, sample.ref.value)
                    for sample in samples
                    if sample.ref.durable
                ],
            )
            for *group, samples in snapshot.groups[first : first + PIECE]
        ]
        yield json.dumps(rows).encode() + b"\n"


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot so that a crash leaves all of it, or the file that was there before.

    Raises:
        SnapshotError: The disk is full, for example. The file that was there before is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    digest = hashlib.sha256()
    try:
        # Each write hands the interpreter to other threads, and waits for it again: so few, large ones.
        with open(temporary, "wb", buffering=2**20) as file:
            for line in _encode(snapshot):
                digest.update(line)
                file.write(line)
            file.write(digest.hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        remedy = "Make room on its disk, or use a folder that exists and that this user may write."
        raise SnapshotError(str(path), f"it cannot be written: {error.strerror}", remedy) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Windows has no such call and does not need it."""
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot: a file, or the one in the directory of a checkpoint.

    Raises:
        SnapshotError: The file is missing or damaged, or another version of this package has written it.
    """
    path = path / NAME if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        remedy = "Restore from a checkpoint that has one, or make a new Ledger to begin at prompt 0."
        raise SnapshotError(str(path), f"it cannot be read: {error.strerror}", remedy) from None
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if f"{hashlib.sha256(body).hexdigest()}\n".encode() != digest:
        raise SnapshotError(str(path), "its checksum is wrong, so it is damaged", "Restore from an older checkpoint.")
    try:
        return _decode(body.splitlines(), path)
    except (LookupError, RecursionError, TypeError, ValueError, zlib.error) as error:
        problem = f"its content is not that of a snapshot: {error!r}"
        raise SnapshotError(str(path), problem, "Restore from an older checkpoint.") from error


def _decode(lines: list[bytes], path: Path) -> Snapshot:
    header = json.loads(lines[0])
    if header["schema"] != SCHEMA:
        problem = f"it has schema {header['schema']}, and this version of fairlead-rollouts reads schema {SCHEMA}"
        raise SnapshotError(str(path), problem, "Install the version that wrote it.")
    return Snapshot(
        **{name: header[name] for name in HEADER},
        source=base64.b64decode(header["source"]),
        fates=zlib.decompress(base64.b64decode(header["fates"])),
        groups=[_load(row) for line in lines[1:] for row in json.loads(line)],
    )


def _load(row: list[Any]) -> StoredGroup:
    prompt_id, attempt, prompt, step, rows = row
    samples = [Sample(index, Ref(value, durable=True), oldest, newest) for index, oldest, newest, value in rows]
    return prompt_id, attempt, prompt, step, tuple(samples)


def choose_snapshot(file: Path | None, directory: Path | None, step: int, group_size: int) -> Snapshot:
    """Return the newest snapshot from which the state after a step can be derived.

    A file that continues the checkpoint knows what has finished since then. Another file is set aside.
    """
    path = directory or file
    assert path is not None
    saved = read_snapshot(path)
    if directory is not None and file is not None and file.exists():
        try:
            newest = read_snapshot(file)
        except SnapshotError:
            newest = None
        if newest is None or newest.runs[: len(saved.runs)] != saved.runs:
            set_aside(file)
        elif newest.covers(step):
            saved, path = newest, file
    first, last = max(0, saved.bounds[0]), saved.bounds[1]
    if not saved.covers(step):
        steps = str(first) if first == last else f"from {first} to {last}"
        raise SnapshotError(str(path), f"its step is {steps}, not {step}", f"Pass step={last}, or another checkpoint.")
    if saved.group_size != group_size:
        remedy = f"Pass group_size={saved.group_size}, or the directory of another checkpoint."
        raise SnapshotError(str(path), f"its group_size is {saved.group_size}, not {group_size}", remedy)
    return saved


def set_aside(file: Path) -> None:
    """Rename a file that a new ledger would overwrite."""
    aside = file.with_name(f"{file.name}.aside")
    os.replace(file, aside)
    warnings.warn(
        f"The file {str(file)!r} was renamed to {aside.name!r}: it does not continue this ledger.", stacklevel=2
    )
