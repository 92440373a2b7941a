# SPDX-License-Identifier: Apache-2.0
"""Errors travel between processes with their message, and say what to do."""

import pickle

import pytest

from fairlead_venvs import (
    UvUnavailableError,
    VenvBuildError,
    VenvError,
    VenvMismatchError,
    VenvNodesError,
    VenvTimeoutError,
)


def on_node(error):
    error.node = "10.0.0.1 (abc)"
    return error


ERRORS = [
    VenvError("no"),
    on_node(VenvBuildError("no such package.", "uv pip install x", ("error: no", "hint: none"))),
    VenvBuildError("no room"),
    VenvTimeoutError("uv sync", 3.0),
    UvUnavailableError("nothing there"),
    on_node(VenvMismatchError("ray", "2.0", "2.60.0", "The environment of /x/bin/python")),
    VenvNodesError("1 of 2", [on_node(VenvBuildError("no room"))]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickle(error):
    """Every error is the same after pickling: class, message and attributes."""
    twin = pickle.loads(pickle.dumps(error))

    assert type(twin) is type(error)
    assert isinstance(twin, VenvError)
    assert str(twin) == str(error)
    assert {name: str(value) for name, value in vars(twin).items()} == {k: str(v) for k, v in vars(error).items()}


def test_messages():
    """A message says where it failed, what failed, and what to do."""
    assert str(ERRORS[1]) == (
        "The environment is not ready on node 10.0.0.1 (abc): no such package.\n"
        "  $ uv pip install x\n  error: no\n  hint: none"
    )
    assert str(ERRORS[3]).startswith("Not done within 3 s: uv sync. ")
    assert "`pip install uv`" in str(ERRORS[4])
    assert "Ask for 'ray==2.60.0' in its requirements" in str(ERRORS[5])


def test_groups():
    """Errors of nodes can be caught together or one by one, and keep their type when they are split."""
    with pytest.raises(VenvError):
        raise ERRORS[-1]
    with pytest.raises(TimeoutError):
        raise ERRORS[3]
    caught = []
    try:
        raise VenvNodesError("2 of 2", [VenvBuildError("no room"), VenvTimeoutError("uv sync", 3.0)])
    except* VenvTimeoutError as group:
        caught.append(group)
    except* VenvBuildError as group:
        caught.append(group)
    assert [(type(group), len(group.exceptions)) for group in caught] == [(VenvNodesError, 1)] * 2
