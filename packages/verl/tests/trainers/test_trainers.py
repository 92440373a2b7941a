# SPDX-License-Identifier: Apache-2.0
"""verl's trainers on the CPU, with logical GPUs and a tiny random model: the same results with both implementations.

`nox -s verl -- sft`, `-- grpo` and `-- kill` run these tests. Each program checks whose classes its driver and its
workers use.
"""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed; run `nox -s verl`", allow_module_level=True)

import psutil
from tiny import make_inputs

# A test starts a trainer twice, each time with a Ray of its own.
pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]
HERE = Path(__file__).parent
OURS, VERLS = "1", "0"
ENV = {**os.environ, "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the inputs of a trainer."""
    make_inputs(tmp_path)
    return tmp_path


@contextlib.contextmanager
def start(program, choice, folder, *arguments):
    """Start a trainer; check at the end that none of its processes is left."""
    mark = uuid.uuid4().hex
    own = {"FAIRLEAD_VERL": choice, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), "MARK": mark}
    command = [sys.executable, str(HERE / program), str(folder), *map(str, arguments)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env={**ENV, **own}, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
        # Workers notice only after the driver has exited that their Ray is gone.
        deadline = time.monotonic() + 60
        while (left := find_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
    finally:
        for one in find_processes(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        sys.stdout.write((folder / "log.txt").read_text()[-20_000:])


def find_processes(mark):
    """Return the processes of a trainer, except those that have ended and wait for their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def read_metrics(folder):
    """Return the metrics of each step so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["data"] for line in lines]


def compare(program, names, folder, workers, steps):
    """Run a trainer with both implementations; return the given metrics of each step, which must be equal."""
    results = []
    for choice in (OURS, VERLS):
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        with start(program, choice, folder, workers, steps) as process:
            assert process.wait() == 0
        results.append([{name: step[name] for name in names} for step in read_metrics(folder)])
    ours, verls = results
    assert ours == verls
    assert len(ours) == steps
    assert all(math.isfinite(value) for step in ours for value in step.values())
    return ours


@pytest.mark.parametrize("workers", [2, 4])
def test_sft(folder, workers):
    """Losses and gradient norms are equal to the last digit."""
    steps = compare("run_sft.py", ["train/loss", "train/grad_norm"], folder, workers, 5)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


def test_grpo(folder):
    """The gradient norm is equal to the last digit and above 0, with a seed for each sample."""
    steps = compare("run_grpo.py", ["actor/grad_norm", "actor/pg_loss", "critic/score/mean"], folder, 2, 3)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def test_kill(folder):
    """`why` names the rank that a collective waits for, and after its death the driver raises, within 5 s."""
    with start("run_sft.py", OURS, folder, 2, 10_000, "stop") as process:
        while not read_metrics(folder):
            assert process.poll() is None
            time.sleep(0.1)
        started = json.loads((folder / "started.json").read_text())
        stopped = started["pids"][1]
        while psutil.Process(stopped).status() != psutil.STATUS_STOPPED:
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(3)
        steps = len(read_metrics(folder))
        why = [sys.executable, "-m", "fairlead_inspect", "why", "--after=2", "--json", "--address", started["address"]]
        said = subprocess.run(why, env=ENV, capture_output=True, text=True)
        assert said.returncode == 1, said.stderr
        found = [one for job in json.loads(said.stdout)["jobs"] for one in job["findings"] if one["blames"]]
        assert [(one["kind"], one["ranks"]) for one in found] == [("stopped", [1])]
        assert len(read_metrics(folder)) == steps
        killed = time.time()
        os.kill(stopped, signal.SIGKILL)
        assert process.wait(60) != 0
    raised = json.loads((folder / "raised.json").read_text())
    assert raised["type"] == "WorkerFailureError"
    assert raised["at"] - killed < 5
    assert all(part in raised["text"] for part in ("rank 1 ", "on node ", "killed"))
