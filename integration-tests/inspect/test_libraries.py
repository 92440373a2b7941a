# SPDX-License-Identifier: Apache-2.0
"""Whether `why` names what programs around Ray's libraries wait for, and never gives one that hangs the all-clear.

The programs of `libraries/` were written without knowledge of the rules, and their guilty process is written down in
them. Those of `libraries/second` were run once before anybody looked at the result. `nox -s ci` runs four of them,
`nox -s nightly` ten more, and `nox -s hang -- libraries` all with the default of `--after`, and prints the table.
"""

import ast
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parent / "libraries"
EVERY = os.environ.get("FAIRLEAD_LIBRARIES", "")
# Short, so that a case takes half a minute: ages come from the kernel and from Ray, and the rules are the same.
AFTER_S = 60.0 if EVERY else 20.0
# One that is stopped, a driver with coroutines, many references, and a healthy one; they need Ray only.
IN_CI = (
    "12_parameter_server_stopped",
    "15_asyncio_gather",
    "18_thousand_references",
    "23_actor_sleeps_by_design",
)
AT_NIGHT = (
    "03_tune_trial_pipe",
    "04_data_actor_udf_deadlock",
    "07_train_ddp_skipped_step",
    "08_train_dataloader_child",
    "09_train_slow_upload",
    "10_serve_a_b_a",
    "11_train_xgboost_rank_fifo",
    "16_driver_thread_pool",
    "17_multiprocessing_pool_url",
    "29_compiled_graph",
)
# What a library of Ray needs that Ray alone does not install.
EXTRAS = {"ray.data": "pyarrow", "ray.train": "pyarrow", "ray.tune": "pyarrow", "ray.serve": "fastapi"}
PROGRAMS = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("[0-9]*.py"))


def read_truth(name):
    """Return what the author of a program wrote down before its first run."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    values = (one.value for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "TRUTH")
    return ast.literal_eval(next(values))


def find_lacking(name):
    """Return the packages that a program imports and this environment lacks."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    names = {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom):
            names |= {f"{one.module}.{alias.name}" for alias in one.names} if one.module == "ray" else {one.module}
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    wanted = {one.partition(".")[0] for one in names if one != "hangs"}
    wanted |= {extra for library, extra in EXTRAS.items() if library in text}
    return sorted(one for one in wanted if importlib.util.find_spec(one) is None)


@contextlib.contextmanager
def run_program(name, folder):
    """Run a program on a Ray of its own until it says that it hangs, and yield its environment and what it noted."""
    mark, address = folder / "mark", folder / "address"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {
        "PYTHONPATH": str(FOLDER),  # of the module `hangs`, for the programs of `second`
        "MARK_FILE": str(mark),
        "ADDRESS_FILE": str(address),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
    }
    with (folder / "log").open("w") as log:
        job = subprocess.Popen([sys.executable, FOLDER / f"{name}.py"], env=env, cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 240
        while not mark.exists():
            assert job.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the program did not come to where it hangs"
            time.sleep(0.2)
        yield {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address.read_text()}, job, mark
    finally:
        job.kill()  # which may have ended
        for one in find_processes(str(folder)):
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGCONT)
                one.kill()
        job.wait(60)


def find_processes(folder):
    """Return the processes of a Ray that keeps its files in a folder."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get("RAY_TMPDIR") == folder or folder in " ".join(one.cmdline()):
                found.append(one)
    return found


def judge(truth, mark, report, status):
    """Return "named", "undecided", "missed", "all-clear" or "wrong"; of a healthy program "well" or "wrong"."""
    findings = [one for job in report["jobs"] for one in job["findings"]]
    blamed = [one for one in findings if one["blames"]]
    if not truth["hangs"]:
        return "wrong" if status == 1 else "well"
    if status == 0:
        return "all-clear"
    guilty = {*mark.get("pids", []), mark["pid"]}

    def is_guilty(one):
        if "pending" in mark:
            return one["kind"] in ("pending", "undecided") or "has not started" in one["text"]
        children = any(f"process {pid}" in one["text"] or f"(pid {pid})" in one["text"] for pid in guilty)
        return one["pid"] in guilty or children

    if blamed:
        return "named" if all(map(is_guilty, blamed)) else "wrong"
    suspects = [suspect for one in findings for suspect in one["suspects"]]
    suspects += [one for one in findings if not one["suspects"] and one["kind"] != "working"]
    pending = [one for one in findings if one["kind"] == "pending"] if "pending" in mark else []
    near = [one for one in suspects if one["pid"] in guilty or any(str(pid) in one["text"] for pid in guilty)]
    return "undecided" if (near or pending) and len(suspects) <= 5 else "missed"


def mark_program(name):
    return name if name in IN_CI and not EVERY else pytest.param(name, marks=pytest.mark.nightly)


CHOSEN = PROGRAMS if EVERY else [*IN_CI, *AT_NIGHT]


@pytest.mark.parametrize("name", [mark_program(name) for name in CHOSEN if EVERY in ("", "all", name)])
def test_program(name):
    """The guilty process is named or among the suspects; no innocent one is blamed; a hang is never an all-clear."""
    truth = read_truth(name)
    if lacking := find_lacking(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    with (
        tempfile.TemporaryDirectory(prefix="fl-", dir="/tmp", ignore_cleanup_errors=True) as folder,  # a short path
        run_program(name, Path(folder)) as (env, job, mark),
    ):
        time.sleep(AFTER_S + 4)
        assert job.poll() is None, "the program has ended"
        command = [sys.executable, "-m", "fairlead_inspect", "why", "--json", "--after", str(AFTER_S)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        noted = json.loads(mark.read_text())
    assert done.returncode in (0, 1, 4), done.stderr
    result = judge(truth, noted, json.loads(done.stdout), done.returncode)
    sys.stdout.write(f"| {name} | {truth['library']} | {result} | load {os.getloadavg()[0]:.0f} |\n")
    assert result not in ("wrong", "all-clear", "missed"), done.stdout
