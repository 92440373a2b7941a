# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of slime's and miles' own loops, made again on the adapters: each returns what it did.

`recorded/slime.jsonl` and `recorded/miles.jsonl` are from `seams/test_loops.py` with `FAIRLEAD_RECORD=FOLDER`, in the
loops of slime 624b824 and miles 31f1ca9. The parts that the adapters import are stand-ins here.
"""

import copy
import json
from argparse import Namespace
from pathlib import Path

import pytest
from adapters import entry, make_args, prompt_ids, put_modules
from invariants import check

from fairlead_rollouts import _datasource, miles, slime

RECORDED = Path(__file__).parents[1] / "recorded"
OPTIONS = {"rollout_batch_size": 4, "prompts": 30, "max_weight_staleness": 2, "ledger_max_staleness": 2}


class Replay:
    """Make the recorded calls of one process after the other."""

    def __init__(self, framework, folder):
        self.framework, self.folder, self.source, self.groups = framework, folder, None, {}

    def close(self):
        if self.source is not None:
            self.source.ledger._file.changed = False  # as a crash: without the last write
            self.source.ledger.close()

    def load(self, rollout):
        self.close()
        args = make_args(self.folder, ledger_deadline_s=1.0, ledger_missing="epoch", **OPTIONS)
        self.source = self.framework.LedgerDataSource(args)
        self.source.load(rollout)
        self.groups = {}
        if self.framework is miles:
            self.buffer = miles.LedgerDataBuffer(Namespace(args=args))
        return self.source.ledger.statistics().applied

    def get_samples(self, count, now):
        _datasource.time = Namespace(monotonic=lambda: now)
        leases = []
        for group in self.source.get_samples(count):
            token = group[0].metadata["ledger_token"] & 0xFFFFFFFF
            self.groups[token] = copy.deepcopy(group)  # a late group keeps the token of its own lease
            leases.append([group[0].group_index, token])
        return leases

    def add_samples(self, leases):
        self.source.add_samples([self.groups[lease] for lease in leases])

    def __getattr__(self, name):
        return getattr(self.source, name)

    def take(self, number, leases=()):
        if self.framework is slime:
            taken = self.source.take(number, [self.groups[lease] for lease in leases])
            return taken if isinstance(taken, int) else prompt_ids(taken)
        value = self.buffer._take(number)
        return None if value is None else prompt_ids([value.group])[0]

    def record(self, lease, aborted, versions):
        group = self.groups[lease]
        value = entry(group, None, aborted=aborted)
        group[0].weight_versions = [version for version in versions if version is not None]
        self.buffer._record(value)


@pytest.mark.parametrize("framework", [slime, miles])
def test_recorded_calls(framework, monkeypatch, tmp_path):
    """The adapter returns what it returned in the framework's loop, through a crash between the saves and a resume."""
    put_modules(monkeypatch)
    monkeypatch.setattr(miles.LedgerDataSource, "latest", None)
    monkeypatch.setattr(_datasource, "time", _datasource.time)
    replay = Replay(framework, tmp_path)
    lines = (RECORDED / f"{framework.__name__.split('.')[1]}.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        call = json.loads(line)
        name, result = call.pop("call"), call.pop("result", None)
        if name not in ("train", "evaluation"):
            assert getattr(replay, name)(*call.values()) == result, f"line {number + 1}: {line}"
    check(replay.source.ledger)
    numbers = replay.source.ledger.statistics()
    assert numbers.fenced > 0, "no straggler came back late"
    assert numbers.requeued, "no group was too old when it came"
    assert max(numbers.staleness) == OPTIONS["max_weight_staleness"]
    replay.close()
    assert sum('"load"' in line for line in lines) == 2
