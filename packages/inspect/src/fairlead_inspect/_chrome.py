# SPDX-License-Identifier: Apache-2.0
"""Chrome traces, which Perfetto and chrome://tracing open: their events, and their files."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def name_track(kind: str, process: int, track: int, name: str) -> Event:
    """Return the event that names a process ("process_name") or a track of it ("thread_name")."""
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def to_microseconds(seconds: float) -> float:
    """Return the unit of traces, to the nanosecond."""
    return round(seconds * 1e6, 3)


def choose_track(free_from: list[float], start: float, end: float) -> int:
    """Return the first track that is free at a time, and occupy it: spans of one track must not overlap."""
    track = next((at for at, free in enumerate(free_from) if free <= start), len(free_from))
    free_from[track : track + 1] = [end]
    return track


def write_file(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace into a file, which is complete or not there."""
    target = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            json.dump(content, file)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
