# SPDX-License-Identifier: Apache-2.0
"""The layers over a pool that users call: executor, decorators, managers, device_remote."""

import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import ray

from fairlead_tpu_executor import (
    CpuAcceleratorConfig,
    JobFailed,
    OpenInstancesError,
    RayExecutor,
    SlicePool,
    SlicePoolManager,
    TpuAcceleratorConfig,
    TpuRemoteManager,
    autoscale_execute,
    autoscale_execute_resumable,
    device_remote,
    execute,
    execute_resumable,
    resolve_maybe_refs,
)

ONE = TpuAcceleratorConfig("v4-16")
TWO = TpuAcceleratorConfig("v4-16", 2)


def place():
    return f"{os.environ['EXECUTOR_CALL_SLICE']}.{os.environ['EXECUTOR_CALL_INDEX']}"


def clashing(x, flatten, max_retries_failure="theirs"):
    return x, flatten, max_retries_failure


def test_executor_with_parameters_named_like_options(slices):
    """A keyword that is a parameter of the function belongs to the function; the configuration sets the option."""
    run = RayExecutor.autoscale_execute(clashing, ONE, flatten="theirs", x=1)
    assert run.result == [(1, "theirs", "theirs")] * 2
    assert RayExecutor.execute_resumable(clashing, ONE, x=1, flatten=2, max_retries_failure=3) == [(1, 2, 3)] * 2
    assert RayExecutor.autoscale_execute(lambda **rest: rest, ONE, flatten=False).result == [[{}, {}]]


def test_decorators(slices):
    """Arguments are given by position and by name, and options to the decorator, or in a call that has no such one."""
    assert execute_resumable(ONE, max_retries_failure=0)(clashing)(1, 2, max_retries_failure=3) == [(1, 2, 3)] * 2
    assert autoscale_execute_resumable(TWO, flatten=False)(place)() == [["0.0", "0.1"], ["1.0", "1.1"]]
    assert autoscale_execute(ONE)(ray.remote(place))().result == ["0.0", "0.1"]

    @execute(ONE)
    def fails(x):
        """Documented."""
        raise KeyError(x)

    assert (fails.__name__, fails.__doc__) == ("fails", "Documented.")
    status = fails("x")
    assert isinstance(status, JobFailed)
    assert status.error.args == ("x",)


def test_remote_manager(slices, coordinator_port):
    """Every call runs in new processes on the same hosts, with the manager's variables, flat or nested."""
    env = {"BASE": "base", "BOTH": "base"}
    options = {"runtime_env": {"env_vars": {"BOTH": "env", "ENV": "env"}}, "coord_port": int(coordinator_port)}
    with TpuRemoteManager("v4-16", 2, base_env=env, **options) as manager:

        def seen():
            return place(), os.getpid(), os.environ["BASE"], os.environ["BOTH"], os.environ["ENV"]

        first, second = manager.run_function(seen), manager.run_function(seen, flatten=False)
        assert [one[0] for one in first] == ["0.0", "0.1", "1.0", "1.1"]
        assert {one[2:] for one in first} == {("base", "base", "env")}
        assert [len(of_slice) for of_slice in second] == [2, 2]
        assert {one[1] for one in first}.isdisjoint(one[1] for of_slice in second for one in of_slice)
        assert manager.run_function(clashing, 1, flatten=2) == [(1, 2, "theirs")] * 4
    assert (manager.tpu_version, manager.pod_count, manager.base_env) == ("v4-16", 2, env)
    assert {name: getattr(manager, name) for name in options} == options


def test_remote_manager_of_a_generation(slices):
    """A generation stands for the only type of it in the cluster, which is read at the first use."""
    manager = TpuRemoteManager("TPU-V4", base_env={"NUMBER": 7, "NONE": None})
    assert manager.close()
    with manager:
        assert manager.run_function(lambda: os.environ["NUMBER"] + os.environ["TPU_VERSION"]) == ["7v4-16"] * 2
    with pytest.raises(ValueError, match="The cluster has v4-16"):
        TpuRemoteManager("v5p").ensure()


class Scaler:
    """Has methods for the tests."""

    def __init__(self, factor, offset=0):
        self.factor, self.offset, self.calls = factor, offset, 0

    def scale(self, x, flatten=False):
        self.calls += 1
        return self.factor * x + self.offset, self.calls, flatten

    def where(self):
        return place(), os.getpid()

    def fails(self):
        raise LookupError("mine")


def test_class_methods(slices):
    """Each call of a method gets a new instance, which is made on the host."""
    with TpuRemoteManager("v4-16") as manager:
        call = ((2,), {"offset": 1}, "scale")
        assert manager.run_class_method(Scaler, *call, 10) == [(21, 1, False)] * 2
        assert manager.run_class_method(Scaler, *call, x=20, flatten=True) == [(41, 1, True)] * 2
        named = {"cls_obj": Scaler, "init_args": (3,), "init_kwargs": {}, "method_name": "scale"}
        assert manager.run_class_method(**named, x=1) == [(3, 1, False)] * 2
        with pytest.raises(LookupError, match="mine") as caught:
            manager.run_class_method(Scaler, (1,), {}, "fails")
        assert caught.value.__notes__[-1].startswith("Scaler.fails was attempted 1 time(s)")


def test_pool_manager(slices):
    """The size of the pool changes; calls go to each slice or host, nested or flat; a drained pool holds nothing."""
    with SlicePoolManager("v4-16") as manager:
        manager.scale_multislice(2)
        manager.prepare_all_slices()
        names = [one.slice_name for one in manager.get_all_pool_members()]
        assert names == ["slice-1", "slice-2"]
        assert manager.execute_on_each_slice(place) == ["0.0", "1.0"]
        assert manager.execute_on_each_host(place) == [["0.0", "0.1"], ["1.0", "1.1"]]
        assert manager.execute_on_each_host_flat(place) == ["0.0", "0.1", "1.0", "1.1"]
        manager.scale_multislice([1])
        assert [one.slice_name for one in manager.get_all_pool_members()] == names[:1]
        assert manager.execute_on_each_host_flat(lambda: "MEGASCALE_PORT" in os.environ) == [False, False]
        manager.drain_actor_pool()
        assert manager.get_all_pool_members() == []


def test_device_function(slices):
    """`.remote(...)` returns references at once, in order; calls on one host run one by one, each in a new process."""

    @device_remote(accelerator_config=TWO, flatten=False)
    def seen(x, flatten=None):
        return place(), os.getpid(), x, flatten

    with seen:
        calls = [seen.remote(1), seen.remote(x=2, flatten=3)]
        first, second = [[ray.get(of_slice) for of_slice in call] for call in calls]
        assert [[one[0] for one in of_slice] for of_slice in first] == [["0.0", "0.1"], ["1.0", "1.1"]]
        assert [one[2:] for of_slice in second for one in of_slice] == [(2, 3)] * 4
        assert len({one[1] for call in (first, second) for of_slice in call for one in of_slice}) == 8
    assert seen.pool.slices == ()
    seen.close()


@pytest.mark.nightly
def test_device_function_called(slices):
    """A call returns values in order, and raises the function's exception."""

    @device_remote(accelerator_config=TWO)
    def seen(x):
        if x is None:
            raise LookupError("mine")
        return place(), x

    with seen:
        assert seen(1) == [("0.0", 1), ("0.1", 1), ("1.0", 1), ("1.1", 1)]
        with pytest.raises(LookupError, match="mine"):
            seen(x=None)


@pytest.mark.nightly
def test_device_class_called(slices):
    """A call makes the instances; their methods return values or references; closing them gives the slices back."""
    remote_scaler = device_remote(accelerator_config=TWO, flatten=False)(Scaler)
    scaler = remote_scaler(2, offset=1)
    assert scaler.scale(1) == [[(3, 1, False)] * 2] * 2
    assert [ray.get(of_slice) for of_slice in scaler.scale.remote(x=2)] == [[(5, 2, False)] * 2] * 2
    with pytest.raises(LookupError, match="mine"):
        scaler.fails()
    assert len(remote_scaler.pool.slices) == 2
    scaler.close()
    assert remote_scaler.pool.slices == ()
    scaler.close()
    # Closing the old instances again does not end the new ones.
    with remote_scaler(3) as again:
        scaler.close()
        assert again.scale(1) == [[(3, 1, False)] * 2] * 2


def test_device_function_fails(slices):
    """The errors are Ray's, as for any task; closing ends the calls that still run."""

    @device_remote(accelerator_config=ONE)
    def ends(seconds):
        time.sleep(seconds)
        raise LookupError("mine")

    with pytest.raises(LookupError):
        ray.get(ends.remote(0))
    refs = ends.remote(600)
    ends.close()
    with pytest.raises(ray.exceptions.RayError):
        ray.get(refs, timeout=120)


def test_device_class(slices):
    """One instance on each host keeps its state until it is closed; new instances start again in new processes."""
    remote_scaler = device_remote(accelerator_config=ONE)(Scaler)
    assert remote_scaler.__doc__ == "Has methods for the tests."
    with remote_scaler:
        scaler = remote_scaler.remote(2, offset=1)
        assert [ray.get(scaler.scale.remote(x)) for x in (1, 2)] == [[(3, 1, False)] * 2, [(5, 2, False)] * 2]
        before = ray.get(scaler.where.remote())
        assert [where for where, _ in before] == ["0.0", "0.1"]
        with pytest.raises(LookupError, match="mine"):
            ray.get(scaler.fails.remote())
        with pytest.raises(AttributeError, match="no public method 'missing'"):
            _ = scaler.missing
        with pytest.raises(OpenInstancesError, match="Instances of Scaler are open"):
            remote_scaler.remote(3)
        scaler.close()
        scaler.close()
        with remote_scaler.remote(3) as again:
            assert ray.get(again.scale.remote(1)) == [(3, 1, False)] * 2
            assert {pid for _, pid in before}.isdisjoint(pid for _, pid in ray.get(again.where.remote()))


def test_device_class_with_concurrency(slices):
    """The `max_concurrency` of `@ray.remote` is kept: a method can wait for another; the instance is made once."""

    @ray.remote(max_concurrency=2)
    class Meeting:
        made = 0

        def __init__(self):
            time.sleep(0.5)  # both first calls arrive before the instance is made
            Meeting.made += 1
            self.arrived = threading.Event()

        def wait(self):
            return self.arrived.wait(120), Meeting.made

        def arrive(self):
            self.arrived.set()
            return Meeting.made

    with device_remote(accelerator_config=ONE)(Meeting)() as meeting:
        waiting = meeting.wait.remote()
        assert meeting.arrive() == [1, 1]
        assert ray.get(waiting, timeout=150) == [(True, 1)] * 2


def test_device_class_that_cannot_be_made(slices):
    """An exception of the constructor reaches the caller of a method, with its type."""

    class Broken:
        def __init__(self):
            raise LookupError("mine")

        def method(self):
            return None

    broken = device_remote(accelerator_config=ONE)(Broken)
    with broken, broken.remote() as instances, pytest.raises(LookupError, match="mine"):
        ray.get(instances.method.remote())


def test_instances_of_an_ended_ray(slices):
    """Instances can be closed after Ray has ended, which starts no other Ray, and while another one runs."""
    code = """
        import ray
        from fairlead_tpu_executor import CpuAcceleratorConfig, device_remote

        class Answer:
            def give(self):
                return 42

        answer = device_remote(accelerator_config=CpuAcceleratorConfig())(Answer)
        ray.init(address={!r}, logging_level="error", log_to_driver=False)
        with answer():
            ray.shutdown()
        assert not ray.is_initialized()
        ray.init(address={!r}, logging_level="error", log_to_driver=False)
        instances = answer()
        ray.shutdown()
        ray.init(address={!r}, logging_level="error", log_to_driver=False)
        instances.close()
        assert answer().give() == [42]
    """
    code = textwrap.dedent(code).replace("{!r}", repr(slices.address))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_cpu_hosts(slices):
    """On hosts with CPUs only, the workers are placed in order, together or not at all."""
    config = CpuAcceleratorConfig(core_count=2, worker_count=3)
    assert RayExecutor.execute(place, config).result == ["0.0", "0.1", "0.2"]
    seen = RayExecutor.execute(lambda: sorted(name for name in os.environ if name.startswith("MEGASCALE")), config)
    assert len(seen.result) == 3


def test_large_arguments_are_stored_once(slices):
    """An argument is put into the object store once for all hosts and attempts."""
    value = np.ones(1_000_000)
    assert RayExecutor.autoscale_execute(lambda x: float(x.sum()), TWO, x=value).result == [1e6] * 4


def test_references(slices):
    """One reference, and a tuple of references, are replaced as a list of them is; other values stay."""
    assert resolve_maybe_refs(ray.put(1)) == 1
    assert resolve_maybe_refs((ray.put(1), ray.put(2))) == [1, 2]
    assert resolve_maybe_refs("text") == "text"


def test_status(slices):
    """`python -m fairlead_tpu_executor status` shows the slices, whether they are whole, and their users."""
    env = {**os.environ, "COLUMNS": "150"}
    command = [sys.executable, "-m", "fairlead_tpu_executor", "status", "--address"]
    with SlicePool("v4-16"):
        done = subprocess.run([*command, slices.address], capture_output=True, text=True, timeout=150, env=env)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "slice-" in line]
    assert [row[:5] for row in rows] == [[f"slice-{at}", "v4-16", "2x2x2", "2/2", "whole"] for at in (1, 2)]
    assert re.fullmatch(r"placement group fairlead-slice-1-\w{8} \(job \w{8}\): 8 TPU", rows[0][5])
    assert rows[1][5] == "nobody"
    nowhere = subprocess.run([*command, "127.0.0.1:1"], capture_output=True, text=True, timeout=150, env=env)
    assert (nowhere.returncode, nowhere.stdout) == (3, "")
    assert "No Ray cluster answers at 127.0.0.1:1" in nowhere.stderr
