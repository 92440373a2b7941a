# SPDX-License-Identifier: Apache-2.0
"""The collectives that a process has begun and finished on each communicator, by their numbers. Shipped by value.

Only dumps of torch's flight recorder that are there already are read: nothing is written, and no dump is requested.
"""

import io
import os
import pickle
import re
import stat
import time
from collections.abc import Mapping
from typing import Any

# The file of a rank is one of these and the rank (torch's `DebugInfoWriter`); older versions know the second only.
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# 2,000 entries with their stacks, the default, take about 2 MiB.
MOST_BYTES = 64 * 2**20
MOST_GROUPS = 64
RECORDER = "flight recorder"
# How the dumps that this understands are numbered.
VERSION = "2."


class _PlainUnpickler(pickle.Unpickler):
    """Reads values of built-in types, and refuses everything that would call or import something."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}"[:100])


def read_dump(pid: int, started: int, environ: Mapping[str, str]) -> tuple[list[tuple[Any, ...]], str]:
    """Return the fields of a `Record` for each communicator in the newest dump of a process, and why there is none."""
    files = []
    for prefix in (environ[name] for name in PREFIXES if environ.get(name) and environ.get("RANK")):
        path = os.path.join(f"/proc/{pid}/cwd", prefix + environ["RANK"])
        try:
            files.append((os.stat(path).st_mtime, path))
        except OSError:
            continue  # there is none
    if not files:
        return [], ""
    written, path = max(files)
    age_s = max(0.0, time.time() - written)
    try:
        with open("/proc/uptime", encoding="ascii") as file:
            # A dump from before the start of the process is of another one.
            if age_s > float(file.read().split()[0]) - started / os.sysconf("SC_CLK_TCK"):
                return [], ""
        dump = _PlainUnpickler(io.BytesIO(_read_file(path))).load()
        if not str(dump["version"]).startswith(VERSION):
            return [], f"{path}: version {str(dump['version'])[:20]} of the flight recorder is not known"
        return _summarize(dump, age_s, written, environ), ""
    except Exception as error:  # noqa: BLE001
        # The contents are the job's, and may be anything.
        return [], f"{path} is no dump of torch's flight recorder: {type(error).__name__}: {str(error)[:100]}"


def _read_file(path: str) -> bytes:
    """Return the contents of a regular file; a pipe in its place does not block."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a file")
        if len(content := file.read(MOST_BYTES + 1)) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return content


def _summarize(dump: Any, age_s: float, written: float, environ: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """Return the last collective begun and the last one finished on each communicator of a dump."""
    entries, config = dump.get("entries") or [], dump.get("pg_config") or {}
    groups: dict[tuple[str, str], list[Any]] = {}
    # Of a communicator without entries it is known that it was not used only if the buffer was never full.
    if entries and entries[0]["record_id"] == 0:
        groups = {(str(name), str(item["desc"])): [0, 0, "", False] for name, item in config.items() if item["ranks"]}
    stood_s = min((written - entry["time_created_ns"] / 1e9 for entry in entries), default=0.0)
    for entry in entries:
        name, description = map(str, entry["process_group"])
        group = groups.setdefault((name, description), [0, 0, "", False])
        number, is_done = int(entry["collective_seq_id"]), entry["state"] == "completed"
        if entry.get("is_p2p"):
            group[3] |= not is_done and not entry.get("retired")
            continue
        if number >= group[0]:
            group[0], group[2] = number, str(entry["profiling_name"]).rpartition(":")[2][:64]
        # torch records for gloo only here that a collective is over.
        status = (dump.get("pg_status") or {}).get(str(entry["pg_id"])) or {}
        group[1] = max(group[1], number if is_done else 0, int(status.get("last_completed_collective", 0)))
    rows = []
    for (name, description), (begun, done, operation, waits) in groups.items():
        ranks = re.findall(r"\d+", str(config.get(name, {}).get("ranks", "")))
        size = len(ranks) or (int(environ.get("WORLD_SIZE", 0)) if description == "default_pg" else 0)
        key = f"{name[:40]} {description[:40]} {','.join(ranks)[:200]}".strip()
        rows.append((RECORDER, key, size, begun, done, operation, waits, age_s, stood_s))
    return sorted(rows, key=lambda row: row[3] <= row[4])[:MOST_GROUPS]
