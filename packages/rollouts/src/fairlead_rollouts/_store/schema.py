# SPDX-License-Identifier: Apache-2.0
"""The tables of snapshots and journals, and the conversion between rows and values."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from .._model import Ref, Sample

__all__ = [
    "SCHEMA",
    "TABLES",
    "StoredSample",
    "insert",
    "load_sample",
    "read_meta",
    "read_prompts",
    "read_runs",
    "read_samples",
    "store_sample",
    "write_meta",
]

SCHEMA = 1
TABLES = """
create table if not exists meta (key text primary key, value) without rowid;
create table if not exists prompt (ordinal integer primary key, attempt integer not null, json text not null);
create table if not exists sample (
    ordinal integer, sibling integer, oldest integer not null, newest integer not null, ref text not null,
    primary key (ordinal, sibling)
) without rowid;
"""


# A durable sample of an open group: its ordinal, its sibling, its oldest and newest version, and its reference.
StoredSample = tuple[int, int, int, int, str]


def store_sample(ordinal: int, sample: Sample) -> StoredSample:
    """Return the row of a sample."""
    return ordinal, sample.sibling, sample.oldest_version, sample.newest_version, sample.ref.value


def load_sample(row: StoredSample) -> Sample:
    """Return the sample of a row."""
    _, sibling, oldest, newest, ref = row
    return Sample(sibling, Ref(ref, durable=True), oldest, newest)


def insert(
    database: sqlite3.Connection, prompts: Iterable[tuple[int, int, str]], samples: Iterable[StoredSample]
) -> None:
    """Add or replace rows. A prompt is an ordinal, its attempt and its JSON."""
    database.executemany("insert or replace into prompt values (?, ?, ?)", prompts)
    database.executemany("insert or replace into sample values (?, ?, ?, ?, ?)", samples)


def write_meta(database: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    """Add or replace values by name."""
    database.executemany("insert or replace into meta values (?, ?)", values.items())


def read_meta(database: sqlite3.Connection) -> dict[str, Any]:
    """Return the values by name."""
    return dict(database.execute("select key, value from meta"))


def read_runs(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the runs of the job, one after the other, that have led to this file."""
    return tuple(json.loads(meta.get("runs", "[]")))


def read_prompts(database: sqlite3.Connection) -> dict[int, tuple[int, Any]]:
    """Return the attempt and the prompt of each open group."""
    rows = database.execute("select ordinal, attempt, json from prompt order by ordinal")
    return {ordinal: (attempt, json.loads(text)) for ordinal, attempt, text in rows}


def read_samples(database: sqlite3.Connection) -> list[StoredSample]:
    """Return all samples, by ordinal and sibling."""
    rows = database.execute("select ordinal, sibling, oldest, newest, ref from sample order by 1, 2")
    return list(rows)
