# SPDX-License-Identifier: Apache-2.0
"""The layers over a pool reject invalid arguments before they reserve anything."""

import pytest

from fairlead_tpu_executor import (
    TpuAcceleratorConfig,
    autoscale_execute,
    execute,
    execute_resumable,
)

ONE = TpuAcceleratorConfig("v4-16")
TWO = TpuAcceleratorConfig("v4-16", 2)


def test_decorators_are_strict():
    """A decorator refuses a wrong number of slices, or an unknown option, when it is applied."""
    with pytest.raises(ValueError, match="one slice"):
        execute(TWO)
    with pytest.raises(ValueError, match="pod_count is 2, and execute runs on one slice"):
        execute_resumable(ONE, pod_count=2)
    with pytest.raises(TypeError, match="num_slices"):
        autoscale_execute(ONE, num_slices=2)
