# SPDX-License-Identifier: Apache-2.0
"""`launch` refuses wrong arguments before it starts anything."""

import collections
import copy
from types import SimpleNamespace

import pytest
import ray

from fairlead_workergroup import RayWorkerBuilder, launch
from fairlead_workergroup._launch import _LaunchedGroup

WORKERS = {"workers": 2}


class Model:
    """A class whose constructor has parameters that could be taken for axes."""

    def __init__(self, path="", *, seed=0, hidden=64):
        pass


@pytest.mark.parametrize(
    ("worker", "options", "message"),
    [
        (lambda: 1, WORKERS, "a worker must be a class or its full name"),
        ("Policy", WORKERS, "must be 'package.module.Class'"),
        (collections.Counter, {}, "needs the number of workers"),
        (collections.Counter, {"workers": 2, "dp": 2}, "and not both"),
        (collections.Counter, {"workers": 0}, "workers must be a whole number that is at least 1, got 0"),
        (collections.Counter, {"workers": "2"}, "workers must be a whole number that is at least 1, got '2'"),
        (collections.Counter, {"dp": 2, "tp": 0}, "axis 'tp' must be at least 1, got 0"),
        (collections.Counter, {"dp": -2}, "axis 'dp' must be at least 1, got -2"),
        (collections.Counter, {"dp": 2.0}, "dp=2.0 is not an axis"),
        (collections.Counter, {"dp": 2, "timeout": 3}, "Did you mean timeout_s?"),
        (collections.Counter, {"dp": 2, "gpu_per_worker": 1}, "Did you mean gpus_per_worker?"),
        (collections.Counter, {"dp": 2, "num_gpus": 1}, "'num_gpus'. Its options are workers, init_args,"),
        (collections.Counter, {"dp": 2, "max_restarts": 3}, "launch has no option 'max_restarts': give it to Restart"),
        (collections.Counter, {"dp": 2, "retries": 2}, "call an axis otherwise"),
        (collections.Counter, {"dp": 2, "nodes": 2}, "call an axis otherwise"),
        (collections.Counter, {"dp": 2, "restart": True}, "write restart=Restart(on_failure=True)"),
        (collections.Counter, {"num_workers": 2}, "launch has no option 'num_workers'. Did you mean workers?"),
        (collections.Counter, {"dp": 2, "restart": 1}, "write restart=Restart(on_failure=True)"),
        (collections.Counter, {"dp": 2, "elastic": 1}, "'elastic': give it to RayWorkerGroup"),
        (Model, {"dp": 1, "seed": 3}, "seed is a parameter of Model.__init__: pass init_kwargs={'seed': 3}"),
        (Model, {"hidden": 64}, "hidden is a parameter of Model.__init__: pass init_kwargs={'hidden': 64}"),
        (ray.remote(Model), {"path": 1}, "path is a parameter of Model.__init__: pass init_kwargs={'path': 1}"),
        (RayWorkerBuilder(Model), {"dp": 1, "seed": 3}, "pass RayWorkerBuilder(Model, seed=3)"),
        (RayWorkerBuilder(Model), {"dp": 1, "init_args": [1]}, "give the arguments to the builder"),
        (collections.Counter, {"dp": 2, "gpu_ids": 1}, "'gpu_ids': give it to RayVirtualCluster"),
        (collections.Counter, {**WORKERS, "cpus_per_worker": 0}, "cpus_per_worker must be an integer of at least 1"),
        (
            collections.Counter,
            {**WORKERS, "gpus_per_worker": -1},
            "gpus_per_worker must be a number of at least 0, got -1",
        ),
        (collections.Counter, {**WORKERS, "init_args": "text"}, "init_args must be a list or tuple"),
        *((collections.Counter, {**WORKERS, "init_kwargs": no}, "init_kwargs must be a dict") for no in ([1], 0, [])),
        (collections.Counter, {**WORKERS, "timeout_s": 0}, "timeout_s must be a positive number of seconds"),
        (collections.Counter, {**WORKERS, "timeout_s": None}, "timeout_s must be a positive number of seconds"),
        (collections.Counter, {**WORKERS, "env_vars": {"MINE": 1}}, "env_vars must map names to strings"),
        (collections.Counter, {**WORKERS, "env_vars": 0}, "env_vars must be a mapping from names to strings"),
        (collections.Counter, {**WORKERS, "python": 3}, "python must be a VenvSpec"),
    ],
)
def test_refused(worker, options, message):
    """A wrong argument is refused with the remedy, and no Ray is started."""
    with pytest.raises((TypeError, ValueError)) as caught:
        launch(worker, **options)
    assert message in str(caught.value)
    assert not ray.is_initialized()


def test_wrong_forms_of_calls():
    """A method that is called on the group is refused with the right form; other names are Python's own errors."""
    group = _LaunchedGroup.__new__(_LaunchedGroup)
    with pytest.raises(AttributeError, match=r"^'RayWorkerGroup' object has no attribute 'ok'$"):
        group.ok()
    group._core = SimpleNamespace(worker_class=SimpleNamespace(methods={"ok": None}))
    with pytest.raises(AttributeError, match=r"call it with group.call\('ok'\)"):
        group.ok()
    with pytest.raises(AttributeError, match=r"^'RayWorkerGroup' object has no attribute 'okay'$"):
        group.okay()
    with pytest.raises(AttributeError, match="object has no attribute 'now'"):
        group.state()
    with pytest.raises(AttributeError, match="object has no attribute 'now'"):
        getattr(group, "world_size")  # noqa: B009  a property
    with pytest.raises(TypeError, match="'RayWorkerGroup' object is not callable"):
        group("ok")
    with pytest.raises(TypeError, match="send its `handle\\(\\)` instead"):
        copy.copy(group)
