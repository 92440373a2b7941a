# SPDX-License-Identifier: Apache-2.0
"""What is special about a group whose workers are threads: isolation, context, its end, and what it refuses."""

import asyncio
import collections
import gc
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    CallTimeoutError,
    PerWorker,
    Shard,
    WorkerGroupError,
    WorkerStartError,
    current_worker,
    report_progress,
)
from fairlead_workergroup.exceptions import RemoteError
from fairlead_workergroup.testing import LocalGroup, hang, kill

from ..faults import limit_closes_after_errors
from ..local import no_ray  # noqa: F401  a fixture of all tests
from ..ray.test_kinds import Collecting, Decorated, check_decorated

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
# Set when a constructor or a method waits for a file, by its name.
running: dict[str, threading.Event] = {}


class Unlucky(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.one, self.two = one, two


class Worker:
    def __init__(self, *values, **options):
        self.values, self.options = values, options
        self.variables = {name: os.environ.get(name) for name in (*RANK_NAMES, "FROM_CLASS")}

    @staticmethod
    def configure_worker(num_gpus, bundle_indices):
        return {"num_gpus": 1}, {"FROM_CLASS": str(bundle_indices)}, {"configured": bundle_indices}

    def what_it_got(self):
        return self.values, self.options, self.variables

    def keep(self, value):
        self.kept = value
        return value

    def change(self, value):
        value.append(current_worker().rank)
        return value

    def kept_value(self):
        return self.kept

    def facts(self):
        me = current_worker()
        with me.waiting():
            report_progress(step=me.rank, message="here")
        return me.rank, me.world_size, me.name, dict(me.coords), me.epoch, me.sharding.get_worker_coords(me.rank)

    async def where(self):
        await asyncio.sleep(0)
        return current_worker().rank, await asyncio.to_thread(lambda: current_worker().rank)

    async def leave_a_task(self):
        self.task = asyncio.create_task(asyncio.sleep(600))

    def elsewhere(self):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(current_rank).result()

    def thread(self):
        return threading.current_thread().name

    def wait_for(self, gate, ranks=range(8)):
        while current_worker().rank in ranks and not os.path.exists(gate):
            running.get(str(gate), threading.Event()).set()
            time.sleep(0.005)
        return current_worker().rank

    def endless(self):
        while True:
            yield 1

    def exit(self):
        sys.exit(3)

    def unlucky(self):
        raise Unlucky("one", 2)

    def unpicklable(self):
        raise ValueError(threading.Lock())

    def put(self):
        return ray.put(1)

    def returns_a_reference(self):
        return [ray.ObjectRef.nil()]

    def raises_a_reference(self):
        error = RayError("lost")
        error.ref = ray.ObjectRef.nil()
        raise error

    @ray.method(_generator_backpressure_num_objects=2)
    def ahead(self):
        yield 1


def current_rank():
    try:
        return current_worker().rank
    except RuntimeError:
        return None


class Failing:
    def __init__(self, failing, gate=None):
        rank = int(os.environ["RANK"])
        if rank in failing:
            raise Unlucky("rank", rank)
        if gate is not None and rank == 1:
            running[gate].set()
            while not os.path.exists(gate):
                time.sleep(0.005)


def find_traces():
    """Return the threads, the open files, the variables and the module by which a group could leave a trace."""
    files = [read_link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    kept = [file for file in files if "fairlead-worker" in file or "eventpoll" in file]
    threads = [one.name for one in threading.enumerate() if one.name.startswith(("fairlead-local", "asyncio_"))]
    return threads, kept, {name: os.environ.get(name) for name in RANK_NAMES}, "_fairlead_worker" in sys.modules


def read_link(path):
    """Return where a link leads, "" if another thread has closed its file meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def leaves_nothing(eventually):
    """Check that no thread, file, variable or module of a group is left."""
    before = find_traces()
    yield
    assert eventually(lambda: find_traces() == before, 20), (before, find_traces())


@pytest.fixture
def group():
    with LocalGroup(Worker, dp=2, tp=2) as group:
        yield group


class TestIsolation:
    """A worker shares no object with its caller or with other workers."""

    def test_arguments_and_results(self, group):
        """Lists, large arrays and the arguments of the constructor are copied on each way."""
        given, array = [7], np.zeros(100_000)
        results = group.call("change", given).result()
        assert (given, results) == ([7], [[7, 0], [7, 1], [7, 2], [7, 3]])
        kept = group.call("keep", [1], collect=())
        assert group.call(lambda worker, value: value.append(1), kept).result() == [None] * 4
        assert group.call("kept_value").result() == [[1]] * 4
        call = group.call("keep", array)
        array[:] = 1.0
        assert [result.sum() for result in call.result()] == [0.0] * 4
        one, two, *_ = group.call("kept_value").result()
        assert not np.shares_memory(one, two)
        kept = group.call("keep", given).result()
        kept[0].append("mine")
        assert group.call("kept_value").result() == [[7]] * 4

    def test_the_constructor(self):
        """So are the arguments of the constructor, small and large, and answers of other groups among them."""
        small, large = ["x"], [np.ones(3)]
        with LocalGroup(Worker, workers=2) as other:
            answer = other.call("keep", 5, collect=())
            with LocalGroup(Worker, workers=2, init_args=[small, answer], init_kwargs={"large": large}) as group:
                small.append("later")
                large.clear()
                group.call(lambda worker: worker.values[0].append("worker")).result()
                assert small == ["x", "later"]
                values, options, _ = group.call("what_it_got").result()[1]
        assert values == (["x", "worker"], 5)
        assert (len(options["large"]), options["configured"]) == (1, (0, [1]))

    def test_a_class_that_cannot_be_imported(self):
        """A class of a test works, and its exceptions are those that the test knows."""

        class Broken(Exception):
            pass

        class Inside:
            def fail(self):
                raise Broken("inside")

        with LocalGroup(Inside, workers=1) as group, pytest.raises(Broken, match="inside"):
            group.call(Inside.fail).result()


class TestContext:
    """What code in a worker learns about its worker, and where."""

    def test_current_worker(self, group):
        """Each worker has its own facts and its own record; the test's thread has none."""
        facts = group.call("facts").result()
        coords = [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}, {"dp": 1, "tp": 1}]
        assert [one[:2] for one in facts] == [(rank, 4) for rank in range(4)]
        assert [one[3] for one in facts] == [one[5] for one in facts] == coords
        assert len({one[2] for one in facts}) == 4
        records = [worker._host._fairlead_record.read() for worker in group._workers]
        assert [(one["step"], one["message"]) for one in records] == [(rank, "here") for rank in range(4)]
        assert current_rank() is None
        report_progress(step=3)

    def test_coroutines_and_threads(self, group):
        """Coroutines and `asyncio.to_thread` belong to the worker; other threads belong to none."""
        assert group.call("where").result() == [(rank, rank) for rank in range(4)]
        assert group.call("elsewhere").result() == [None] * 4
        assert group.call("thread").result() == [f"fairlead-local-{rank}" for rank in range(4)]
        group.call("leave_a_task").result()

    def test_variables(self, monkeypatch):
        """The variables of a rank, and of its class, are set in its constructor, and restored after it."""
        monkeypatch.setenv("RANK", "mine")
        before = dict(os.environ)
        with LocalGroup(Worker, workers=2) as group:
            assert dict(os.environ) == before
            found = [variables for _, _, variables in group.call("what_it_got").result()]
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": None}
        assert found == [
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "FROM_CLASS": f"(0, [{rank}])"} for rank in range(2)
        ]
        assert dict(os.environ) == before

    def test_groups_that_start_at_the_same_time(self):
        """Constructors of several groups see the variables of their own rank."""

        def start(size):
            with LocalGroup(Worker, workers=size) as group:
                return [one["RANK"] + "/" + one["WORLD_SIZE"] for _, _, one in group.call("what_it_got").result()]

        with ThreadPoolExecutor(8) as pool:
            sizes = [1, 2, 3, 4] * 4
            assert list(pool.map(start, sizes)) == [[f"{rank}/{size}" for rank in range(size)] for size in sizes]


class TestCalls:
    """What the tests of calls do not show."""

    def test_order(self, group):
        """A worker runs the calls of several threads one at a time, each in its order."""
        with ThreadPoolExecutor(8) as pool:
            calls = list(pool.map(lambda at: [group.call("keep", (at, n)) for n in range(20)], range(8)))
        results = [[call.result()[3] for call in own] for own in calls]
        assert results == [[(at, n) for n in range(20)] for at in range(8)]

    def test_decorated_methods(self):
        """Each kind of method is run as by Ray."""
        with LocalGroup(Decorated, workers=1) as group:
            check_decorated(group)
        with LocalGroup(Collecting, workers=1) as group, pytest.raises(TypeError, match="its decorator returned list"):
            group.call("items").result()

    def test_two_groups(self, group, tmp_path):
        """Answers go from group to group, and a call that waits for one says whose it is."""
        with LocalGroup(Worker, workers=2) as other:
            assert other.call("keep", PerWorker(group.at(dp=0).call("facts"))).result()[1][0] == 1
            gate = tmp_path / "gate"
            group.call("wait_for", gate, ranks=[1])
            late = group.at(dp=0, tp=1).call("facts", collect=())
            with pytest.raises(CallTimeoutError, match="from the call of 'facts' of group 'Worker'"):
                other.at(worker=0).call("keep", late).result(timeout=0.1)
            gate.touch()

    def test_errors(self, group):
        """Errors keep their class and attributes, and their cause has the traceback in the worker."""
        call = group.call("unlucky")
        assert call.wait(60)
        with pytest.raises(Unlucky) as caught:
            call.result()
        assert (caught.value.one, caught.value.two) == ("one", 2)
        assert "raised by rank 0 (dp=0, tp=0) on node local (127.0.0.1), pid " in caught.value.__notes__[0]
        assert 'raise Unlucky("one", 2)' in str(caught.value.__cause__)
        assert "/_local/" not in str(caught.value.__cause__)
        with pytest.raises(ValueError, match="lock"):
            group.call("unpicklable").result()
        with pytest.raises(WorkerGroupError, match=r"'exit' called sys.exit\(3\).*use launch"):
            group.call("exit").result()

    def test_a_result_that_cannot_be_pickled(self, group):
        """It is an error of the worker, as by Ray, and the worker goes on."""
        with pytest.raises(TypeError, match="cannot pickle"):
            group.call(lambda worker: threading.Lock()).result()
        assert group.call("thread", collect=()).result() == "fairlead-local-0"

    def test_statistics(self, group):
        """A call knows what carried it."""
        call = group.call("keep", [np.ones(1000)])
        call.result()
        assert (call.statistics().route, call.statistics().puts) == ("local", 1)
        assert group.at().explain("keep", 1).route == "local"


class TestStart:
    @pytest.mark.parametrize(
        ("worker", "options", "message"),
        [
            (lambda: 1, {"workers": 2}, "a worker must be a class or its full name"),
            ("Policy", {"workers": 2}, "must be 'package.module.Class'"),
            (Worker, {}, "LocalGroup needs the number of workers"),
            (Worker, {"workers": 2, "dp": 2}, "and not both"),
            (Worker, {"workers": 2, "sharding_annotations": NamedSharding.from_shape(dp=2)}, "only one of these"),
            (Worker, {"sharding_annotations": 3}, "must be a NamedSharding, got int"),
            (Worker, {"workers": 0}, "must be at least 1, got 0"),
            (Worker, {"dp": 2, "tp": 0}, "axis 'tp' must be at least 1, got 0"),
            (Worker, {"dp": 2.0}, "dp=2.0 is not an axis"),
            (Worker, {"dp": 2, "timeout": 3}, "Did you mean timeout_s?"),
            (Worker, {"dp": 2, "gpus_per_worker": 1}, "LocalGroup has no option 'gpus_per_worker': give it to launch"),
            (Worker, {"dp": 2, "restart": 1}, "LocalGroup has no option 'restart': give it to RayWorkerGroup"),
            (Worker, {"workers": 2, "init_args": "text"}, "init_args must be a list or tuple"),
            (Worker, {"workers": 2, "init_kwargs": [1]}, "init_kwargs must be a dict"),
            (Worker, {"workers": 2, "timeout_s": 0}, "timeout_s must be a positive number of seconds"),
            (
                Worker,
                {"workers": 2, "init_args": [threading.Lock()]},
                "argument 0 of the constructor of 'Worker': a lock",
            ),
            (Worker, {"workers": 2, "init_args": [ray.ObjectRef.nil()]}, "Use launch"),
            (Worker, {"workers": 2, "init_kwargs": {"a": [ray.ObjectRef.nil()]}}, "use launch"),
        ],
    )
    def test_refused(self, worker, options, message):
        """Wrong arguments are refused as `launch` refuses them."""
        with pytest.raises((TypeError, ValueError)) as caught:
            LocalGroup(worker, **options)
        assert message in str(caught.value)

    @pytest.mark.parametrize("name", ["no_such_module.Class", "collections.NoSuchClass", "os.path"])
    def test_a_wrong_name(self, name):
        """A class that cannot be imported is a `WorkerStartError`."""
        with pytest.raises(WorkerStartError, match=f"'{name}' cannot be used as a worker"):
            LocalGroup(name, workers=1)

    def test_a_constructor_that_fails(self):
        """The error is that of `launch`: the rank, its coordinates and its traceback. Later ranks do not start."""
        with pytest.raises(WorkerStartError, match=r"its constructor raised Unlucky.*: rank and 1") as caught:
            LocalGroup(Failing, dp=2, tp=2, init_args=[[1]])
        error = caught.value
        assert (error.rank, error.coords, error.node_id) == (1, {"dp": 0, "tp": 1}, "local")
        assert 'raise Unlucky("rank", rank)' in error.remote_traceback
        assert "of the other 3 workers 1 had started, 2 had not (ranks 2, 3)" in str(error)

    def test_a_constructor_that_is_late(self, gate, monkeypatch, eventually):
        """It is named; the variables are those of before, and other groups start while it hangs."""
        limit_closes_after_errors(monkeypatch, 0.1)
        running[str(gate)] = threading.Event()
        with pytest.raises(WorkerStartError, match=r"3 of 4 workers had not finished their constructor.*rank 1"):
            LocalGroup(Failing, dp=2, tp=2, init_args=[[], str(gate)], timeout_s=0.3)
        assert running[str(gate)].is_set()
        assert "RANK" not in os.environ
        with LocalGroup(Worker, workers=2, timeout_s=20) as group:
            assert [one["RANK"] for _, _, one in group.call("what_it_got").result()] == ["0", "1"]
        gate.touch()

    def test_by_name(self):
        """A class is imported by its full name, and axes are those of `NamedSharding`."""
        axes = NamedSharding([[1, 0]], ["dp", "tp"])
        with LocalGroup("collections.Counter", sharding_annotations=axes, init_args=["aab"]) as group:
            assert (group.world_size, group.sharding_annotations) == (2, axes)
            assert group.call(collections.Counter.most_common, 1).result() == [[("a", 2)]] * 2
            assert repr(group) == "LocalGroup('Counter', {'dp': 1, 'tp': 2}, 2 workers)"
            group.call("update", Shard(["b", "bb"], "tp")).result()
            assert group.call("get", "b").result() == [3, 2]


class TestRefused:
    """What needs processes or an object store is refused, with the advice to use `launch`."""

    def test_references(self, group):
        """References do not travel, in neither direction."""
        reference = ray.ObjectRef.nil()
        for value in (reference, [reference], Shard([reference, 1], "dp")):
            for use in (group.call, group.at().explain):
                with pytest.raises((TypeError, ValueError), match=r"[uU]se launch"):
                    use("keep", value)
        with pytest.raises(TypeError, match=r"ObjectRefs.*use launch"):
            group.call("returns_a_reference").result()
        with pytest.raises(RemoteError, match=r"'lost'.*ObjectRefs.*use launch"):
            group.call("raises_a_reference").result()
        with pytest.raises(WorkerGroupError, match=r"No Ray runs.*Use launch"):
            _ = group.call("thread").refs
        with pytest.raises(WorkerGroupError, match=r"No Ray runs.*Use launch"):
            next(group.call("endless").refs[0])

    def test_a_ray_in_a_worker(self, group):
        """A worker that asks for a Ray gets an error, and starts none."""
        with pytest.raises(Exception, match="ray"):
            group.call("put").result()
        assert not ray.is_initialized()

    def test_members_of_other_groups(self, group, gate):
        """Resizes, restarts, lanes, handles, faults and kills are refused."""
        for name in ("resize", "lane", "restart_failed_workers", "replace", "shutdown", "handle", "inspect"):
            assert not hasattr(group, name)
            with pytest.raises(AttributeError, match=f"no '{name}'.*threads of this process: use launch"):
                getattr(group, name)
        with pytest.raises(ValueError, match="restarts no workers"):
            group.call("thread", retries=1)
        with pytest.raises(ValueError, match=r"limits how far it may be ahead of its reader\. Use launch"):
            group.call("ahead")
        for fault in (kill, hang):
            with pytest.raises(TypeError, match="as `launch` starts one"):
                fault(group, 0)
        with pytest.raises(AttributeError, match="not an actor: call 'thread' through the group"):
            group.at(dp=0).workers[0].thread.remote()
        with pytest.raises(TypeError, match="cannot be sent"):
            pickle.dumps(group)
        began = running[str(gate)] = threading.Event()
        call = group.call("wait_for", str(gate))
        assert began.wait(60)
        with pytest.raises(WorkerGroupError, match="threads cannot be killed"):
            call.cancel(force=True)
        gate.touch()

    @pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
    def test_collectives(self, group):
        """The helpers of torch refuse to join the workers."""
        from fairlead_workergroup.torch import init_process_group

        with pytest.raises(RuntimeError, match=r"one default process group of torch\. Use launch"):
            group.call(lambda worker: init_process_group("gloo")).result()


class TestEnd:
    def test_after_the_end(self, group):
        """Answers that have arrived stay; later calls are refused."""
        call = group.call("thread")
        assert call.wait(60)
        group.close()
        group.close()
        assert call.result()[0] == "fairlead-local-0"
        with pytest.raises(WorkerGroupError, match=r"LocalGroup.*shut down"):
            group.call("thread")

    def test_a_late_worker(self, gate):
        """`close` names what is late, and drops what has not begun; it can be repeated."""
        group = LocalGroup(Worker, dp=2, tp=1)
        began = running[str(gate)] = threading.Event()
        late = group.call("wait_for", str(gate), ranks=[1])
        assert began.wait(60)
        queued = group.at(dp=1).call("thread")
        with pytest.raises(WorkerGroupError, match=r"1 of 2 workers.*\n  rank 1 \(dp=1, tp=0\).*in 'wait_for' for"):
            group.close(timeout=0.1)
        for call in (late, queued):
            with pytest.raises(WorkerGroupError, match="the LocalGroup has been closed"):
                call.result(timeout=60)
        gate.touch()
        group.close()

    def test_endless_generators(self):
        """A generator ends at its next item."""
        with LocalGroup(Worker, workers=2) as group:
            stream = group.call("endless").stream()
            assert next(stream).value == 1

    def test_waiting_calls(self, group, tmp_path):
        """Threads and coroutines that wait for a call get an error at the end."""
        other = LocalGroup(Worker, workers=1)
        gate = tmp_path / "gate"
        blocking = group.call("wait_for", str(gate), collect=())
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(other.call("keep", blocking).result)
            time.sleep(0.05)  # long enough for that thread to wait; the rest is right in any case
            other.close()
            with pytest.raises(WorkerGroupError, match="closed"):
                waiting.result(60)
        gate.touch()

    def test_an_error_in_the_block(self, gate, monkeypatch):
        """The error stays, and has a note about late workers."""
        limit_closes_after_errors(monkeypatch, 0.1)
        began = running[str(gate)] = threading.Event()

        def fail():
            with LocalGroup(Worker, workers=2) as group:
                group.call("wait_for", str(gate), ranks=[1])
                assert began.wait(60)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine") as caught:
            fail()
        assert "rank 1" in caught.value.__notes__[0]
        gate.touch()

    def test_without_close(self, eventually):
        """The threads of a group that nobody refers to end."""
        group = LocalGroup(Worker, workers=2)
        group.call("facts").result()
        del group
        gc.collect()
        assert eventually(lambda: not find_traces()[0])

    @pytest.mark.parametrize("where", ["constructor", "call"])
    def test_ctrl_c(self, where, gate, monkeypatch, eventually):
        """Ctrl-C ends the wait and the group."""
        limit_closes_after_errors(monkeypatch, 0.1)
        began = running[str(gate)] = threading.Event()

        def interrupt():
            assert began.wait(60)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        def wait():
            if where == "constructor":
                LocalGroup(Failing, workers=2, init_args=[[], str(gate)])
            with LocalGroup(Worker, workers=2) as group:
                group.call("wait_for", str(gate), ranks=[1]).result()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt) as caught:
                wait()
        assert where == "constructor" or "in 'wait_for'" in caught.value.__notes__[0]
        assert "RANK" not in os.environ
        gate.touch()


def test_a_program():
    """A program leaves nothing, does not start Ray, and ends while a forgotten group waits for calls."""
    source = """
        import os, sys, threading
        from fairlead_workergroup.testing import LocalGroup

        class Worker:
            def rank(self):
                return threading.current_thread().name

        before = dict(os.environ), set(sys.modules)
        with LocalGroup(Worker, dp=2) as group:
            print(group.call("rank", timeout=60).result())
        import ray
        print(ray.is_initialized(), threading.active_count(), dict(os.environ) == before[0])
        print("_fairlead_worker" in sys.modules)
        forgotten = LocalGroup("collections.Counter", workers=2)
    """
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['fairlead-local-0', 'fairlead-local-1']\nFalse 1 True\nFalse\n"
