# SPDX-License-Identifier: Apache-2.0
"""How many slices to hold, and calls that are refused before Ray is asked."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_tpu_executor import (
    CpuAcceleratorConfig,
    DeviceInstances,
    SlicePoolManager,
    TpuAcceleratorConfig,
    autoscale_execute,
    execute,
    execute_resumable,
    tpu_remote,
)
from fairlead_tpu_executor._reservation import choose_size


@given(st.sets(st.integers(1, 8), min_size=1), st.integers(0, 16), st.booleans())
def test_sizes(sizes, present, waited_out):
    """The largest size is chosen at once if available; after the wait the largest available size; never another."""
    size = choose_size(sorted(sizes), present, waited_out=waited_out)
    possible = {one for one in sizes if one <= present}
    if max(sizes) in possible:
        assert size == max(sizes)
    elif waited_out and possible:
        assert size == max(possible)
    else:
        assert size is None


ONE = TpuAcceleratorConfig("v4-16")


def test_decorators_are_strict():
    """A decorator refuses a wrong number of slices, or an unknown option, when it is applied."""
    with pytest.raises(ValueError, match="one slice"):
        execute(TpuAcceleratorConfig("v4-16", 2))
    with pytest.raises(ValueError, match="pod_count is 2, and execute runs on one slice"):
        execute_resumable(ONE, pod_count=2)
    with pytest.raises(TypeError, match="num_slices"):
        autoscale_execute(ONE, num_slices=2)


@pytest.mark.parametrize("call", [lambda: tpu_remote(len), lambda: tpu_remote(), lambda: tpu_remote(ONE)])
def test_a_bare_decorator(call):
    """Without `accelerator_config` the error shows the form that works."""
    with pytest.raises(TypeError, match=r"@device_remote\(accelerator_config=TpuAcceleratorConfig"):
        call()


def test_flatten_of_a_pool_manager():
    """An option that could have no effect is refused."""
    with pytest.raises(TypeError, match="flatten"):
        SlicePoolManager("v4-16", flatten=True)


def test_copies_of_instances():
    """Instances can be copied: looking up an attribute that a copy does not have yet does not recurse."""
    with pytest.raises(AttributeError):
        _ = object.__new__(DeviceInstances).method
    pool = tpu_remote(accelerator_config=CpuAcceleratorConfig())(int).pool
    instances = DeviceInstances(int, [], [], None, pool, "elsewhere")
    assert copy.copy(instances).bit_length.remote.args == ("bit_length",)
