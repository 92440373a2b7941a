# SPDX-License-Identifier: Apache-2.0
"""Jobs in the loops of slime and miles, from checkouts of both: killed between two saves, resumed, and counted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import loop
import pytest

pytestmark = pytest.mark.nightly
LOOP = Path(__file__).with_name("loop.py")


def run(framework, checkouts, folder, last, *options):
    command = [sys.executable, str(LOOP), framework, str(checkouts), str(folder), str(last), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == (-signal.SIGKILL if options else 0), result.stderr[-3000:]
    return result.stderr


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_run_with_a_crash(framework, checkouts, tmp_path):
    """A job that began without a ledger trains 20 rollouts, is killed between the saves, and trains 20 more."""
    assert "The ledger begins at prompt 30." in run(framework, checkouts, tmp_path, 24, "--crash")
    assert not (tmp_path / "save" / "rollout" / "ledger_24").exists(), "the ledger was saved before the kill"
    assert "begins at prompt" not in run(framework, checkouts, tmp_path, 44)
    report = json.loads((tmp_path / "report.json").read_text())
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    trained, states = report["trained"], report["states"]
    assert len(trained) == 40 * loop.BATCH
    assert len(set(trained)) == len(trained), "a prompt was trained twice"
    before = range(30)  # those of the epoch that began without a ledger
    applied = {prompt_id for prompt_id, state in enumerate(states) if state == "applied"}
    assert applied == set(trained) | set(before), "the ledger and the model differ"
    others = {state for prompt_id, state in enumerate(states) if prompt_id not in applied}
    assert others <= {"pending", "leased", "finished"}, "a prompt was lost"
    assert len(states) - len(applied) <= 3 * loop.BATCH
    ages = [age for call in calls if call["call"] == "train" for age in call["ages"]]
    assert len(ages) >= 40 * loop.BATCH
    assert max(ages) <= loop.STALENESS
    assert max(map(int, report["staleness"])) <= loop.STALENESS
    assert sum(call["call"] == "evaluation" for call in calls) == 4
    assert report["fenced"] > 0, "no straggler came back late"
    if output := os.environ.get("FAIRLEAD_RECORD"):
        Path(output, f"{framework}.jsonl").write_text((tmp_path / "calls.jsonl").read_text())
