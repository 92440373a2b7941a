# SPDX-License-Identifier: Apache-2.0
"""Errors can be pickled; their messages say what was requested, what was found, and what to do."""

import pickle

import pytest

from fairlead_tpu_executor import (
    InsufficientSlicesError,
    OpenInstancesError,
    PreemptionLimitError,
    SliceLostError,
    TpuExecutorError,
)

LACKS = {"a": "1 of 2 hosts, worker 1 is missing", "b": "somebody else uses worker 0"}
ERRORS = [
    TpuExecutorError("no"),
    InsufficientSlicesError("v4-16", (1, 2), 0, LACKS, 3.14),
    SliceLostError(("a", "b"), "worker 0 of a (10.0.0.1): NodeDiedError: gone"),
    PreemptionLimitError("train", 3, 2, "Slice(s) a were lost."),
    OpenInstancesError("Model"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickle(error):
    """Every error is the same after pickling: class, message and attributes."""
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))
    assert isinstance(twin, TpuExecutorError)
    assert isinstance(twin, RuntimeError)


def test_messages():
    """The messages of the errors."""
    assert str(ERRORS[1]) == (
        "1 or 2 whole slice(s) of v4-16 were requested, and 0 were free after 3.1 s. The others:\n"
        "  a: 1 of 2 hosts, worker 1 is missing\n"
        "  b: somebody else uses worker 0\n"
        "Free or add slices, allow smaller numbers (pod_count=[1, 2]), or wait longer (scale_timeout_s; "
        "replace_timeout_s for the replacement of a lost one)."
    )
    assert "there are no others" in str(InsufficientSlicesError("v4-8", (1,), 0, {}, 0.0))
    assert str(ERRORS[2]).startswith("Slice(s) a, b were lost: worker 0 of a (10.0.0.1)")
    assert "train was preempted 3 time(s), 2 were allowed" in str(ERRORS[3])
    assert "Instances of Model are open, and use its slices. Close them first" in str(ERRORS[4])
