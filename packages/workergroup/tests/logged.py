# SPDX-License-Identifier: Apache-2.0
"""Logs of what each worker has run of each call, and what a caller may get for it."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairlead_workergroup import StaleGroupError, WorkerFailureError, current_worker

# The name of a caller, and the number of its call.
Key = tuple[str, int]
# The rank, the epoch and the world size of a worker.
Run = tuple[int, int, int]


class Logged:
    """A worker that writes a line for each call that it runs; a line is written whole, or not at all."""

    def __init__(self, folder):
        self.log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, caller, number):
        me = current_worker()
        os.write(self.log, f"{caller} {number} {me.rank} {me.group_epoch} {me.world_size}\n".encode())
        return me.rank, me.group_epoch, me.world_size


def read_logs(folder: Path) -> dict[Key, list[Run]]:
    """Return what has run of each call; check that each worker has run the calls of each caller in order."""
    runs = defaultdict[Key, list[Run]](list)
    for log in folder.iterdir():
        last: dict[str, int] = {}
        for line in log.read_text().splitlines():
            caller, text, *what = line.split()
            number = int(text)
            assert last.get(caller, -1) < number, f"{log.name}: {caller} {number} ran after {last[caller]}"
            last[caller] = number
            rank, epoch, size = map(int, what)
            runs[caller, number].append((rank, epoch, size))
    return runs


def check_logs(
    folder: Path,
    results: Mapping[Key, Sequence[Run]],
    errors: Mapping[Key, StaleGroupError | WorkerFailureError],
) -> None:
    """Check what workers have run of each call against what its caller got."""
    runs = read_logs(folder)
    for key in [*results, *errors]:
        _check_call(key, runs.pop(key, []), results.get(key), errors.get(key))
    assert not runs, f"calls that nobody made: {list(runs)[:5]}"


def _check_call(key, runs, result, error):
    ranks = {rank for rank, _, _ in runs}
    assert len(ranks) == len(runs), f"{key}: a worker ran it twice: {runs}"
    assert len({(epoch, size) for _, epoch, size in runs}) <= 1, f"{key}: it ran in two states of the group: {runs}"
    if error is None:
        assert sorted(runs) == result, f"{key}: its result {result} is not what has run: {runs}"
        (size,) = {size for _, _, size in result}
        assert [rank for rank, _, _ in result] == list(range(size)), f"{key}: wrong ranks: {result}"
    elif isinstance(error, StaleGroupError):
        assert ranks <= set(error.ran), f"{key}: {error}, but {runs}"
        assert not ranks & set(error.refused), f"{key}: {error}, but {runs}"
    else:
        assert error.failures, f"{key}: no worker is named: {error}"
