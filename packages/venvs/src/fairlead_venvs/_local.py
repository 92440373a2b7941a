# SPDX-License-Identifier: Apache-2.0
"""An environment on this machine."""

import math
import os
from typing import Any

from ._build.build import ensure, found
from ._build.recipe import Outcome
from ._build.redact import redacted
from ._build.uv import Deadline
from ._cluster.renewal import HERE, keep_marked
from ._planning.command import is_uv_command
from ._planning.plan import planned
from ._progress import Bars
from ._spec import VenvSpec

__all__ = ["as_spec", "checked_seconds", "create_local_venv", "ensure_local"]


def create_local_venv(
    py_executable: str | VenvSpec,
    venv_name: str | None = None,
    force_rebuild: bool = False,
    timeout_s: float = 1800,
) -> str:
    """The interpreter of an environment on this machine, built if it is not there. Needs no Ray cluster.

    Asking again for what is there starts no process and takes a few milliseconds. Of many that ask at once, in
    whatever process, one builds and all get the same.

    Args:
        py_executable: what it is to hold: a spec, or a command, "uv run --locked --extra vllm --directory X".
        venv_name: first part of the folder's name, a plain word; by default the project's name.
        force_rebuild: resolve the requirements and build it again. It takes the place of the one that is there, or
            a place of its own if other versions satisfy the requirements now; these hold from now on.
        timeout_s: for everything together, in seconds.

    Returns:
        Path of `bin/python`.

    Raises:
        TypeError, ValueError: nothing that could be built, or no such deadline.
        VenvBuildError: it could not be built; with what uv said.
        VenvTimeoutError: it was not ready in time.
        UvUnavailableError: there is no uv, or one that is too old.

    >>> create_local_venv("numpy")
    Traceback (most recent call last):
    ValueError: expected a VenvSpec or a command 'uv run ...', got 'numpy'
    """
    outcome = ensure_local(py_executable, venv_name, force=force_rebuild, timeout_s=timeout_s)
    if outcome.shared:
        keep_marked([(os.path.dirname(os.path.dirname(outcome.python)), HERE)])
    return outcome.python


def ensure_local(
    py_executable: str | VenvSpec, name: str | None = None, *, force: bool = False, timeout_s: float = 1800
) -> Outcome:
    """As `create_local_venv`; what is known of the environment."""
    spec = as_spec(py_executable)
    deadline = Deadline(checked_seconds("timeout_s", timeout_s))
    with Bars() as bars:
        plan = planned(spec, name, deadline=deadline, show=bars.line(name or "environment"), refresh=force)
        ready = None if force else found(plan.recipe.folder, plan.recipe.fingerprint)
        if ready is not None:
            return ready
        show = bars.line(plan.recipe.folder.rpartition("/")[2])
        plan.check(deadline, show)
        return ensure(plan.recipe, lambda: plan.files, force=force, deadline=deadline, show=show)


def as_spec(py_executable: Any) -> VenvSpec:
    """A spec, given as itself or as a command."""
    if isinstance(py_executable, VenvSpec):
        return py_executable
    if not isinstance(py_executable, str):
        raise TypeError(f"expected a VenvSpec or a command 'uv run ...', got {type(py_executable).__name__}")
    if not is_uv_command(py_executable):
        raise ValueError(f"expected a VenvSpec or a command 'uv run ...', got {redacted(py_executable)!r}")
    return VenvSpec(command=py_executable)


def checked_seconds(name: str, value: Any) -> float:
    """A deadline."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, more than 0 and finite, got {value!r}")
    return float(value)
