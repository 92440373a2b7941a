# SPDX-License-Identifier: Apache-2.0
"""The content of an environment, as a user requests it."""

from typing import Any

from ._lock import plan_venv
from ._node.redact import redact
from ._request import BaseSpec, is_uv_command


class VenvSpec(BaseSpec):
    """The content of an environment. Specs with the same content have the same fingerprint and share one environment.

    Exactly one of `requirements`, `project` and `command` is given.

    Args:
        requirements: as for pip: "numpy>=2", "pkg @ https://...", or the path of a wheel. May be empty.
        project: folder with a pyproject.toml. Its uv.lock is beside it, or in the workspace that it is part of.
            Nothing is installed editable: its own code, and that of local folders it depends on, travels as a source
            distribution.
        extras: extras of the project to install. Their order does not matter.
        groups: dependency groups of the project to install.
        default_groups: whether to install also the groups that uv installs by default (usually `dev`).
        install_project: whether to install the project's own code.
        frozen: do not check that the lock matches the pyproject.
        command: "uv run --locked --extra vllm --directory X", read as a project with its extras, groups and default
            groups; or "uv run --no-project --with numpy", read as requirements.
        python: version, "3.11" or "3.11.7"; by default major and minor version of this Python.
        env: variables for uv and `setup`, such as UV_INDEX or UV_TORCH_BACKEND, on every node. Secrets of `setup`
            belong here: they are never shown or written, and do not count.
        find_links: folders or URLs with distributions. Those that are chosen are sent to the nodes.
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

        It covers the exported lock, with URLs and hashes, and the content of a project's source distributions. It also
        covers uv's settings in the project and in `env`, the version, implementation and platform of Python, and
        `setup`. Requirements that were never resolved are resolved first.

        Raises:
            ValueError: there is no project or lock, or a folder of `find_links` is missing.
            VenvBuildError: nothing satisfies the requirements, or the lock does not match its pyproject.
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
