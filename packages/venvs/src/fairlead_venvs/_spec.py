# SPDX-License-Identifier: Apache-2.0
"""The content of an environment, as a user requests it."""

from typing import Any

from ._build.redact import redact
from ._planning.plan import plan_venv
from ._planning.spec import BaseSpec, is_uv_command


class VenvSpec(BaseSpec):
    """The content of an environment. Specs that mean the same have the same fingerprint and share one environment.

    Exactly one of `requirements`, `project` and `command` is given.

    Args:
        requirements: as for pip: "numpy>=2", "pkg @ https://...", or the path of a wheel. May be empty.
        project: folder with a pyproject.toml. Its uv.lock is beside it, or in the workspace that it is part of.
            Nothing is installed editable: its own code, and that of local folders it depends on, is installed as a
            wheel that `uv build` makes.
        extras: extras of the project to install. Their order does not matter.
        groups: dependency groups of the project to install.
        default_groups: whether to install also the groups that uv installs by default (usually `dev`).
        no_groups: groups to leave out in any case.
        install_project: whether to install the project's own code.
        frozen: do not check that the lock matches the pyproject. A spec whose lock is checked has another environment.
        command: "uv run --locked --extra vllm --directory X", read as a project with its extras, groups and default
            groups; or "uv run --no-project --with numpy", read as requirements.
        python: version, "3.11" or "3.11.7"; by default major and minor version of this Python.
        env: variables for uv and `setup`, such as UV_INDEX or UV_TORCH_BACKEND. They override uv's variables of this
            process, which also apply and count if they decide what is installed. Secrets of `setup` belong here, too:
            they are never shown or written. The fingerprint does not count them, nor variables that only affect speed.
        find_links: folders with wheels, as paths or `file:` URLs, whose content counts and is sent to the nodes; or
            other URLs.
        index: URL of the package index, instead of the one that uv is configured to use.
        no_index: use no index at all.
        setup: a command, as a list, that runs in the new environment at the end. It is shown in errors.
        system_site_packages: make the packages of the base interpreter visible. Their content does not count.

    Raises:
        ValueError: the arguments contradict each other, or do not describe an environment.
        TypeError: a string where a sequence of strings is needed.

    >>> spec = VenvSpec(requirements=["NumPy >= 2", "ray"])
    >>> spec.requirements
    ('numpy>=2', 'ray')
    >>> spec == VenvSpec(requirements=("ray", "numpy>=2"))
    True
    """

    def fingerprint(self) -> str:
        """Return a hash of everything that decides the content, as 64 hexadecimal digits.

        For a project it covers the bytes of its lock, the parts of its pyproject about dependencies and uv, the
        content of its wheel, extras and groups. It also covers the requirements and the versions that they were
        resolved to, wheels by their content, and the version, implementation and platform of Python. Settings of uv in
        `env` and in the variables of this process, and `setup`, are part of it too. To compute it, the wheel of a
        project that has changed is built, and requirements that were never resolved are resolved.

        Raises:
            ValueError: the project has no lock, or lacks an extra or group; a variable of uv names a file that cannot
                be read.
            VenvBuildError: its wheel cannot be built, or nothing satisfies the requirements.
        """
        return plan_venv(self).recipe.fingerprint


def as_spec(py_executable: Any) -> VenvSpec:
    """Return a spec that is given as itself or as a command."""
    if isinstance(py_executable, VenvSpec):
        return py_executable
    if not isinstance(py_executable, str):
        raise TypeError(f"expected a VenvSpec or a command 'uv run ...', got {type(py_executable).__name__}")
    if not is_uv_command(py_executable):
        raise ValueError(f"expected a VenvSpec or a command 'uv run ...', got {redact(py_executable)!r}")
    return VenvSpec(command=py_executable)
