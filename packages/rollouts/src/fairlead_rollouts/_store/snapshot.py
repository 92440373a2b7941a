# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a ledger: one file, which exists as a whole or not at all."""

import base64
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._book import Book
from .._model import Ref, Sample
from .._settled import SettledPrompts
from ..exceptions import SnapshotError

__all__ = ["NAME", "Snapshot", "StoredGroup", "read_snapshot", "take_snapshot", "write_snapshot"]

NAME = "rollouts.ledger"
SCHEMA = 2
# Groups in each line of the file. `json.dumps` stops all threads, so each call of it is short.
PIECE = 64
DIGEST_BYTES = 65  # of the last line
# A prompt id, its attempt, its prompt, the step that has claimed it or None, and its samples.
StoredGroup = tuple[int, int, Any, int | None, tuple[Sample, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger at some moment, as a later process restores it."""

    ledger: str  # the id that all runs of the job share
    runs: list[int]  # those that have led to this one, and its own
    step: int | None  # the step of the checkpoint that it belongs to; None for the file beside the checkpoints
    version: int
    group_size: int
    next: int  # the first prompt that was unseen
    last_applied: int | None
    last_step: int | None  # the last step that was claimed or trained
    steps: list[tuple[int, int, int]]  # the version and the places of each step that may still count
    drops: list[tuple[int, int, Any, int]]  # see `Book.drops`
    source: bytes
    settled: SettledPrompts
    groups: list[StoredGroup]

    def covers(self, step: int) -> bool:
        """Return whether the state after a step can be derived."""
        if self.step is not None:
            return self.step == step
        return (-1 if self.last_applied is None else self.last_applied) <= step <= (self.last_step or 0)


# The members that are written as they are.
LISTS = ("runs", "steps", "drops")
HEADER = ("ledger", "step", "version", "group_size", "next", "last_applied", "last_step", *LISTS)


def take_snapshot(book: Book, ledger: str, runs: list[int], step: int | None, source: bytes) -> Snapshot:
    """Return a copy of the state of a ledger, whose lock the caller holds."""
    last_steps = [number for number in (*book.steps, book.last_trained) if number is not None]
    return Snapshot(
        ledger=ledger,
        runs=runs,
        step=step,
        version=book.version,
        group_size=book.config.group_size,
        next=book.next,
        last_applied=book.last_applied,
        last_step=max(last_steps, default=None),
        steps=[(number, claim.version, claim.places) for number, claim in book.steps.items()],
        drops=[(prompt_id, *drop) for prompt_id, drop in book.drops.items()],
        source=source,
        settled=book.settled.copy(),
        groups=[
            (record.prompt_id, record.attempt, record.prompt, record.step, tuple(record.samples.values()))
            for record in book.records.values()
        ],
    )


def _encode(snapshot: Snapshot) -> Iterator[bytes]:
    """Yield the lines of the file, but for the last one, which is the checksum of the others."""
    settled = snapshot.settled
    header = {"schema": SCHEMA} | {name: getattr(snapshot, name) for name in HEADER}
    header |= {name: getattr(settled, name) for name in ("frontier", "applied", "dropped")}
    for name, content in (
        ("settled_bits", zlib.compress(settled.settled_bits, 1)),
        ("dropped_bits", zlib.compress(settled.dropped_bits, 1)),
        ("source", snapshot.source),
    ):
        header[name] = base64.b64encode(content).decode()
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
        with open(temporary, "wb") as file:
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
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise SnapshotError(
            str(path), f"its content is not that of a snapshot: {error!r}", "Restore from an older checkpoint."
        ) from error


def _decode(lines: list[bytes], path: Path) -> Snapshot:
    header = json.loads(lines[0])
    if header["schema"] != SCHEMA:
        found = f"it has schema {header['schema']}, and this version of fairlead-rollouts reads schema {SCHEMA}"
        raise SnapshotError(str(path), found, "Install the version that wrote it.")
    settled = SettledPrompts(header["frontier"], header["applied"], header["dropped"])
    settled.settled_bits = bytearray(zlib.decompress(base64.b64decode(header["settled_bits"])))
    settled.dropped_bits = bytearray(zlib.decompress(base64.b64decode(header["dropped_bits"])))
    values: dict[str, Any] = {name: list(header[name]) if name in LISTS else header[name] for name in HEADER}
    return Snapshot(
        **values,
        source=base64.b64decode(header["source"]),
        settled=settled,
        groups=[_load(row) for line in lines[1:] for row in json.loads(line)],
    )


def _load(row: list[Any]) -> StoredGroup:
    prompt_id, attempt, prompt, step, rows = row
    samples = [Sample(index, Ref(value, durable=True), oldest, newest) for index, oldest, newest, value in rows]
    return prompt_id, attempt, prompt, step, tuple(samples)
