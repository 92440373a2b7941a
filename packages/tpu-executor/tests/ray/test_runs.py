# SPDX-License-Identifier: Apache-2.0
"""Runs on healthy slices: on which hosts, in which order, with which variables, and how often."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ray

from fairlead_placement import ResourceInsufficientError
from fairlead_placement.extension import claim_slots
from fairlead_tpu_executor import (
    InsufficientSlicesError,
    JobFailed,
    JobSucceeded,
    RayExecutor,
    SlicePool,
    TpuAcceleratorConfig,
    TpuExecutorError,
    _host,
    _pool,
)

ONE = TpuAcceleratorConfig("v4-16", scale_timeout_s=150)
OURS = ("EXECUTOR_", "MEGASCALE_", "TPU_")


def where():
    return ray.get_runtime_context().get_node_id(), os.getpid()


def variables():
    return dict(os.environ)


def groups(pool):
    return [slot.placement_group.id for slot in pool.slots()]


@pytest.mark.smoke
def test_one_slice(slices):
    """Each host is called once, in the order of the worker ids, although the hosts started in the other order."""
    status = RayExecutor.execute(where, ONE)
    assert isinstance(status, JobSucceeded)
    assert [node_id for node_id, _ in status.result] == [slices.node_id("slice-1", worker) for worker in (0, 1)]
    assert (status.info.name, status.info.state, status.info.kind, status.info.attempt) == (
        "where",
        "succeeded",
        "v4-16",
        1,
    )
    assert [one.slice_name for one in status.info.slices] == ["slice-1"]


@pytest.mark.smoke
def test_two_slices(slices, coordinator_port):
    """Results come slice by slice, flat or nested; every host has the coordinators; stale variables are overridden."""
    config = TpuAcceleratorConfig("v4-16", 2, scale_timeout_s=150)
    nested = RayExecutor.autoscale_execute(variables, config, flatten=False).result
    assert [len(of_slice) for of_slice in nested] == [2, 2]
    first = slices.names()
    for at, of_slice in enumerate(nested):
        for worker, found in enumerate(of_slice):
            assert {name: value for name, value in found.items() if name.startswith("MEGASCALE_")} == {
                "MEGASCALE_COORDINATOR_ADDRESS": nested[0][0]["MEGASCALE_COORDINATOR_ADDRESS"],
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_PORT": coordinator_port,
                "MEGASCALE_SLICE_ID": str(at),
            }
            assert found["EXECUTOR_CALL_SLICE"] == str(at)
            assert found["EXECUTOR_CALL_INDEX"] == found["TPU_HOST_ID"] == found["TPU_WORKER_ID"] == str(worker)
            assert found["TPU_SLICE_NAME"] == found["TPU_NAME"] == first[at]
            assert (found["TPU_POD_COUNT"], found["TPU_VERSION"]) == ("2", "v4-16")
    assert nested[0][0]["MEGASCALE_COORDINATOR_ADDRESS"].endswith(f":{coordinator_port}")
    coordinators = [{found["EXECUTOR_COORDINATOR_ADDRESS"] for found in of_slice} for of_slice in nested]
    assert len(coordinators[0]) == len(coordinators[1]) == len(coordinators[0] | coordinators[1]) - 1 == 1
    flat = RayExecutor.autoscale_execute(where, config).result
    assert [node_id for node_id, _ in flat] == [
        slices.node_id(name, worker) for name in ("slice-1", "slice-2") for worker in (0, 1)
    ]


def test_environment_of_one_slice(slices):
    """Our variables override the user's, and these the node's, but for TPU_NAME; runtime_env keys are not variables.

    The nodes of the second slice have stale variables of several slices, which are removed with one slice.
    """
    env = {"MINE": "1", "TPU_TOPOLOGY": "of-the-user", "TPU_ZONE": "of-the-user", "EXECUTOR_CALL_INDEX": "9"}
    config = {"config": {"setup_timeout_seconds": 60}, "env_vars": env}
    with SlicePool("v4-16") as first, SlicePool("v4-16", execution_env=config) as pool:
        assert [one.slice_name for one in (*first.slices, *pool.slices)] == ["slice-1", "slice-2"]
        for worker, found in enumerate(pool.run(variables)):
            assert (found["MINE"], found["TPU_TOPOLOGY"]) == ("1", "of-the-user")
            assert (found["TPU_ZONE"], found["TPU_NAME"]) == ("zone-of-node", "slice-2")
            assert found["EXECUTOR_CALL_INDEX"] == str(worker)
            assert not [name for name in found if name.startswith("MEGASCALE_")]
            assert {"config", "env_vars", "setup_timeout_seconds"}.isdisjoint(found)
    assert not [name for name in os.environ if name.startswith(OURS)]


def test_environment_comes_first(slices, tmp_path, monkeypatch):
    """The variables are set before any of the user's modules is imported, also to unpickle functions or arguments."""
    (tmp_path / "reads_early.py").write_text(
        "import os\nSEEN = os.environ.get('EXECUTOR_CALL_INDEX')\n"
        "class Argument: pass\ndef seen(argument): return SEEN\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import reads_early

    config = TpuAcceleratorConfig("v4-16", execution_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    assert RayExecutor.execute(reads_early.seen, config, argument=reads_early.Argument()).result == ["0", "1"]


def test_a_failure_is_repeated(slices, record):
    """A function that fails once on one host is repeated on the same hosts; the slice stays reserved in between."""

    def once():
        place = ray.get_runtime_context().get_node_id(), os.environ["EXECUTOR_COORDINATOR_ADDRESS"]
        if record.meet(*place) == 0 and os.environ["EXECUTOR_CALL_INDEX"] == "1":
            raise ValueError("once")
        return place

    with SlicePool("v4-16", grace_s=0.5) as pool:
        before = groups(pool)
        result = pool.run(once)
        assert groups(pool) == before
    for worker in (0, 1):
        first, second = (line.split() for line in record.of(f"slice-1.{worker}"))
        assert first[0] != second[0]  # a fresh process
        assert first[1:] == second[1:] == list(result[worker])


@pytest.mark.parametrize("retries", [0, 2])
def test_always_failing(slices, record, retries):
    """n retries are exactly n + 1 calls on each host; then the function's exception is raised, whatever its text."""

    class Mine(Exception):
        def __init__(self, code, text):
            super().__init__(code, text)
            self.code = code

    def fails():
        record.meet()
        raise Mine(7, "the slice was preempted, no accelerator, node died")

    with pytest.raises(Mine) as caught:
        RayExecutor.execute_resumable(fails, ONE, max_retries_failure=retries)
    assert caught.value.code == 7
    assert f"attempted {retries + 1} time(s)" in caught.value.__notes__[-1]
    assert isinstance(caught.value.__cause__, ray.exceptions.RayTaskError)
    assert record.counts() == {"slice-1.0": retries + 1, "slice-1.1": retries + 1}


def test_a_process_that_dies(slices, record, eventually):
    """A crash on a live host is the function's failure: other calls are cancelled, and the budget limits retries."""

    def crashes():
        record.meet()
        if os.environ["EXECUTOR_CALL_INDEX"] == "0":
            os._exit(1)
        time.sleep(600)

    config = TpuAcceleratorConfig("v4-16", grace_s=0.5, max_retries_failure=1, max_retries_preemption=0)
    with pytest.raises(ray.exceptions.WorkerCrashedError) as caught:
        RayExecutor.execute_resumable(crashes, config)
    assert "attempted 2 time(s)" in caught.value.__notes__[-1]
    assert record.counts() == {"slice-1.0": 2, "slice-1.1": 2}
    siblings = [f"/proc/{line.split()[0]}" for line in record.of("slice-1.1")]
    # Their locks and sockets are gone. A raylet reaps a process a moment later.
    assert eventually(lambda: not any(map(os.path.exists, siblings))), "a sibling is still there"


def test_once(slices):
    """`execute` returns the outcome of one attempt as a value."""

    def fails():
        raise KeyError("x")

    status = RayExecutor.execute(fails, ONE)
    assert isinstance(status, JobFailed)
    assert (type(status.error), status.info.state) == (KeyError, "failed")


@pytest.mark.nightly
def test_sizes(slices):
    """After the wait the largest available number is used; without an allowed number the error says what is missing."""
    sizes = TpuAcceleratorConfig("v4-16", [1, 2], scale_timeout_s=1)
    assert len(RayExecutor.autoscale_execute(where, sizes).result) == 4
    with SlicePool("v4-16") as other:
        assert [one.slice_name for one in other.slices] == ["slice-1"]
        status = RayExecutor.autoscale_execute(where, sizes)
        assert [one.slice_name for one in status.info.slices] == ["slice-2"]
        with pytest.raises(InsufficientSlicesError) as caught:
            RayExecutor.autoscale_execute(where, TpuAcceleratorConfig("v4-16", 3, scale_timeout_s=1))
        assert (caught.value.requested, caught.value.available, caught.value.waited_s >= 1) == ((3,), 1, True)
        assert caught.value.missing == {"slice-1": "somebody else uses worker 0, 1"}
        # The attempt holds nothing: the other slice is available at once.
        with SlicePool("v4-16", scale_timeout_s=0) as rest:
            assert [one.slice_name for one in rest.slices] == ["slice-2"]


def test_grows_back(slices):
    """A pool that started with fewer slices takes more when they are free."""
    with SlicePool("v4-16") as other, SlicePool("v4-16", [1, 2], scale_timeout_s=0) as pool:
        assert len(pool.slices) == 1
        other.close()
        assert len(pool.run(where)) == 4


def test_bad_configuration(slices, record):
    """A function that cannot be run is refused at once, by type; nothing is reserved and nothing is called."""
    lock = threading.Lock()

    def fine():
        record.write()

    def wide():
        record.write()

    def unpicklable():
        return lock

    held = SlicePool("v4-16", 2)
    with held:
        # All slices are taken, so a check of the function that comes too late would wait for them.
        with pytest.raises(TypeError, match="serialize"):
            RayExecutor.execute_resumable(unpicklable, ONE)
        with pytest.raises(ValueError, match="/nowhere is not a valid path"):
            RayExecutor.execute(fine, dataclasses.replace(ONE, execution_env={"working_dir": "/nowhere"}))
    with pytest.raises(ValueError, match="one slice"):
        RayExecutor.execute(fine, TpuAcceleratorConfig("v4-16", 2))
    with pytest.raises(ValueError, match=r"Cannot schedule .*'CPU': 8"):
        RayExecutor.execute(ray.remote(num_cpus=8)(wide), ONE)
    with pytest.raises(ValueError, match="num_returns"):
        RayExecutor.execute(ray.remote(num_returns=2)(fine), ONE)
    assert record.counts() == {}


def test_two_runs_in_one_pool(slices):
    """Two runs use the same slices and different processes."""
    with SlicePool("v4-16", 2) as pool:
        before, first, second = groups(pool), pool.run(where), pool.run(where)
        assert groups(pool) == before
        assert [node_id for node_id, _ in first] == [node_id for node_id, _ in second]
        assert {pid for _, pid in first}.isdisjoint(pid for _, pid in second)


def test_never_an_old_process(slices):
    """A process in which another task ran is not used, even if it belongs to the same job and is idle on the host."""
    task = ray.remote(num_cpus=1, label_selector={"ray.io/node-id": slices.node_id("slice-1", 0)})(lambda: os.getpid())
    with SlicePool("v4-16", cpu_count=1) as pool:
        for _ in range(3):
            old = None
            while (again := ray.get(task.remote())) != old:  # until the next task gets the process, which is idle again
                old = again
            assert pool.run(where)[0][1] != old


def test_large_results(slices):
    """Every host returns 10 MB."""
    results = RayExecutor.execute(lambda: np.full(10_000_000 // 8, int(os.environ["TPU_HOST_ID"]), dtype=np.int64), ONE)
    assert [(one.nbytes, one[0]) for one in results.result] == [(10_000_000, 0), (10_000_000, 1)]


def test_everything_is_given_back(slices):
    """However a pool is closed, everything is free again: the fixture compares resources, groups, actors and ports."""
    pool = SlicePool("v4-16", 2).reserve()
    assert pool.close()
    assert pool.close()
    assert pool.slices == ()
    with pytest.raises(ZeroDivisionError), SlicePool("v4-16", 2):
        raise ZeroDivisionError


def test_a_second_run_queues(slices, record, eventually):
    """Two runs in one pool run one after the other, each with the whole pool."""

    def slow(name):
        record.write(name, "begins")
        while not (record.folder / "end").exists():
            time.sleep(0.01)
        record.write(name, "ends")
        return name

    with SlicePool("v4-16") as pool:
        answers = {}
        threads = [threading.Thread(target=lambda n=n: answers.update({n: pool.run(slow, n)})) for n in "ab"]
        for thread in threads:
            thread.start()
        assert eventually(lambda: record.of("slice-1.0"), 120)
        (record.folder / "end").touch()
        for thread in threads:
            thread.join(150)
        assert answers == {name: [name, name] for name in "ab"}
    noted = [line.split()[1] for line in record.of("slice-1.0")]
    assert noted in (list("aabb"), list("bbaa"))


def test_a_slot_that_is_taken(slices):
    """While the pool's slots are claimed, a run is refused at once instead of waiting forever."""
    with SlicePool("v4-16") as pool:
        claim = claim_slots(pool.slots(), "a group")
        with pytest.raises(ResourceInsufficientError, match="'a group' is there"):
            pool.run(where)
        claim.release()
        assert len(pool.run(where)) == 2


def test_closing_ends_a_run(slices, record):
    """Closing a pool ends the run in it; it does not reserve again."""

    def forever():
        record.write()
        time.sleep(600)

    pool = SlicePool("v4-16")
    raised = []

    def run():
        try:
            pool.run(forever)
        except TpuExecutorError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while len(record.counts()) < 2:
        time.sleep(0.05)
    pool.close()
    thread.join(60)
    assert raised
    assert "The pool was closed while it was in use" in raised[0]
    assert pool.slices == ()


def test_closing_ends_a_wait(slices, pauses, eventually):
    """Closing a pool ends a wait for slices, however long the timeout is."""
    pool = SlicePool("v4-16", 3, scale_timeout_s=600)
    raised = []

    def run():
        try:
            pool.run(where)
        except TpuExecutorError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: pauses, 60)
    pool.close()
    thread.join(150)
    assert "closed" in str(raised[0])
    assert not isinstance(raised[0], InsufficientSlicesError)


@pytest.mark.nightly
def test_scaling_while_a_function_starts(slices):
    """Another thread cannot give a slice back between the choice of the hosts and the start of the function there."""
    with SlicePool("v4-16", 2, flatten=False) as pool:
        threads = [threading.Thread(target=pool.scale, args=(count,)) for count in (1, 2, 1)]
        for thread in threads:
            thread.start()
        calls = [pool.submit(where) for _ in range(3)]
        for thread in threads:
            thread.join(150)
        assert {len(call) for call in calls} <= {1, 2}
        refs = [ref for call in calls for of_slice in call for ref in of_slice]
        assert ray.wait(refs, num_returns=len(refs), timeout=150)[1] == []


def test_a_port_that_cannot_be_one(slices, monkeypatch):
    """A wrong COORD_PORT is refused before slices are taken."""
    monkeypatch.setenv("COORD_PORT", "x")
    with SlicePool("v4-16"), pytest.raises(ValueError, match="COORD_PORT must be a port, 1 to 65535, got 'x'"):
        SlicePool("v4-16", 2).run(where)


@pytest.mark.parametrize("what", ["run", "submit", "start"])
def test_closing_just_before_a_start(slices, monkeypatch, what):
    """A pool that is closed after its hosts are chosen, and before anything starts there, ends the call.

    The seam is the list of the hosts.
    """
    pool = SlicePool("v4-16")
    choose = _pool.make_slots
    monkeypatch.setattr(_pool, "make_slots", lambda *args: pool.close() and choose(*args))

    class Instance:
        pass

    with pytest.raises((TpuExecutorError, IndexError), match="The pool was closed while"):
        pool.start(Instance, (), {}) if what == "start" else getattr(pool, what)(where)
    assert pool.slices == ()


def test_arguments(slices):
    """References arrive as values, by position and by name, as with Ray; references inside values stay references."""

    def shown(a, b, *, c):
        return a, type(b[0]).__name__, c

    with SlicePool("v4-16") as pool:
        ref = ray.put("value")
        assert pool.run(shown, ref, [ref], c=ref) == [("value", "ObjectRef", "value")] * 2


def test_options_of_ray_remote(slices):
    """The options of a function's @ray.remote are kept: its CPUs, and its variables below the configuration's."""

    def seen():
        return os.environ["A"], os.environ["B"], ray.get_runtime_context().get_assigned_resources()["CPU"]

    remote = ray.remote(num_cpus=1, runtime_env={"env_vars": {"A": "function", "B": "function"}})(seen)
    config = TpuAcceleratorConfig("v4-16", execution_env={"env_vars": {"B": "config"}})
    assert RayExecutor.execute(remote, config).result == [("function", "config", 1.0)] * 2


def test_hosts_need_only_ray(slices, tmp_path):
    """The code that is sent to a host can be unpickled where nothing of Fairlead is installed."""
    (tmp_path / "sent").write_bytes(ray.cloudpickle.dumps(_host.wait_for_lock))
    code = """if True:
        import sys, ray
        sys.modules.update(fairlead_tpu_executor=None, fairlead_placement=None)
        ray.cloudpickle.load(open("sent", "rb"))("nobody", 1.0)
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=150)


@pytest.mark.nightly
def test_a_chip_that_does_not_start(slices, record):
    """After two failed starts in a row on one host the run continues on another slice."""

    def starts():
        record.meet()
        if os.environ["TPU_SLICE_NAME"] == "slice-1" and os.environ["EXECUTOR_CALL_INDEX"] == "1":
            raise RuntimeError("UNKNOWN: TPU initialization failed: Couldn't open iommu group /dev/vfio/0")
        return os.environ["TPU_SLICE_NAME"]

    with SlicePool("v4-16", max_retries_failure=2, max_retries_preemption=0, grace_s=0.1) as pool:
        assert pool.run(starts) == ["slice-2", "slice-2"]
        assert record.counts() == {"slice-1.0": 2, "slice-1.1": 2, "slice-2.0": 1, "slice-2.1": 1}
        # The slice is not lost for the pool: it is used if there is no other.
        assert [place.slice_name for place in pool.scale(2).slices] == ["slice-2", "slice-1"]


@pytest.mark.nightly
def test_a_chip_that_never_starts(slices, record):
    """If there is no other slice, the run ends after its budget of failures with the exception of the accelerator."""

    def starts():
        record.meet()
        raise RuntimeError("TPU initialization failed: no libtpu\nof this version")

    with SlicePool("v4-16"), SlicePool("v4-16", max_retries_failure=2, grace_s=60) as pool:
        with pytest.raises(RuntimeError, match="no libtpu") as caught:
            pool.run(starts)
        assert "3 time(s): 3 failed (max_retries_failure=2), 0 were preempted" in caught.value.__notes__[-1]
        assert record.counts() == {"slice-2.0": 3, "slice-2.1": 3}
