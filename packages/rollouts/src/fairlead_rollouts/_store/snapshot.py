# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a ledger: one file in the checkpoint's directory, which exists as a whole or not at all."""

import hashlib
import json
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._book import Book
from .._settled import SettledOrdinals
from ..exceptions import SnapshotError
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

__all__ = [
    "NAME",
    "Snapshot",
    "pack_snapshot",
    "read_snapshot",
    "take_snapshot",
    "unpack_snapshot",
    "write_file",
    "write_snapshot",
]

NAME = "rollouts.ledger"
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger after a step, as a later process restores it."""

    ledger: str  # the id that all runs of the job share
    runs: tuple[int, ...]  # those that have led to this one, and its own
    step: int  # the last step that counts as applied
    version: int
    group_size: int
    next: int  # the first ordinal that was unseen
    settled: SettledOrdinals
    consumed: dict[int, int]  # the groups that these steps took from the current version or later ones
    source: bytes
    prompts: dict[int, tuple[int, Any]]  # the attempt and the prompt of each open group
    samples: list[StoredSample]


def take_snapshot(book: Book, ledger: str, runs: tuple[int, ...], step: int, source: bytes) -> Snapshot:
    """Return the state of a ledger as of a step: later claims are open."""
    settled = replace(
        book.settled,
        settled_bits=bytearray(book.settled.settled_bits),
        dropped_bits=bytearray(book.settled.dropped_bits),
    )
    consumed = Counter(book.consumed)
    records = []
    for record in book.records.values():
        if record.step is not None and record.step <= step:
            settled.add(record.ordinal, dropped=False)
            continue
        records.append(record)
        if record.step is not None:
            consumed[record.version] -= 1
    samples = [
        store_sample(record.ordinal, sample)
        for record in records
        for sample in record.samples.values()
        if sample.ref.durable
    ]
    prompts = {record.ordinal: (record.attempt, record.prompt) for record in records}
    size = book.config.group_size
    return Snapshot(ledger, runs, step, book.version, size, book.next, settled, +consumed, source, prompts, samples)


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """Return a snapshot as a database with its checksum."""
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES)
    settled = snapshot.settled
    meta = {name: getattr(snapshot, name) for name in ("ledger", "step", "version", "group_size", "next", "source")}
    lists = {"consumed": json.dumps(list(snapshot.consumed.items())), "runs": json.dumps(snapshot.runs)}
    write_meta(database, {**meta, **lists, "schema": SCHEMA})
    counts = {name: getattr(settled, name) for name in ("frontier", "applied", "dropped")}
    write_meta(database, {**counts, "settled_bits": settled.settled_bits, "dropped_bits": settled.dropped_bits})
    prompts = ((ordinal, attempt, json.dumps(prompt)) for ordinal, (attempt, prompt) in snapshot.prompts.items())
    insert(database, prompts, snapshot.samples)
    database.commit()
    content = database.serialize()
    database.close()
    return content + hashlib.sha256(content).digest()


def write_snapshot(directory: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot into a directory, and return its path."""
    path = directory / NAME
    write_file(path, pack_snapshot(snapshot))
    return path


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Windows has no such call and does not need it."""
    if os.name == "posix":
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read_snapshot(directory: Path) -> Snapshot:
    """Read the snapshot of a checkpoint.

    Raises:
        SnapshotError: The file is missing or damaged, or another version of this package has written it.
    """
    path = directory / NAME if directory.is_dir() else directory
    try:
        content = path.read_bytes()
    except OSError as error:
        remedy = "Restore from a checkpoint that has one, or make a new Ledger to begin at prompt 0."
        raise SnapshotError(str(path), f"it cannot be read: {error.strerror}", remedy) from None
    return unpack_snapshot(content, path)


def unpack_snapshot(content: bytes, path: Path) -> Snapshot:
    """Return the snapshot that was packed. Errors name `path`, the file that it is from."""
    content, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise SnapshotError(str(path), "its checksum is wrong, so it is damaged", "Restore from an older checkpoint.")
    database = sqlite3.connect(":memory:")
    database.deserialize(content)
    meta = read_meta(database)
    if meta["schema"] != SCHEMA:
        found = f"it has schema {meta['schema']}, and this version of fairlead-rollouts reads schema {SCHEMA}"
        raise SnapshotError(str(path), found, "Install the version that wrote it.")
    settled = SettledOrdinals(meta["frontier"], meta["applied"], meta["dropped"])
    settled.settled_bits, settled.dropped_bits = bytearray(meta["settled_bits"]), bytearray(meta["dropped_bits"])
    return Snapshot(
        **{name: meta[name] for name in ("ledger", "step", "version", "group_size", "next", "source")},
        runs=read_runs(meta),
        settled=settled,
        consumed=dict(json.loads(meta["consumed"])),
        prompts=read_prompts(database),
        samples=read_samples(database),
    )
