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
        def __init__(self, pipe, secret="secret-in-an-argument"):
            self.pipe, self.rank = pipe, int(os.environ["RANK"])

        def train(self, step, secret):
            report_progress(step=step)
            if self.rank == 3:
                read, _ = os.pipe()
                ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)  # holds the GIL
            self.barrier()

        def barrier(self):
            with current_worker().waiting():
                open(self.pipe).read()  # until the driver opens it for writing

        def quick(self):
            return self.rank

    # Ray prints to standard output when a worker dies.
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    options = {"env_vars": {"TOKEN": "secret-in-the-environment"}, "restart": Restart(on_failure=True)}
    mesh = NamedSharding.from_shape(dp=2, tp=2)
    os.mkfifo(sys.argv[1])
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        builder = RayWorkerBuilder(Trainer, sys.argv[1])
        with RayWorkerGroup(
            cluster, builder, name_prefix="policy", sharding_annotations=mesh, **options
        ) as group:
            print(ray.get_runtime_context().gcs_address, file=out, flush=True)
            for line in sys.stdin:
                if line == "hang\\n":
                    call = group.call("train", 7, "secret-in-an-argument")
                    while any(one.method != "train" or one.step != 7 for one in group.get_worker_status()):
                        time.sleep(0.05)
                    time.sleep(3)  # Ray's record of the calls leaves the driver once a second
                elif line == "kill\\n":
                    kill(group, 1)
                elif line == "recover\\n":
                    kill(group, 3)
                    os.close(os.open(sys.argv[1], os.O_RDWR))
                    try:
                        call.result()
                    except Exception as error:
                        print(type(error).__name__, file=sys.stderr)
                    group.call("quick").result()
                elif line == "end\\n":
                    group.shutdown()
                print("ok", file=out, flush=True)
"""


ATTACHED = """
    import json
    from fairlead_workergroup import attach

    group = attach("policy")
    calls = [group.call("quick").result(), group.at(dp=1, tp=0).call("quick", collect=()).result()]
    print(json.dumps([calls, [[one.rank, one.coords, one.state] for one in group.status()]]))
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


def run(*arguments, timeout_s=60):
    command = [sys.executable, "-m", "fairlead_inspect", *arguments, "--timeout", str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for secret in SECRETS.values():
        assert secret not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def decide(*arguments, holds=lambda done: done.returncode != 4):
    """Run `why` until its verdict is as wanted, which takes time on a busy machine."""
    deadline = time.monotonic() + 120
    while not holds(done := run("why", "--after", "2", *arguments)) and time.monotonic() < deadline:
        pass
    return done


def blamed():
    """Return the findings that blame a process, once there are some, and the coordinates of each rank."""
    done = decide("--json", holds=lambda done: done.returncode == 1)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    (job,) = json.loads(done.stdout)["jobs"]
    (workers,) = [one for one in job["worker_sets"] if one["key"] == "policy"]
    assert (workers["source"], workers["confidence"], workers["world_size"]) == ("group", "certain", 4)
    return [one for one in job["findings"] if one["blames"]], {one["rank"]: one["coords"] for one in workers["members"]}


def members():
    """Return the rows of the group in `ps`."""
    return [one for one in json.loads(run("ps", "--json").stdout)["processes"] if one["worker_set"] == "policy"]


@pytest.mark.smoke
def test_idle(driver):
    """Nothing is wrong with a group that is well. Its members have their ranks and coordinates."""
    assert [(one["rank"], one["coords"], one["does"]) for one in members()] == [
        (rank, {"dp": rank // 2, "tp": rank % 2}, "idle") for rank in range(4)
    ]
    well = decide()
    assert (well.returncode, well.stderr) == (0, "")
    assert "HANGS" not in well.stdout


def test_attach_while_the_driver_is_stopped(driver, stop_process):
    """Another process calls the group by rank and by coordinates, and sees both, as `ps` does."""
    with stop_process(driver.pid):
        command = [sys.executable, "-c", textwrap.dedent(ATTACHED)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        calls, status = json.loads(done.stdout.splitlines()[-1])
        assert calls == [[0, 1, 2, 3], 2]
        assert status == [[one["rank"], one["coords"], "idle"] for one in members()]
    assert status == [[rank, {"dp": rank // 2, "tp": rank % 2}, "idle"] for rank in range(4)]


def test_driver_stopped_and_worker_hung(driver, stop_process):
    """While the driver is stopped and a worker hangs in native code that holds the GIL, `why` names it."""
    driver.do("hang")
    with stop_process(driver.pid):
        for _ in range(RUNS):
            (late,), coords = blamed()
            assert (late["kind"], late["worker_set"], late["ranks"], late["confidence"]) == (
                "late",
                "policy",
                [3],
                "certain",
            )
            assert coords[3] == {"dp": 1, "tp": 1}
            assert late["where"][0]["function"].endswith("train")
            assert late["waiting"]["ranks"] == [0, 1, 2]
        assert "rank 3 (dp=1, tp=1) of policy" in decide().stdout
        assert [(one["does"], one["step"]) for one in members()] == [("collective", 7)] * 3 + [("user", 7)]
        found = {tuple(one["ranks"]): one for one in json.loads(run("stacks", "--json").stdout)["stacks"]}
        assert found["0", "1", "2"]["where"][0]["function"].endswith("barrier")
        assert found[("3",)]["worker_set"] == "policy"


def test_driver_runs(driver):
    """The verdict is the same while the driver runs."""
    (late,), _ = blamed()
    assert (late["kind"], late["ranks"], late["waiting"]["ranks"]) == ("late", [3], [0, 1, 2])


@pytest.mark.nightly
def test_agent_stopped(driver, stop_process):
    """If the agent with the board does not answer, the look says so, and knows the ranks from the environment."""
    rows = json.loads(run("ps", "--json").stdout)["processes"]
    (agent,) = [one["pid"] for one in rows if one["class"] == "NodeAgent"]
    with stop_process(agent):
        found = json.loads(run("why", "--json", timeout_s=10).stdout)
    assert any(note.startswith("Fairlead's groups of process") for note in found["notes"]), found["notes"]
    (workers,) = found["jobs"][0]["worker_sets"]
    assert (workers["source"], [one["rank"] for one in workers["members"]]) == ("environment", [0, 1, 2, 3])


@pytest.mark.nightly
def test_timeline(driver, tmp_path):
    """The track of an actor has the name of its group and its rank."""
    assert run("timeline", "-o", str(tmp_path / "trace.json")).returncode == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {f"policy rank {rank}" for rank in range(4)} <= names


@pytest.mark.nightly
def test_stopped_worker(driver, stop_process):
    """A worker that is stopped is named, although others wait for another one too."""
    pid = next(one["pid"] for one in members() if one["rank"] == 1)
    with stop_process(pid):
        found, _ = blamed()
    assert ("stopped", [1]) in [(one["kind"], one["ranks"]) for one in found]


def test_dead_worker(driver, stop_process):
    """A dead worker is named with its rank, even while its driver does not know of its death."""
    driver.do("kill")
    with stop_process(driver.pid):
        deadline = time.monotonic() + 120
        while ("dead", "policy", [1]) not in [(one["kind"], one["worker_set"], one["ranks"]) for one in blamed()[0]]:
            assert time.monotonic() < deadline


@pytest.mark.nightly
def test_restarted(driver):
    """After a restart the new processes have the ranks, and nothing is wrong."""
    before = {one["rank"]: one["pid"] for one in members()}
    driver.do("recover")
    after = members()
    assert [one["rank"] for one in after] == [0, 1, 2, 3]
    assert after[3]["pid"] != before[3]
    assert decide().returncode == 0


@pytest.mark.nightly
def test_ended(driver, eventually):
    """After the shutdown of a group nothing speaks of it any more."""
    driver.do("end")
    assert eventually(lambda: members() == [], 60)
    # The driver of the job is still there, and waits for its input.
    done = decide()
    assert done.returncode == 0
    assert "policy" not in done.stdout
