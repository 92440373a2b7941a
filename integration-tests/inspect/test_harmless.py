# SPDX-License-Identifier: Apache-2.0
"""Looks at a training leave no trace in it: no state, no signal, no file, no process.

`nox -s ci` looks a few times. `FAIRLEAD_LOOKS=1000` looks that often and marks the test as nightly.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

LOOKS = int(os.environ.get("FAIRLEAD_LOOKS", "5"))
pytestmark = [pytest.mark.nightly] if "FAIRLEAD_LOOKS" in os.environ else []
RANKS = 2
# In a process of its own, in a folder of its own. Ranks count the signals that they get, and how often they reduce.
JOB = """
    import os, signal, sys, time
    import ray

    @ray.remote(num_cpus=0)
    class Trainer:
        def __init__(self, rank, size, port):
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            self.caught = []

        def train(self, until):
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            for one in {*signal.valid_signals()} - KEPT:
                signal.signal(one, lambda number, frame: self.caught.append(number))
            if os.environ["RANK"] == "0":
                open(until + ".begun", "w").close()
            steps, ends = 0, torch.zeros(1)
            while not ends.item():
                time.sleep(0.005)  # as for a device
                ends.fill_(os.path.exists(until))
                dist.all_reduce(ends)
                steps += 1
            return steps, self.caught

        def pid(self):
            return os.getpid()

    # Those that cannot be caught, that a fault of the process raises, and SIGTERM, with which Ray ends workers.
    KEPT = {getattr(signal, "SIG" + name) for name in "KILL STOP SEGV BUS FPE ILL ABRT TRAP SYS TERM".split()}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    size, port = int(sys.argv[2]), int(sys.argv[3])
    ranks = [Trainer.remote(rank, size, port) for rank in range(size)]
    pids = ray.get([one.pid.remote() for one in ranks])
    refs = [one.train.remote(sys.argv[1]) for one in ranks]
    while not os.path.exists(sys.argv[1] + ".begun"):
        if ray.wait(refs, timeout=0.1)[0]:
            ray.get(refs)  # raises what went wrong
    os.unlink(sys.argv[1] + ".begun")
    time.sleep(2)
    print("job", ray.get_runtime_context().gcs_address, *pids, flush=True)
    print(ray.get(refs), flush=True)
"""
# Looks again and again, as `why --watch` does, and prints the verdicts and the processor time of this process.
LOOKER = """
    import json, sys, time
    import ray
    from fairlead_inspect import diagnose
    from fairlead_inspect._fanout import look_at_cluster
    from fairlead_placement import init_ray

    init_ray(address=sys.argv[1])
    kinds, states = {}, {}
    for _ in range(int(sys.argv[2])):
        snapshot = look_at_cluster(None, window_s=0.05, timeout_s=60)
        for one in diagnose(snapshot, after_s=2):
            kinds[one.kind] = kinds.get(one.kind, 0) + one.blames
        for one in snapshot.processes:
            states[one.note] = states.get(one.note, 0) + 1
    print(json.dumps([kinds, states]), flush=True)
    ray.shutdown()
"""
MASKS = ("SigBlk", "SigIgn", "SigCgt", "TracerPid")
# The threads of gRPC's pools, which come and go with the load of the machine.
POOLED = {"event_engine", "grpc_global_tim"}


@pytest.fixture
def job(tmp_path, unused_port):
    """Start a job that reduces again and again; yield its environment, its process, its ranks and what ends it."""
    pytest.importorskip("torch", reason="the ranks meet in torch's gloo")
    folders = {name: tmp_path / name for name in ("home", "tmp", "work")}
    for folder in folders.values():
        folder.mkdir()
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(folders["home"]), "TMPDIR": str(folders["tmp"])}
    # Ray needs a short path.
    folders["ray"] = Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "RAY_TMPDIR": str(folders["ray"])}
    script, until = tmp_path / "train.py", tmp_path / "until"
    script.write_text(textwrap.dedent(JOB))
    command = [sys.executable, str(script), str(until), str(RANKS), str(unused_port)]
    with subprocess.Popen(command, env=env, cwd=folders["work"], stdout=subprocess.PIPE, text=True) as driver:
        _, address, *pids = next(line for line in driver.stdout if line.startswith("job")).split()
        yield env, address, driver, [int(pid) for pid in pids], until, folders.values()
        until.touch()
        driver.wait(60)
    shutil.rmtree(folders["ray"], ignore_errors=True)


def read_status(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return [line for line in status.splitlines() if line.startswith(MASKS)]


def list_threads(pid):
    """Return the names of the threads of a process, but for those of pools. A thread inherits the name of its maker."""
    names = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            names[task.name] = (task / "comm").read_text().strip()
    return {thread: name for thread, name in names.items() if name not in POOLED}


def list_descriptors(pids):
    """Return the files that processes have open, and the number of their other descriptors."""
    links = []
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):
            links.append(f"{path.parent} {os.readlink(path)}")
    files = sorted(link for link in links if " /" in link and " /dev/" not in link)
    return files, len(links) - len(files)


def list_below(pid):
    """Return the titles of the processes below one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for at in found:
        found += [child for child, parent in parents.items() if parent == at]
    titles = {}
    for one in found:
        with contextlib.suppress(OSError):
            titles[one] = Path(f"/proc/{one}/cmdline").read_text().partition("\0")[0]
    return titles


def list_files(folders):
    """Return the files below some folders, but for the logs that Ray writes for each of its processes."""
    return {str(path) for folder in folders for path in folder.rglob("*") if "/logs/" not in str(path)}


def test_no_trace(job, eventually):
    """Many looks at a loop of collectives: nothing of it has changed, and nobody is blamed."""
    env, address, driver, pids, until, folders = job
    before, threads = {pid: read_status(pid) for pid in pids}, {pid: list_threads(pid) for pid in pids}
    files_open, others_open = list_descriptors(pids)
    below, files = list_below(driver.pid), list_files(folders)
    seen, done = set(), threading.Event()

    def watch():
        while not done.wait(0.002):
            seen.update(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    try:
        command = [sys.executable, "-c", textwrap.dedent(LOOKER), address, str(LOOKS)]
        looker = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 + 5 * LOOKS, check=False)
    finally:
        done.set()
        watcher.join()
    took_s = time.monotonic() - began
    assert looker.returncode == 0, looker.stderr
    kinds, notes = json.loads(looker.stdout.splitlines()[-1])
    assert sum(kinds.values()) == 0, kinds
    # The ranks and the driver, each time.
    assert notes.get("", 0) >= 0.9 * LOOKS * (RANKS + 1), notes
    assert seen <= set("RSD"), seen
    assert {pid: read_status(pid) for pid in pids} == before
    started = [(pid, name) for pid in pids for name in list_threads(pid).items() if name[0] not in threads[pid]]
    assert not started, started
    now_open, others_now = list_descriptors(pids)
    assert now_open == files_open
    # gRPC makes sockets and events of its own now and then, but not one for each look.
    assert others_now - others_open < min(LOOKS, 4), (others_now, others_open)
    # Ray ends idle workers when it likes.
    assert eventually(lambda: not list_below(driver.pid).keys() - below.keys()), (list_below(driver.pid), below)
    lost = {title for pid, title in below.items() if pid not in list_below(driver.pid)}
    assert lost <= {"ray::IDLE"}
    assert list_files(folders) == files
    until.touch()
    ended = json.loads(driver.stdout.readline().replace("(", "[").replace(")", "]"))
    assert [caught for _, caught in ended] == [[]] * RANKS
    steps = {count for count, _ in ended}
    sys.stdout.write(f"{LOOKS} looks in {took_s:.0f} s at {RANKS} ranks, which took {max(steps):,} steps: no trace\n")
