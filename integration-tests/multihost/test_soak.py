# SPDX-License-Identifier: Apache-2.0
"""Test of a group under random faults: every call returns the correct result or raises the right error."""

import contextlib
import ctypes
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallTimeoutError,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    Shard,
    Timeouts,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)
from fairlead_workergroup.testing import kill, resume, stop

pytestmark = pytest.mark.nightly

SECONDS = float(os.environ.get("FAIRLEAD_SOAK_S", "120"))
SEED = int(os.environ.get("FAIRLEAD_SOAK_SEED", "0"))

FAULTS = ["kill", "kill", "slow", "hang sleep", "hang native", "hang native-gil", "hang stop"]
# How long a fault waits for a worker that is busy.
BUSY_S = 2


class Squarer:
    """The worker that is called while faults are injected."""

    pause_s = 0

    def square(self, value):
        time.sleep(self.pause_s)
        return value * value

    def slow_down(self, seconds):
        self.pause_s = seconds

    def hang(self, how, folder):
        """Hang until `let_continue`: in Python, or in a system call that does not return, with the GIL or without."""
        (folder / "begun").touch()
        while how == "sleep" and not (folder / "over").exists():
            time.sleep(0.05)
        if how != "sleep":
            library = ctypes.PyDLL(None) if how == "native-gil" else ctypes.CDLL(None)
            os.close(library.open(bytes(folder / "fifo"), os.O_RDONLY))


def let_continue(folder):
    """End the hang with this folder, or the one that has yet to begin."""
    (folder / "over").touch()
    os.open(folder / "fifo", os.O_RDWR)  # To open a pipe for reading waits until it is open for writing.


class Faults:
    """A thread that injects a fault into a random rank about every second."""

    def __init__(self, group, rng, counts):
        self.affected = set()
        self._group, self._rng, self._counts = group, rng, counts
        # What ends each hang.
        self._hangs = contextlib.ExitStack()
        # Held while a worker is made to hang, and while none may.
        self._hanging = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._inject_faults, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(60)
        self._hangs.close()

    def explain(self, ranks, error):
        """Raise AssertionError if an error names no ranks, or ranks without an injected fault."""
        if not ranks or not ranks <= self.affected:
            raise AssertionError(f"no fault was injected into ranks {sorted(ranks - self.affected)}") from error

    @contextlib.contextmanager
    def without_hangs(self):
        """Let workers that hang continue, and kill others or slow them down only."""
        with self._hanging:
            self._hangs.close()
            yield

    def end(self, rank):
        """Kill a stuck worker."""
        self.affected.add(rank)
        with contextlib.suppress(WorkerGroupError):  # Another fault may have killed it already.
            kill(self._group, rank)

    def _inject_faults(self):
        while not self._end.wait(self._rng.uniform(0.3, 2.0)):
            rank = self._rng.randrange(self._group.world_size)
            fault = self._rng.choice(FAULTS)
            self.affected.add(rank)
            if fault.startswith("hang") and not self._hanging.acquire(blocking=False):
                fault = "slow"
            try:
                if fault == "kill":
                    kill(self._group, rank)
                elif fault == "slow":
                    self._slow_down(rank, self._rng.choice([0, 0.2, 1.0]))
                elif fault == "hang stop":
                    stop(self._group, rank)
                    self._hangs.callback(self._resume, rank)
                else:
                    self._hang(rank, fault.split()[1])
                self._counts[fault] += 1
            except (IndexError, ValueError, TimeoutError, WorkerGroupError):  # The rank may have left the group.
                self._counts["fault that found its worker busy or dead"] += 1
            finally:
                if fault.startswith("hang"):
                    self._hanging.release()

    def _call(self, rank, *args):
        return self._group.at(**self._group.sharding_annotations.get_worker_coords(rank)).call(*args, timeout=BUSY_S)

    def _slow_down(self, rank, seconds):
        call = self._call(rank, "slow_down", seconds)
        try:
            call.result()
        except TimeoutError:
            call.cancel()
            raise

    def _hang(self, rank, how):
        folder = Path(tempfile.mkdtemp())
        os.mkfifo(folder / "fifo")
        call = self._call(rank, "hang", how, folder)
        self._hangs.callback(let_continue, folder)
        deadline = time.monotonic() + BUSY_S
        while not (folder / "begun").exists():
            if time.monotonic() > deadline:
                let_continue(folder)
                call.cancel()
                raise TimeoutError(f"rank {rank} does not begin to hang")
            time.sleep(0.02)

    def _resume(self, rank):
        with contextlib.suppress(IndexError, WorkerGroupError):  # The rank may have left the group.
            resume(self._group, rank)


@pytest.mark.timeout(SECONDS + 700)
def test_soak(hosts):
    """With kills, hangs, resizes and moves, calls end correctly, and no resources are left behind."""

    def driver(seconds, seed):
        rng, counts = random.Random(seed), Counter()
        options = {"restart": Restart(on_failure=True, max_restarts=100_000), "timeouts": Timeouts(start_s=240)}
        options["sharding_annotations"] = NamedSharding.from_shape(dp=3, tp=2)
        with (
            RayVirtualCluster([2, 2, 2, 2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Squarer, workers_per_node=[2, 2, 1, 1], **options) as group,
        ):

            def change():
                """Change the members; a worker that hangs or dies meanwhile may prevent or break that."""
                size = group.sharding_annotations.get_axis_size("dp")
                name = rng.choice(["move", *["grow"] * (size < 4), *["shrink"] * (size > 2)])
                wanted = rng.randint(size + 1, 4) if name == "grow" else rng.randint(2, max(2, size - 1))
                # A worker that hangs keeps a resize from beginning.
                calm = faults.without_hangs() if rng.random() < 0.8 else contextlib.nullcontext()
                try:
                    with calm:
                        if name == "move":
                            group.restart([rng.randrange(group.world_size)], elsewhere=True, timeout=30)
                        else:
                            group.resize(dp=wanted, timeout=30)
                    counts[name] += 1
                except WorkerFailureError as error:
                    # Of the ranks of a broken resize, a dead one has the kind "killed", and a late one "resize-failed".
                    faults.explain({failure.rank for failure in error.failures}, error)
                    counts["a broken resize"] += 1
                except (ResizeTimeoutError, WorkerStartError, ValueError):
                    # Of a move also a ValueError, when all slots are in use.
                    counts[f"{name} that changed nothing"] += 1

            end = time.monotonic() + seconds
            changed = time.monotonic()
            with Faults(group, random.Random(seed + 1), counts) as faults:
                while time.monotonic() < end:
                    if time.monotonic() - changed > rng.uniform(2, 6):
                        changed = time.monotonic()
                        change()
                    values = [rng.randrange(10**6) for _ in range(group.sharding_annotations.get_axis_size("dp"))]
                    try:
                        call = group.call(
                            "square", Shard(values, "dp"), collect="dp", timeout=10, retries=rng.choice([0, 0, 3])
                        )
                        assert call.result() == [value * value for value in values]
                        counts["right answer"] += 1
                    except CallTimeoutError as error:
                        if not error.late:  # it waited for a restart
                            counts["call that was not sent in time"] += 1
                            continue
                        faults.explain({late.rank for late in error.late}, error)
                        counts["CallTimeoutError"] += 1
                        for stuck in group.detect_stuck_workers(2.0, dump_stacks=False):
                            faults.end(stuck.rank)
                            counts["stuck worker ended"] += 1
                        call.cancel()
                    except WorkerFailureError as error:
                        faults.explain({failure.rank for failure in error.failures}, error)
                        if not {failure.kind for failure in error.failures} <= {"killed", "start-failed"}:
                            raise
                        counts["WorkerFailureError"] += 1
            restarts = sum(status.restarts for status in group.get_worker_status())
            for _ in range(50):
                with contextlib.suppress(WorkerFailureError, CallTimeoutError):
                    assert group.call("square", 3, timeout=60).result() == [9] * group.world_size
                    break
                for stuck in group.detect_stuck_workers(2.0, dump_stacks=False):
                    faults.end(stuck.rank)
            else:
                raise AssertionError("the group did not recover")
            assert group.shutdown()
        return {**dict(sorted(counts.items())), "restarts": restarts}

    with hosts.driver(driver, SECONDS, SEED) as driving:
        counts = driving.step(timeout_s=SECONDS + 400)
        print(f"\nin {SECONDS:g} s:", *(f"{number:6} {what}" for what, number in counts.items()), sep="\n  ")  # noqa: T201
        assert counts["right answer"] > 0
        assert counts["restarts"] > 0
        assert sum(counts.get(name, 0) for name in ("grow", "shrink", "move")) > 0
