# SPDX-License-Identifier: Apache-2.0
"""How many slices to hold, when Ray's head counts as unreachable, and calls that are refused before Ray is asked."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_placement import HeadTimeoutError
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
from fairlead_tpu_executor import _attempt as attempt
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


def test_a_silent_head(monkeypatch):
    """No node counts as lost while the head does not answer, until it has been silent for too long."""
    now, answers = [0.0], [True]

    def ask_head(request, function, timeout_s):
        if not answers[0]:
            raise HeadTimeoutError("no answer")
        return frozenset("a"), frozenset("b")

    monkeypatch.setattr(attempt.extension, "ask_head", ask_head)
    monkeypatch.setattr(attempt.time, "monotonic", lambda: now[0])
    watch = attempt.NodeWatch()
    assert watch.look("abc") == (frozenset("bc"), frozenset("bc"))
    answers[0] = False
    for now[0] in (1.0, 20.0, 30.0):
        assert watch.look("abc") == (frozenset(), frozenset())
    answers[0] = True
    assert watch.look("ab") == (frozenset("b"), frozenset("b"))
    answers[0] = False
    for now[0] in (100.0, 129.0):
        watch.look("abc")
    now[0] = 130.0
    with pytest.raises(HeadTimeoutError):
        watch.look("abc")


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
    instances = DeviceInstances(int, [], None, pool, "elsewhere")
    assert copy.copy(instances).bit_length == instances.bit_length
