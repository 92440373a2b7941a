# SPDX-License-Identifier: Apache-2.0
"""The layers over a pool: how small they are, and what they refuse before they reserve anything."""

import ast
import inspect
import textwrap

import pytest

from fairlead_tpu_executor import (
    DeviceClass,
    DeviceFunction,
    DeviceInstances,
    RayExecutor,
    SlicePoolManager,
    TpuAcceleratorConfig,
    TpuRemoteManager,
    _compat,
    _device,
    autoscale_execute,
    autoscale_execute_resumable,
    device_remote,
    execute,
    execute_resumable,
    resolve_maybe_refs,
)

ONE = TpuAcceleratorConfig("v4-16")
TWO = TpuAcceleratorConfig("v4-16", 2)


def code_lines(thing):
    """Return the number of lines with code, without blank lines, comments and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword)) and not isinstance(node, ast.Constant):
            lines.add(node.lineno)
    return len(lines)


# Each layer, with its private helpers.
LAYERS = {
    "executor": (RayExecutor, resolve_maybe_refs),
    "decorators": (execute, autoscale_execute, execute_resumable, autoscale_execute_resumable, _compat._decorate),
    "remote manager": (TpuRemoteManager,),
    "pool manager": (SlicePoolManager,),
    "device_remote": (DeviceFunction, DeviceClass, _device._OnDevices, _device.DeviceDecorator, device_remote),
    "device instances": (DeviceInstances, _device._Method),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_thin(layer):
    """The pool does all the work: each layer over it has under 60 lines of code."""
    assert sum(map(code_lines, LAYERS[layer])) < 60


def test_decorators_are_strict():
    """A decorator refuses a wrong number of slices, or an unknown option, when it is applied."""
    with pytest.raises(ValueError, match="one slice"):
        execute(TWO)
    with pytest.raises(ValueError, match="pod_count is 2, and execute runs on one slice"):
        execute_resumable(ONE, pod_count=2)
    with pytest.raises(TypeError, match="num_slices"):
        autoscale_execute(ONE, num_slices=2)
