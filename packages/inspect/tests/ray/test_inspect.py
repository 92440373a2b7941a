# SPDX-License-Identifier: Apache-2.0
"""The command line against a group of another process, which is stopped while it is looked at."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

# `nox -s nightly` repeats what has to hold each time.
RUNS = int(os.environ.get("FAIRLEAD_RUNS", "1"))
pytestmark = [pytest.mark.nightly] if RUNS > 1 else []
SECRETS = {"argument": "secret-in-an-argument", "environment": "secret-in-the-environment"}
DRIVER = """
    import ctypes, os, sys, time
    import ray
    from fairlead_placement import RayVirtualCluster
    from fairlead_sharding import NamedSharding
    from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart, current_worker, report_progress
    from fairlead_workergroup.testing import kill

    class Trainer:
        def __init__(self, folder, secret="secret-in-an-argument"):
            self.folder, self.rank = folder, int(os.environ["RANK"])

        def train(self, step, secret):
            report_progress(step=step)
            if self.rank == 3:
                read, _ = os.pipe()
                ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # holds the GIL
            self.barrier()

        def barrier(self):
            while not os.path.exists(self.folder):
                time.sleep(0.25)  # nearly all of the time it is at one place

        def quick(self):
            return self.rank

        def meet(self):
            if self.rank != 2:
                with current_worker().waiting():
                    self.barrier()
            self.barrier()

    def wait_until(holds):
        deadline = time.monotonic() + 120
        while not all(holds(one) and one.since_progress_s >= 1.1 for one in group.get_worker_status()):
            assert time.monotonic() < deadline, group.get_worker_status()
            time.sleep(0.05)

    # Ray prints to standard output when a worker dies.
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    options = {"env_vars": {"TOKEN": "secret-in-the-environment"}, "restart": Restart(on_failure=True)}
    mesh = NamedSharding.from_shape(dp=2, tp=2)
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        builder = RayWorkerBuilder(Trainer, sys.argv[1])
        with RayWorkerGroup(
            cluster, builder, name_prefix="policy", sharding_annotations=mesh, **options
        ) as group:
            print(ray.get_runtime_context().gcs_address, file=out, flush=True)
            for line in sys.stdin:
                if line == "hang\\n":
                    call = group.call("train", 7, "secret-in-an-argument")
                    wait_until(lambda one: one.method == "train" and one.step == 7)
                elif line == "recover\\n":
                    kill(group, 3)
                    open(sys.argv[1], "w").close()
                    try:
                        call.result()
                    except Exception as error:
                        print(type(error).__name__, file=sys.stderr)
                    group.call("quick").result()
                elif line == "meet\\n":
                    group.at(dp=0, tp=0).call("quick").result()
                    os.remove(sys.argv[1])
                    call = group.call("meet")
                    wait_until(lambda one: one.method == "meet")
                elif line == "met\\n":
                    open(sys.argv[1], "w").close()
                    call.result()
                elif line == "kill\\n":
                    kill(group, 1)
                elif line == "end\\n":
                    group.shutdown()
                print("ok", file=out, flush=True)
"""


class Driver:
    """A driver with a group of four workers, in a process of its own."""

    def __init__(self, folder):
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(DRIVER))
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "go")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.address = self._process.stdout.readline().strip()

    def do(self, what):
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ok\n"

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(120) == 0


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_AUTH_MODE", "disabled"
        )  # otherwise Ray creates a token, and puts it into the driver's variables
        driver = Driver(tmp_path_factory.mktemp("driver"))
        patch.setenv("RAY_ADDRESS", driver.address)
        yield driver
        driver.close()


def run(*arguments):
    command = [sys.executable, "-m", "fairlead_inspect", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for secret in SECRETS.values():
        assert secret not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def read(*arguments):
    """Run a command until the node has answered for all workers, which it may not in time on a busy machine."""
    deadline = time.monotonic() + 120
    while True:
        done = run(*arguments, "--json")
        assert done.returncode in (0, 1, 4), done.stderr  # 4: a busy machine did not let it read the driver
        found = json.loads(done.stdout)
        if has_all(found) or time.monotonic() > deadline:
            return found


def has_all(found):
    """Return whether no worker is unknown in what a command has printed."""
    groups = found.get("groups", [])
    known = {one["state"] for one in found.get("workers", [])}
    known |= {one["kind"] for group in groups for one in group.get("findings", [])}
    counted = [(one["alive"] + one["dead"], one["workers"]) for one in groups if "alive" in one]
    return "unknown" not in known and all(count == size for count, size in counted)


def decide():
    """Run `why` until its verdict is not open, which it may be on a busy machine."""
    deadline = time.monotonic() + 120
    while (done := run("why", "--timeout", "60")).returncode == 4 and time.monotonic() < deadline:
        pass
    return done


@pytest.mark.smoke
def test_idle(driver):
    """A group that is well is listed with its workers, and nothing is wrong."""
    (group,) = read("groups")["groups"]
    assert {key: group[key] for key in ("name", "class", "mesh", "workers", "alive", "dead", "stuck")} == {
        "name": "policy",
        "class": "Trainer",
        "mesh": {"dp": 2, "tp": 2},
        "workers": 4,
        "alive": 4,
        "dead": 0,
        "stuck": 0,
    }
    assert (group["driver"]["pid"], group["driver"]["state"]) == (driver.pid, "runs")
    well = decide()
    assert (well.returncode, well.stderr) == (0, "")
    assert "nothing is wrong" in well.stdout
    assert "policy" in run("groups").stdout


def test_driver_stopped_and_worker_hung(driver, stop_process):
    """While the driver is stopped and a worker hangs in native code that holds the GIL, `why` names it."""
    driver.do("hang")
    with stop_process(driver.pid):
        for _ in range(RUNS):
            found = read("why", "--after", "1")
            assert found["wrong"] is True
            findings = found["groups"][0]["findings"]
            assert [(one["kind"], one["ranks"]) for one in findings] == [("late", [3]), ("driver", [])], findings
            late = findings[0]
            assert (late["kind"], late["ranks"], late["coords"]) == ("late", [3], {"dp": 1, "tp": 1})
            assert late["method"] == "train"
            assert late["where"].endswith("in train")
            assert late["waiting"] == [0, 1, 2]
        shown = run("why", "--after", "1", "--group", "policy")
        assert shown.returncode == 1
        assert "Rank 3 (dp=1, tp=1)" in shown.stdout
        status = read("status")["workers"]
        assert [(one["state"], one["method"], one["step"]) for one in status] == [("busy", "train", 7)] * 4
        assert all(one["memory_bytes"] > 2**20 for one in status)
        (one,) = read("status", "--at", "dp=1,tp=0")["workers"]
        assert one["rank"] == 2
        most, rest = read("stacks", "--group", "policy")["stacks"]
        assert (most["ranks"], rest["ranks"]) == ([0, 1, 2], [3])
        assert "in barrier" in most["stacks"]
        assert "rank 3:" in run("stacks", "--group", "policy", "--threads").stdout


@pytest.mark.nightly
def test_stopped_worker(driver, stop_process):
    """A worker that is stopped is named, and those that wait for it are explained by it."""
    pid = next(one["pid"] for one in read("status")["workers"] if one["rank"] == 1)
    with stop_process(pid):
        found = read("why", "--after", "1")["groups"][0]["findings"]
    assert [(one["kind"], one["ranks"]) for one in found][:1] == [("stopped", [1])]


@pytest.mark.nightly
def test_restarted(driver):
    """After a restart the new process is registered, with its incarnation."""
    before = read("status")["workers"]
    driver.do("recover")
    after = read("status")["workers"]
    assert [one["incarnation"] for one in after] == [0, 0, 0, 1]
    assert after[3]["pid"] != before[3]["pid"]
    assert [one["state"] for one in after] == ["idle"] * 4


@pytest.mark.nightly
def test_unequal_counts_of_calls(driver):
    """After a restart, and a call of one worker alone, `why` names the worker that the others wait for, and no other.

    `--at` chooses what is shown, and not who is looked at.
    """
    driver.do("meet")
    for at in ([], ["--at", "dp=0"]):
        (late,) = read("why", "--after", "1", *at)["groups"][0]["findings"]
        assert (late["kind"], late["ranks"], late["waiting"]) == ("late", [2], [0, 1, 3])
    driver.do("met")


def test_dead_worker(driver, stop_process):
    """A dead worker is reported with what it died of, also while its driver does not know it."""
    driver.do("kill")
    with stop_process(driver.pid):
        deadline = time.monotonic() + 120
        while (found := read("why")["groups"][0]["findings"]) and "process" not in found[0]["text"]:
            assert time.monotonic() < deadline, found
    assert (found[0]["kind"], found[0]["ranks"]) == ("dead", [1])
    assert read("groups")["groups"][0]["dead"] == 1


@pytest.mark.nightly
def test_unknown_group(driver):
    """A name that no group has is answered by those that are there."""
    done = run("status", "--group", "critic")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("There is no group 'critic'. These are there: policy (")
    done = run("status", "--at", "pp=0")
    assert done.returncode == 3
    assert "pp" in done.stderr


def test_no_cluster(driver):
    """Without a cluster the error says what to do."""
    done = run("groups", "--address", "127.0.0.1:1")
    assert done.returncode == 3
    assert done.stderr.startswith("No Ray cluster answers at 127.0.0.1:1.")


@pytest.mark.nightly
def test_ended(driver, eventually):
    """A group that was shut down is not listed any more."""
    driver.do("end")
    assert eventually(lambda: read("groups")["groups"] == [], 60)
    # The driver of the job is still there, and waits for its input.
    assert decide().returncode == 0
    done = run("why", "--group", "policy")
    assert done.returncode == 3
    assert done.stderr == "No worker group is registered on this cluster.\n"
