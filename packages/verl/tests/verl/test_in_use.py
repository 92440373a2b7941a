# SPDX-License-Identifier: Apache-2.0
"""With verl installed: whose classes are in use, in the driver and in a worker, and what they do about failures."""

import contextlib
import copy
import gc
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from functools import partial

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed; run `nox -s verl`", allow_module_level=True)

import ray
import torch
from verl import DataProto
from verl.single_controller import ray as verl_ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from whose_classes import IS_ON, METHODS, OURS, VERLS, WANTED, name_modules

from fairlead_workergroup import WorkerFailureError

pytestmark = pytest.mark.nightly

only_on = pytest.mark.skipif(not IS_ON, reason="verl's own groups")
PROGRAM = """
import pickle
pickle.loads(bytes.fromhex({pickled!r}))
from verl.single_controller import ray
print([getattr(getattr(ray, name), method).__module__ for name, method in {methods}.items()])
"""


def run_program(pickled, **variables):
    """Return the modules that implement verl's classes in a process that first loads a pickle."""
    program = PROGRAM.format(pickled=pickled.hex(), methods=METHODS)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1]


class Named(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def modules(self):
        return name_modules(), os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self, seconds):
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def return_later(self, data):
        time.sleep(data.batch["seconds"][0].item())
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        raise KeyError("of the worker")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names):
        return [os.environ.get(name) for name in names]


def make_data(seconds):
    """Return verl's batch of two rows."""
    return DataProto.from_dict({"seconds": torch.tensor([seconds] * 2)})


@pytest.fixture
def make_group():
    ray.init()

    def make(**options):
        pool = verl_ray.RayResourcePool([2], use_gpu=True, max_colocate_count=2)
        described = verl_ray.RayClassWithInitArgs(ray.remote(Named))
        return verl_ray.RayWorkerGroup(pool, described, device_name="cpu", **options)

    return make


def test_classes(make_group):
    """Pools and groups are those of this package in the driver and in workers, or verl's own in both."""
    assert name_modules() == WANTED
    assert [modules for modules, _ in make_group().modules()] == [WANTED] * 2


@pytest.mark.parametrize("off", [{"FAIRLEAD_VERL": "0"}, {"VERL_USE_EXTERNAL_PLUGINS": "none"}], ids=repr)
def test_off(off):
    """Two variables leave verl as it is, and pickles of this package's classes load there."""
    pickled = pickle.dumps(verl_ray.RayResourcePool([2]))
    assert run_program(pickled, **off) == str([VERLS] * 3)


@only_on
def test_unpickled_first():
    """A process whose first import of verl comes from a pickle has the classes of this package."""
    assert run_program(pickle.dumps(verl_ray.RayResourcePool([2]))) == str([OURS[name] for name in METHODS])


@only_on
def test_environment(make_group):
    """A worker sees its own GPU as number 0, as with verl, and has verl's variables."""
    group = make_group(worker_env={"MINE": "1"})
    names = "LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE", "WG_BACKEND", "MINE"
    assert group.environment(*names) == [["0", "2", "ray", "1"]] * 2
    assert sorted(device for (device,) in group.environment("CUDA_VISIBLE_DEVICES")) == ["0", "1"]


@only_on
def test_lost_worker(make_group):
    """A killed worker is named with its rank within seconds by a method and a future, while the other one goes on."""
    group = make_group()
    pids = [pid for _, pid in group.modules()]
    references = group.execute_all_async("wait", 60)
    future = group.return_later(make_data(60))
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    for wait in (partial(group.wait, 60), future.get):
        with pytest.raises(WorkerFailureError, match="rank 1"):
            wait()
    assert time.monotonic() - began < 5
    assert len(references) == 2


@ray.remote
def get_future(future):
    """Return the data of a future, and the module of its class."""
    return future.get(), type(future).__module__


@only_on
def test_future(make_group):
    """Another process reads a future as verl's own, and a future of other data is given to the workers as its parts."""
    group = make_group()
    future = group.return_later(make_data(0))
    data, module = ray.get(get_future.remote(future))
    assert data.batch["seconds"].tolist() == future.get().batch["seconds"].tolist() == [0, 0]
    assert module == "verl.protocol"
    assert group.return_later(future).get().batch["seconds"].tolist() == [0, 0]


@only_on
def test_own_exception(make_group):
    """An exception of a worker has the type that verl raises."""
    group = make_group()
    with pytest.raises(KeyError, match="of the worker") as caught:
        group.fail()
    assert isinstance(caught.value, ray.exceptions.RayTaskError)


@only_on
def test_calls_are_released(make_group):
    """No call keeps its group alive after its results have been taken, or without anybody who waits for it."""
    group = make_group()
    group.modules()
    group.execute_all_sync("modules")
    ray.get(group.execute_all_async("modules"))
    group.return_later(make_data(0)).get()
    kept = weakref.ref(group.fairlead_group)
    del group
    gc.collect()
    assert kept() is None


@only_on
def test_attached(make_group):
    """A group made from the names of another one has the same workers."""
    group = make_group()
    again = verl_ray.RayWorkerGroup.from_detached(
        worker_names=group.worker_names, ray_cls_with_init=group.ray_cls_with_init
    )
    assert again.modules() == group.modules()
    assert again.workers == group.workers
    for names in (group.worker_names[1:], group.worker_names[::-1]):
        with pytest.raises(ValueError, match="all workers of a group, in the order of their ranks"):
            verl_ray.RayWorkerGroup.from_detached(worker_names=names)


@only_on
def test_part_of_a_placement_group(make_group):
    """A pool over larger placement groups takes the first bundles of each, as with verl."""
    pool = make_group().resource_pool
    part = verl_ray.RayResourcePool([1], use_gpu=True, max_colocate_count=2)
    part.pgs = pool.pgs
    described = verl_ray.RayClassWithInitArgs(ray.remote(Named))
    assert verl_ray.RayWorkerGroup(part, described, device_name="cpu").world_size == part.world_size == 1


@ray.remote
def call_group(group):
    """Return the results of a group's method, and the type of the group below it."""
    return group.modules(), type(group.fairlead_group).__name__


@only_on
def test_pickled(make_group):
    """Another process calls the same workers through a handle, and a copy in this process shares the group."""
    group = make_group()
    assert copy.deepcopy(group).fairlead_group is group.fairlead_group
    assert ray.get(call_group.remote(group)) == (group.modules(), "GroupHandle")


@only_on
def test_refused(make_group):
    """A detached group, which cannot be honoured, is refused with the way back."""
    with pytest.raises(NotImplementedError, match=r"FAIRLEAD_VERL=0.*in Ray's runtime_env"):
        make_group(detached=True)


@only_on
def test_master_port_range(make_group):
    """The master port is one of a given range, whose end verl leaves out."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    group = make_group(master_port_range=[port, port + 1])
    assert group.master_port == str(port)


@only_on
def test_timeouts(monkeypatch):
    """Two variables set how long a reservation and the start of workers may take."""
    from fairlead_verl import _groups, _pools

    monkeypatch.setenv("FAIRLEAD_VERL_RESERVE_TIMEOUT_S", "1800")
    monkeypatch.setenv("FAIRLEAD_VERL_START_TIMEOUT_S", "3600")
    given = {}

    def record(*_, **options):
        given.update(options)
        raise KeyError("recorded")

    monkeypatch.setattr(_pools, "RayVirtualCluster", record)
    monkeypatch.setattr(_groups, "Group", record)
    monkeypatch.setattr(_groups, "slots_of", lambda _: [])
    pool = verl_ray.RayResourcePool([1])
    with pytest.raises(KeyError, match="recorded"):
        pool.get_placement_groups()
    pool.pgs = []
    with pytest.raises(KeyError, match="recorded"):
        verl_ray.RayWorkerGroup(pool, verl_ray.RayClassWithInitArgs(ray.remote(Named)))
    assert (given["reserve_timeout_s"], given["timeouts"].start_s) == (1800.0, 3600.0)
    monkeypatch.setenv("FAIRLEAD_VERL_RESERVE_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="FAIRLEAD_VERL_RESERVE_TIMEOUT_S must be a number of seconds, got 'soon'"):
        verl_ray.RayResourcePool([1]).get_placement_groups()
