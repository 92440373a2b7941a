# SPDX-License-Identifier: Apache-2.0
"""Tests of the options of a group: the checks of the values, and the keywords that stand for some of them."""

import dataclasses
import inspect
import math

import pytest

from fairlead_workergroup import Elastic, RayWorkerGroup, Restart, Timeouts, WorkerOptions


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (Restart, {"max_restarts": -1}, ValueError, "max_restarts must be a whole number of at least 0, got -1"),
        (Restart, {"max_restarts": 1.5}, ValueError, "max_restarts must be a whole number of at least 0, got 1.5"),
        (Restart, {"scope": "node"}, ValueError, "scope must be 'worker' or 'group', got 'node'"),
        (WorkerOptions, {"visible_devices": "all"}, ValueError, "visible_devices must be 'own' or 'node', got 'all'"),
        *(
            (WorkerOptions, {"master_port": port}, ValueError, f"of a range, such as (29500, 29503), got {port!r}")
            for port in (0, 70000, True, "29500", (29501, 29500), (29500,), [29500, 29501], (29500, None))
        ),
        (Timeouts, {"start_s": 0}, ValueError, "start_s must be positive and finite, got 0"),
        (Timeouts, {"start_s": math.inf}, ValueError, "start_s must be positive and finite, got inf"),
        (Timeouts, {"call_s": -1.0}, ValueError, "call_s must be finite and not negative, or None for no limit"),
        (Timeouts, {"call_s": "1"}, TypeError, "call_s must be a number of seconds or None, got '1'"),
    ],
)
def test_checks(value, options, error, message):
    """A value refuses wrong options by their names."""
    with pytest.raises(error) as caught:
        value(**options)
    assert message in str(caught.value)


def test_values_are_frozen():
    """An option of a group cannot be changed after the group has read it."""
    for value in (Restart(), Elastic(), WorkerOptions(), Timeouts()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)


@pytest.mark.parametrize(("name", "value"), [("restart", True), ("elastic", 2), ("timeouts", 60.0), ("elastic", {})])
def test_types(name, value):
    """A group refuses a value of another type, and says how the option is written."""
    what = {"elastic": "an Elastic"}.get(name, f"a {name.title()}")
    with pytest.raises(TypeError, match=rf"{name} must be {what} or None, got .*: write {name}={name.title()}"):
        RayWorkerGroup([], dict, **{name: value})


def test_flat_keyword_beside_its_value():
    """A keyword is refused beside the value that replaces it."""
    with pytest.raises(TypeError, match="restart= replaces restart_on_failure and max_restarts"):
        RayWorkerGroup([], dict, restart=Restart(), max_restarts=1)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("on_resized", "elastic=Elastic(on_resize=...)"),
        ("restart_on_failures", "restart_on_failure="),
        ("memory_limits", "memory_limit="),
        ("timeout", "timeouts="),
        ("start_timeout_s", "timeouts="),
    ],
)
def test_unknown_keyword(unknown, nearest):
    """The error for an unknown keyword says how the nearest one is written."""
    with pytest.raises(TypeError) as caught:
        RayWorkerGroup([], dict, **{unknown: 1})
    assert str(caught.value) == f"RayWorkerGroup has no parameter {unknown!r}. Did you mean {nearest}?"


def test_size_of_the_surface():
    """A group has at most 28 public members, and its constructor 15 parameters."""
    assert len([name for name in dir(RayWorkerGroup) if not name.startswith("_")]) <= 28
    assert len(inspect.signature(RayWorkerGroup).parameters) <= 15
