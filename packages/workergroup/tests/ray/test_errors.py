# SPDX-License-Identifier: Apache-2.0
"""Tests of the display of errors: short tracebacks, and each error once."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from fairlead_workergroup import CallTimeoutError, WorkerGroupError


def chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and the errors that a traceback shows before it."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def internal_frames(error: BaseException) -> list[str]:
    """Return the functions of Fairlead and Ray that a traceback shows."""
    found = []
    for one in chain(error):
        traceback = one.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if frame.f_globals["__name__"].partition(".")[0] in ("ray", "fairlead_workergroup"):
                found.append(frame.f_code.co_qualname)
            traceback = traceback.tb_next
    return found


async def awaited(call):
    return await call


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda group: group.call("fail", [3]).result(), 1),
        (lambda group: asyncio.run(awaited(group.call("fail", [3]))), 2),
        (lambda group: group.get_all_worker_results(group.run_all_workers_single_data("fail", [3])), 1),
        (lambda group: list(group.call("items_then_fail", 1).stream()), 2),
        (lambda group: list(group.map("fail", [[0, 5]])), 2),
        (lambda group: group.call("sleep", 0.5).result(timeout=0), 1),
    ],
)
def test_tracebacks_are_short(group, make, most):
    """A worker's error and a timeout show the user's frames and the call, without the frames of Fairlead and Ray."""
    with pytest.raises((ValueError, KeyError, CallTimeoutError)) as caught:
        make(group)
    assert len(internal_frames(caught.value)) <= most


def test_the_users_frames_stay(group):
    """The frames of the user's own code that Fairlead calls are kept; so are all frames of an unexpected error."""

    def items():
        yield [3]
        raise WorkerGroupError("mine")

    with pytest.raises(WorkerGroupError, match="mine") as caught:
        list(group.map("fail", items(), max_in_flight=1))
    assert caught.traceback[-1].name == "items"

    def break_down():
        yield 1 / 0

    with pytest.raises(ZeroDivisionError) as unexpected:
        list(group.map("fail", break_down(), max_in_flight=1))
    assert len(internal_frames(unexpected.value)) > len(internal_frames(caught.value))


def find_address():
    return ray.get_runtime_context().gcs_address


LATE = """
import asyncio, gc, os, sys, time
import ray
from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup

class Worker:
    def rank(self):
        return int(os.environ["RANK"])

    def wait_for(self, gate):
        while self.rank() and not os.path.exists(gate):
            time.sleep(0.01)

    def fail(self, gate):
        self.wait_for(gate)
        raise ValueError(f"error of rank {self.rank()}")

    def items(self, gate):
        self.wait_for(gate)
        yield 1
        raise ValueError(f"error of rank {self.rank()}")

    def work(self, item):
        raise ValueError(f"error of {item}")

async def awaited(call):
    try:
        await call
    except ValueError:
        return 1

def raised(call):
    try:
        call()
    except ValueError:
        return 1

def gate(name):
    return os.path.join(sys.argv[1], name)

def settle(name):
    open(gate(name), "w").close()
    for _ in range(2):
        group.call("rank").result()
    gc.collect()

ray.init(address=sys.argv[2], logging_level="error", log_to_driver=False)
with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
    done = [raised(group.call("fail", gate("a")).result)]
    settle("a")
    done.append(raised(lambda: group.get_all_worker_results(group.run_all_workers_single_data("fail", gate("b")))))
    settle("b")
    done.append(asyncio.run(awaited(group.call("fail", gate("a")))))  # all fail at once
    settle("a")
    call = group.call("items", gate("c"))
    done.append(raised(call.result))
    settle("c")
    del call
    settle("c")
    done.append(raised(lambda: list(group.map("work", range(20)))))
    settle("a")
    call = group.call("fail", gate("d"))
    done.append(len(call.cancel()) > 0)
    settle("d")
    del call
    settle("d")
print(done)
"""


def test_late_errors_are_not_printed(local_ray, tmp_path):
    """After a call has raised the error of one rank, later errors of other ranks are not printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", textwrap.dedent(LATE), str(tmp_path), find_address()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == "[1, 1, 1, 1, 1, True]\n"


def test_ray_is_shut_down_while_errors_are_late(local_ray):
    """`ray.shutdown()` waits for the thread that retrieves late errors; otherwise Ray would end the process."""
    source = """
        import sys
        import threading

        import ray

        sys.path.insert(0, sys.argv[2])
        from faults import leave_late_errors

        ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
        looking = threading.Event()
        count_left = leave_late_errors(1000, looking)
        looking.wait(30)
        ray.shutdown()
        print(count_left(), "references are left")
        """
    folder = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(source), find_address(), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0 references are left"), done.stderr
