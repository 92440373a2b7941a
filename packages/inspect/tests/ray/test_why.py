# SPDX-License-Identifier: Apache-2.0
"""`why`, `ps` and `stacks` on a job that is hand-written, in a Ray of its own."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

DRIVER = """
    import queue, sys, threading
    import ray

    @ray.remote(num_cpus=0)
    class Trainer:
        def train(self, token):
            return queue.Queue().get()  # for ever

    @ray.remote(num_cpus=0)
    class Controller:
        def run(self, trainers):
            return ray.get([one.train.remote("secret-of-the-job") for one in trainers])

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    trainers = [Trainer.options(name=f"trainer-{at}\\x1b[31m", runtime_env=None).remote() for at in range(1)]
    controller = Controller.remote()
    call = controller.run.remote(trainers)
    print("address", ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_job_id(), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
    ray.get(call)
"""


# Nothing has so many CPUs.
RESERVATION = """
    import sys, threading
    import ray
    from fairlead_placement import RayVirtualCluster

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    print("address", ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_job_id(), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
    RayVirtualCluster([3], use_gpus=False, name="policy", wait_for_nodes_s=600).reserve()
"""


@contextlib.contextmanager
def start_job(folder, by=(), program=DRIVER):
    """A job that hangs, run by some program: the environment of who looks at it, its id and its driver."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(program))
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [*by, sys.executable, str(script), "--hf-token", "secret-of-the-job"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        _, address, job_id = next(line for line in driver.stdout if line.startswith("address")).split()
        job = {**env, "RAY_ADDRESS": address}, job_id, driver.pid
        deadline = time.monotonic() + DEADLINE_S
        # Its processes start, and then have not stood for long.
        while (done := run(job, *WHY, "--json")).returncode != 1 and UNKNOWN not in done.stdout:
            if time.monotonic() >= deadline:
                pytest.fail(f"`why` did not decide within {DEADLINE_S} s: exit status {done.returncode}\n{done.stdout}")
        yield job
        driver.stdin.close()
        driver.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with start_job(tmp_path_factory.mktemp("job")) as job:
        yield job


# A look at a busy machine takes longer; one that is too short leaves the verdict open.
DEADLINE_S = 180
UNKNOWN = "does not move, and it is not known since when"
WHY = ("why", "--after", "2", "--timeout", "60")


def test_reservation(job, tmp_path):
    """A driver that waits in `reserve` hangs, with what it requests, since when, and for how long at most.

    Of several Rays on this machine, `why` says at which one it has looked, and which others run, unless one was chosen.
    """
    addresses = [job[0]["RAY_ADDRESS"]]
    with start_job(tmp_path, program=RESERVATION) as job:
        addresses.append(job[0]["RAY_ADDRESS"])
        done = run(job, *WHY)
        looked, _, others = " ".join(done.stdout.split()).partition("; also running on this machine: ")
        assert looked.endswith(f"Looked at {addresses[1]}")
        assert f"{addresses[0]} (process " in others
        assert "train.py`)" in others
        assert addresses[1] not in others
        assert "). Choose with --address." in others
        assert "also running" not in run(job, *WHY, "--address", addresses[1]).stdout
        assert done.returncode == 1
        said = " ".join(done.stdout.split())
        assert re.search(
            r"HANGS the driver on \S+, pid \d+, for \d+(\.\d)? s of 10m 0s: waits in reserve for 3 x 1 CPU for policy",
            said,
        )
        assert "train.py:9 <module>" in said


def run(job, *arguments):
    command = [sys.executable, "-m", "fairlead_inspect", *arguments]
    done = subprocess.run(command, env=job[0], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "secret-of-the-job" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    return done


def decide(job, *arguments):
    """Run `why` until its verdict is not open. Skip if the kernel has forgotten when the thread ran last."""
    deadline, unknown = time.monotonic() + DEADLINE_S, 0
    while (done := run(job, *WHY, *arguments)).returncode == 4 and time.monotonic() < deadline:
        unknown = unknown + 1 if UNKNOWN in run(job, *WHY, "--json").stdout else 0
        if unknown == 3:
            pytest.skip(f"the hung thread {UNKNOWN}, so that nobody is blamed outside of a collective")
    return done


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_why(job, stop_process, stopped):
    """The end of the chain is named, also while the driver is stopped."""
    if stopped:
        with stop_process(job[2]):
            done = decide(job, "--json")
    else:
        done = decide(job, "--json", "--job", job[1])
    check(done)


@pytest.mark.nightly
def test_container(tmp_path, in_container):
    """A task of Ray looks at a job whose processes have other numbers here."""
    with start_job(tmp_path, in_container()) as job:
        check(decide(job, "--json"))


def check(done):
    """Check the verdict about the job."""
    assert (done.returncode, done.stderr) == (1, "")
    (found,) = json.loads(done.stdout)["jobs"]
    blamed = [one for one in found["findings"] if one["blames"]]
    assert [(one["kind"], [actor["class"] for actor in one["actors"]]) for one in blamed] == [("late", ["Trainer"])]
    assert blamed[0]["chain"][:2] == ["driver", "Controller"]
    assert any(frame["function"] == "Trainer.train" for frame in blamed[0]["where"])
    assert blamed[0]["since_s"] > 2


def test_report(job, tmp_path):
    """`--report` writes one page with the verdict and all stacks, which loads nothing from elsewhere."""
    page = tmp_path / "why.html"
    assert decide(job, "--report", str(page)).returncode == 1
    text = page.read_text()
    assert "HANGS" in text
    assert "Trainer.train" in text
    assert not re.search(r"<script|<link|<img|@import|url\(", text)
    assert "secret-of-the-job" not in text


def test_timeline(job, tmp_path):
    """The trace has a track for each actor, and what runs is marked; a file that cannot be written is refused."""
    path = tmp_path / "trace.json"
    done = run(job, "timeline", "-o", str(path), "--job", job[1], "--timeout", "60")
    assert (done.returncode, "2 run" in done.stdout) == (0, True), done
    events = json.loads(path.read_text())["traceEvents"]
    running = [one["name"] for one in events if one["ph"] == "X" and one["args"].get("running")]
    assert sorted(running) == ["Controller.run (running)", "Trainer.train (running)"]
    assert "secret-of-the-job" not in path.read_text()
    assert run(job, "timeline", "-o", str(tmp_path / "missing" / "trace.json")).returncode == 3


WATCHDOG = """
    import pickle, time
    import ray
    from fairlead_inspect import diagnose, fold_stacks, look, write_report

    blamed, deadline = [], time.monotonic() + 120
    while not blamed and time.monotonic() < deadline:
        snapshot = pickle.loads(pickle.dumps(look(timeout_s=60)))
        assert not ray.is_initialized()
        blamed = [one for one in diagnose(snapshot, after_s=2) if one.blames]
    (found,) = blamed
    print(found.kind, found.actors[0].class_name, found.waiting.count)
    print([one.worker_set for one in fold_stacks(snapshot)])
    write_report(snapshot, [found], "watchdog.html")
    ray.init(logging_level="error")
    own, others = ray.get_runtime_context().get_job_id(), {one.job_id for one in snapshot.jobs}
    print({one.job_id for one in look(timeout_s=60).jobs} == {own, *others})
    try:
        look(job="ffffffff", timeout_s=60)
    except ValueError as error:
        print(error)
"""


def test_program(job, tmp_path):
    """A program looks as the command does, attached or not."""
    decide(job)
    watchdog = [sys.executable, "-c", textwrap.dedent(WATCHDOG)]
    done = subprocess.run(watchdog, env=job[0], cwd=tmp_path, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    first, stacks, both, refused = done.stdout.splitlines()[-4:]
    assert first == "late Trainer 1"
    assert "Trainer" in stacks
    assert both == "True"
    assert refused == "There is no running job 'ffffffff'."
    assert "HANGS" in (tmp_path / "watchdog.html").read_text()


def test_text(job, eventually):
    """People read the same; `ps` and `stacks` list who stands where."""
    shown = decide(job).stdout
    assert "HANGS" in shown
    assert "driver  ->  Controller  ->  Trainer" in shown
    assert eventually(lambda: "user, still" in run(job, "ps", "--timeout", "60").stdout, DEADLINE_S)
    assert eventually(lambda: "in Trainer.train" in run(job, "stacks", "--timeout", "60").stdout, DEADLINE_S)
    rows = json.loads(run(job, "ps", "--json", "--timeout", "60").stdout)["processes"]
    assert sorted(one["class"] for one in rows) == ["Controller", "Trainer", "driver"]


def test_nothing_is_left(job):
    """A look leaves no actor, and no job that runs."""
    run(job, *WHY)
    done = run(job, *WHY, "--json")  # of an open verdict too
    assert [one["id"] for one in json.loads(done.stdout)["jobs"]] == [job[1]]


def test_no_such_job(job):
    """A job that is not there, and a cluster that is not, end with 3."""
    done = run(job, *WHY, "--job", "77000000")
    assert (done.returncode, done.stderr) == (3, "There is no running job '77000000'.\n")
    assert run(job, "why", "--address", "127.0.0.1:1").returncode == 3


def test_here(job, eventually):
    """Without Ray's head the workers of this machine are read, whatever else runs there."""

    def trainer_is_read():
        rows = json.loads(run(job, "ps", "--here", "--json", "--timeout", "60").stdout)["processes"]
        return any(one["title"] == "ray::Trainer.train" and one["does"] == "user" for one in rows)

    assert eventually(trainer_is_read, DEADLINE_S)
