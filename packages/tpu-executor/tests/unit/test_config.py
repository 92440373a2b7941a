# SPDX-License-Identifier: Apache-2.0
"""Configurations are checked when they are made."""

import dataclasses
import functools
import pickle
from dataclasses import FrozenInstanceError

import pytest
import ray

from fairlead_tpu_executor import CpuAcceleratorConfig, GpuAcceleratorConfig, SlicePool, TpuAcceleratorConfig
from fairlead_tpu_executor._work import check_call, check_method, inspect_work, take_options


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (TpuAcceleratorConfig, {"num_slices": 2}, "num_slices"),
        (CpuAcceleratorConfig, {"core_cnt": 4}, "core_cnt"),
        (TpuAcceleratorConfig, {"pod_count": 2.0}, "pod_count"),
        (TpuAcceleratorConfig, {"pod_count": "2"}, "pod_count"),
        (TpuAcceleratorConfig, {"pod_count": True}, "pod_count"),
        (TpuAcceleratorConfig, {"scale_timeout_s": "4"}, "scale_timeout_s"),
        (TpuAcceleratorConfig, {"replace_timeout_s": None}, "replace_timeout_s"),
        (TpuAcceleratorConfig, {"grace_s": True}, "grace_s"),
        (TpuAcceleratorConfig, {"execution_env": {"env_vars": {"A": 1}}}, "the value 1 is of type"),
        (TpuAcceleratorConfig, {"execution_env": {"env_vars": ["A"]}}, r"must be of type Dict\[str, str\]"),
        (TpuAcceleratorConfig, {"execution_env": "A=1"}, "execution_env"),
        (TpuAcceleratorConfig, {"max_retries_failure": 1.5}, "max_retries_failure"),
        (TpuAcceleratorConfig, {"tpu_version": "v4-8", "type": "v4-32"}, "another name of tpu_version='v4-8'"),
        (GpuAcceleratorConfig, {"device_count": 2, "count": 3}, "another name of device_count=2"),
        (GpuAcceleratorConfig, {"gpu_model": {"env_vars": {}}}, "gpu_model must be a string"),
    ],
)
def test_wrong_types(config, options, said):
    """An unknown keyword is a TypeError that names it; so is a value of a wrong type."""
    with pytest.raises(TypeError, match=said):
        config(**options)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (TpuAcceleratorConfig, {"tpu_version": "v9-8"}, "not a TPU type"),
        (TpuAcceleratorConfig, {"pod_count": 0}, "at least 1"),
        (TpuAcceleratorConfig, {"pod_count": []}, "empty"),
        (TpuAcceleratorConfig, {"pod_count": [1, 0]}, "at least 1"),
        (TpuAcceleratorConfig, {"cpu_count": 0}, "at least 1"),
        (TpuAcceleratorConfig, {"megascale_port": 0}, "1 to 65535"),
        (TpuAcceleratorConfig, {"scale_timeout_s": -1}, "negative"),
        (TpuAcceleratorConfig, {"grace_s": float("nan")}, "negative"),
        (TpuAcceleratorConfig, {"grace_s": float("inf")}, "infinite"),
        (TpuAcceleratorConfig, {"max_retries_preemption": -1}, "at least 0"),
        (GpuAcceleratorConfig, {"device_count": 0}, "at least 1"),
        (CpuAcceleratorConfig, {"worker_count": 0}, "at least 1"),
    ],
)
def test_wrong_values(config, options, said):
    """An impossible value is a ValueError, before any request to Ray."""
    with pytest.raises(ValueError, match=said):
        config(**options)


def test_values():
    """Configurations are values: frozen, equal, hashable, picklable; a copy with variables leaves the first alone."""
    one = TpuAcceleratorConfig("v4-16", [4, 2, 2], execution_env={"env_vars": {"A": "1"}, "pip": ["x"]})
    assert one.sizes == (2, 4)
    assert one == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
    with pytest.raises(FrozenInstanceError):
        one.pod_count = 3
    two = one.with_environment_variables({"B": "2"}, A="3")
    assert (dict(two.env_vars), dict(one.env_vars)) == ({"A": "3", "B": "2"}, {"A": "1"})


def test_other_names():
    """The other names of the original set the same fields; models of GPUs have Ray's spelling; copies keep all that."""
    assert TpuAcceleratorConfig(type="v4-8", preemptible=True) == TpuAcceleratorConfig("v4-8")
    gpus = GpuAcceleratorConfig(count=2, type="v100")
    assert gpus == GpuAcceleratorConfig(2, "V100") == dataclasses.replace(gpus, cpu_count=1)
    assert GpuAcceleratorConfig(gpu_model="Mine").gpu_model == "Mine"


def test_bundles():
    """A bundle holds all chips of a host and, on worker 0, the lock of the slice."""
    config = TpuAcceleratorConfig("v4-16")
    assert config.bundle(None, 0) == {"CPU": 2.0, "TPU": 4.0, "TPU-v4-16-head": 1.0}
    assert config.bundle(None, 1) == {"CPU": 2.0, "TPU": 4.0}
    gpus = GpuAcceleratorConfig(2, "H100", cpu_count=3)
    assert gpus.bundle(None, 0) == {"CPU": 3.0, "GPU": 2.0, "accelerator_type:H100": 0.001}
    assert gpus.request(None) == {"CPU": 3.0, "GPU": 2.0}


def test_pool_takes_either():
    """A pool is made from a type or from a configuration, not from both, without a request to Ray."""
    assert SlicePool("v4-16", [1, 2], cpu_count=1).config == TpuAcceleratorConfig("v4-16", [1, 2], cpu_count=1)
    config = CpuAcceleratorConfig(2)
    assert SlicePool(config, grace_s=1.0).config.grace_s == 1.0
    with pytest.raises(TypeError, match="pod_count"):
        SlicePool(config, 2)
    with pytest.raises(ValueError, match="give worker_count, not a size"):
        SlicePool(config).scale(2)


def test_targets_that_cannot_run():
    """A target that cannot be run, or whose result cannot be sent, is refused by its kind."""

    async def coroutine():
        pass

    def generator():
        yield

    for wrong, said in ((3, "got 3"), (int, "got <class"), (coroutine, "coroutine"), (generator, "generator")):
        with pytest.raises(TypeError, match=said):
            inspect_work(wrong)
    with pytest.raises(TypeError, match="Expected a class"):
        inspect_work(print, of_class=True)


def test_names_of_actors():
    """Actors cannot share a name, so a class with an instance on every host has none; tasks can share one."""

    def named():
        pass

    class Named:
        pass

    with pytest.raises(ValueError, match="Named sets name in "):
        inspect_work(ray.remote(name="one")(Named), of_class=True)
    assert inspect_work(ray.remote(name="all")(named)).options["name"] == "all"


def test_keywords_of_the_function():
    """A keyword belongs to the function if it is one of its parameters, even if its value is None."""

    def theirs(flatten, x):
        pass

    kwargs = {"x": 1}
    assert take_options(theirs, {"flatten": None, "max_retries_failure": 2}, kwargs) == {"max_retries_failure": 2}
    assert kwargs == {"x": 1, "flatten": None}
    kwargs = {}
    assert take_options(lambda **rest: None, {"flatten": False}, kwargs) == {"flatten": False}
    assert kwargs == {}


class Methods:
    """Has a method of each kind."""

    def plain(self, x):
        pass

    @staticmethod
    def static(x):
        pass

    @classmethod
    def of_class(cls, x):
        pass


@pytest.mark.parametrize("method", ["plain", "static", "of_class"])
def test_arguments_of_methods(method):
    """A method is called with its own arguments, without the instance; one that `__init__` may set is not checked."""
    check_method(Methods, method, (1,), {})
    check_method(Methods, "set_later", (1, 2, 3), {})
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"y": 2})):
        with pytest.raises(TypeError, match=rf"Methods\.{method} cannot take the arguments of this call: .* argument"):
            check_method(Methods, method, args, kwargs)


def test_arguments_that_cannot_be_checked():
    """A wrapper may take arguments that the wrapped function does not; a type without a signature takes any."""

    @functools.wraps(print)
    def wrapper(*args, more=None, **kwargs):
        pass

    check_call("wrapper", wrapper, (), {"more": 1, "other": 2})
    check_call("str", str, (1, 2, 3, 4), {})
