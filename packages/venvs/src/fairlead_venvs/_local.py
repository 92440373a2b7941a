# SPDX-License-Identifier: Apache-2.0
"""An environment on this machine."""

from ._lock import plan_venv
from ._node.build import ensure_venv, find_venv
from ._node.uv import start_deadline
from ._progress import Status
from ._spec import VenvSpec, as_spec


def create_local_venv(
    py_executable: str | VenvSpec, venv_name: str | None = None, force_rebuild: bool = False, timeout_s: float = 1800
) -> str:
    """Return the interpreter of an environment on this machine, and build it first if it is missing. Needs no cluster.

    For an environment that is there, this starts no process and takes a few milliseconds. If many threads or processes
    need the same one at once, one of them builds it.

    Args:
        py_executable: a spec, or a command such as "uv run --locked --extra vllm --directory X".
        venv_name: first part of the folder's name, a plain word; by default the project's name.
        force_rebuild: resolve the requirements and build it again. It replaces the existing environment, or is a
            second one if other versions satisfy the requirements now; later calls use the new versions.
        timeout_s: for everything together, in seconds.

    Returns:
        Path of `bin/python`.

    Raises:
        TypeError, ValueError: the arguments do not describe an environment, or a time limit.
        VenvBuildError: the build failed. The error has the output of uv.
        VenvTimeoutError: the environment was not ready in time.
        UvUnavailableError: there is no uv, or it is too old.

    >>> create_local_venv("numpy")
    Traceback (most recent call last):
    ValueError: expected a VenvSpec or a command 'uv run ...', got 'numpy'
    """
    spec = as_spec(py_executable)
    with Status() as status:
        deadline = start_deadline(timeout_s, status.update)
        plan = plan_venv(spec, venv_name, deadline, refresh=force_rebuild)
        recipe = plan.recipe
        if not force_rebuild and (ready := find_venv(recipe.folder, recipe.fingerprint, recipe.shared)) is not None:
            return ready.python
        return ensure_venv(plan.recipe, plan.read_files, deadline, force=force_rebuild).python
