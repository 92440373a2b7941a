# SPDX-License-Identifier: Apache-2.0
"""Whether `why` names the process that a planted hang waits for, and blames none in a healthy job.

`nox -s ci` runs one case of each of five kinds once, and `nox -s nightly` more of them. `FAIRLEAD_TRUTH=10` runs all
cases ten times, marks all of them as nightly, and prints the table.
"""

import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNS = int(os.environ.get("FAIRLEAD_TRUTH", "0"))
JOBS = Path(__file__).parent / "jobs.py"
# Jobs of four ranks on one GPU. They have not run on one yet.
NCCL_JOBS = JOBS.with_name("nccl.py")
# For each case the kind, the class, the ranks and the function of what is to blame, or that none is.
HANGS = {
    "in_queue": ("late", "Trainer", [2], "in_queue"),
    "in_file": ("late", "Trainer", [2], "in_file"),
    "in_socket": ("late", "Trainer", [2], "in_socket"),
    "in_loop": ("late", "Trainer", [2], "in_loop"),
    "in_sleep": ("late", "Trainer", [2], "in_sleep"),
    "in_native": ("late", "Trainer", [2], "in_native"),
    "swallowed": ("late", "Trainer", [2], ""),
    "inversion": ("late", "Trainer", [2], "take"),
    "lock_of_dead_thread": ("late", "Trainer", [2], "lock_of_dead_thread"),
    "lock_of_killed_child": ("late", "Trainer", [2], "lock_of_killed_child"),
    "like_verl": ("late", "WorkerDict", [2], "in_queue"),
    "like_nemo_rl": ("late", "DTensorPolicyWorker", [2], "in_queue"),
    "like_slime": ("late", "MegatronTrainRayActor", [2], "in_queue"),
    "stopped": ("stopped", "Trainer", [2], ""),
    "killed": ("dead", "Trainer", [2], ""),
    "exits_in_native_code": ("dead", "Trainer", [2], ""),
    "dropped": ("dead", "Trainer", [2], ""),
    "skipped": ("mismatch", "Trainer", [2], "in_device"),
    "two_classes": ("late", "Rollout", [3], "in_queue"),
    "two_worlds": ("late", "Trainer", [1], "in_queue"),
    "chain": ("late", "Stage", [], "in_queue"),
    "wait_for_the_last": ("late", "Stage", [], "in_queue"),
    "cycle": ("deadlock", "Stage", [], ""),
    "awaited": ("late", "Stage", [], "in_queue"),
    "pending_actor": ("pending", "Stage", [], ""),
    "pending_group": ("pending", "", [], ""),
}
# The same for those on a GPU.
NCCL_HANGS = {
    "in_queue": ("late", "Trainer", [2], "in_queue"),
    "dumped": ("mismatch", "Trainer", [2], "in_kernel"),
    "stopped": ("stopped", "Trainer", [2], ""),
    "killed": ("dead", "Trainer", [2], ""),
}
NCCL_OPEN = ("in_kernel", "healthy")
# No process is to blame, or none can be known.
OPEN = ("other_collective", "in_device", "unread_generator")
CONTROLS = ("slow_in_turn", "long_work", "long_build", "idle", "services", "ends", "restarted", "pipeline")
# A late rank, a dead one, one that skips a collective, actors that wait for each other, and a healthy job.
IN_CI = ("in_queue", "killed", "skipped", "cycle", "long_work")
AT_NIGHT = (
    "in_native",
    "swallowed",
    "stopped",
    "chain",
    "pending_actor",
    "pending_group",
    "other_collective",
    "restarted",
)
CASES = [*HANGS, *OPEN, *CONTROLS] if RUNS else [*IN_CI, *AT_NIGHT]


def mark_case(case):
    """Return a case as a parameter, with the marker of the nightly tests if it is one of them."""
    return case if case in IN_CI and not RUNS else pytest.param(case, marks=pytest.mark.nightly)


# In a process of its own: Ray keeps how a process authenticates, and other tests need tokens.
CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster():
    """A cluster, as the environment of programs that use it."""
    pytest.importorskip("torch", reason="the jobs meet in torch's gloo")
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        _, address = next(line for line in owner.stdout if line.startswith("address")).split()
        yield {**env, "RAY_ADDRESS": address}
        owner.stdin.close()


@contextlib.contextmanager
def run_job(case, env, jobs=JOBS):
    """Run a job until it stands where it should, and yield what it reports."""
    job = subprocess.Popen(
        [sys.executable, str(jobs), case],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with job:
        yield json.loads(next(line for line in job.stdout if line.startswith("{")))
        job.stdin.close()


def look(env, known, *options):
    """Return the findings of `why` about a job, and its exit status."""
    command = [sys.executable, "-m", "fairlead_inspect", "why", "--json", "--after", "2", "--timeout", "60"]
    done = subprocess.run(
        [*command, "--job", known["job"], *options], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 1, 4), done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    return job["findings"], done.returncode


def judge(case, found, hangs=HANGS):
    """Return "right", "undecided" or "wrong" for what was found in a case."""
    blamed = [one for one in found if one["blames"]]
    if case not in hangs:
        return "wrong" if blamed else "right"
    kind, of, ranks, function = hangs[case]
    for one in blamed:
        classes = {actor["class"] for actor in one["actors"]} or {""}
        if one["kind"] != kind or classes != {of} or one["ranks"] != ranks:
            return "wrong"
        if function and not any(function in frame["function"] for frame in one["where"]):
            return "wrong"
    return "right" if len(blamed) == 1 else "undecided"


@pytest.mark.parametrize("case", [mark_case(case) for case in CASES])
def test_planted(cluster, case):
    """A planted hang is found; a healthy job, and one that cannot be understood, is never blamed."""
    counts = collections.Counter()
    for _ in range(max(1, RUNS)):
        with run_job(case, cluster) as known:
            # The start of a job takes a minute on a busy machine, so the time begins once it stands.
            deadline = time.monotonic() + 120
            found, status = look(cluster, known)
            # The table counts single looks. On a busy machine, a rank may not have hung for long enough at the first.
            while not RUNS and judge(case, found) == "undecided" and time.monotonic() < deadline:
                found, status = look(cluster, known)
        counts[judge(case, found)] += 1
        assert counts["wrong"] == 0, found
        assert (status == 1) is any(one["blames"] for one in found)
        if not RUNS:
            assert counts["right"] == 1, found
    sys.stdout.write(f"| {case} | {counts['right']} | {counts['undecided']} | {counts['wrong']} |\n")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles the loop in which the ranks spin")
@pytest.mark.parametrize(
    ("case", "status"), [("late", 1), pytest.param("late_for_item", 1, marks=pytest.mark.nightly), ("all", 4)]
)
def test_ranks_that_spin(cluster, case, status):
    """Ranks that use a core each while they wait, as under NCCL: the late one is named; if all wait, nobody is."""
    with run_job(case, cluster, JOBS.with_name("spinning.py")) as known:
        time.sleep(3)
        found, code = look(cluster, known)
    assert code == status, found
    if case == "all":
        assert [one["kind"] for one in found] == ["together"]
    else:
        (one,) = (one for one in found if one["blames"])
        assert (one["kind"], one["ranks"], one["pid"]) == ("late", [3], known["pids"][3])


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*NCCL_HANGS, *NCCL_OPEN])
def test_planted_on_gpu(cluster, case):
    """The same with ranks that reduce with NCCL, whose flight recorder counts collectives."""
    torch = pytest.importorskip("torch", reason="the jobs use torch's NCCL")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    with run_job(case, cluster, NCCL_JOBS) as known:
        found, status = look(cluster, known)
    assert judge(case, found, NCCL_HANGS) == "right", found
    assert (status == 1) is (case in NCCL_HANGS)
