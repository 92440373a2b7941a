# SPDX-License-Identifier: Apache-2.0
"""The environment of each worker class: registered in code, or listed in the project's pyproject.toml."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._lock import read_pyproject
from ._request import is_uv_command, is_wheel, parse_command
from ._spec import VenvSpec

TABLE = "[tool.fairlead.actor-environments]"


class PY_EXECUTABLES:
    """Names of common environments.

    Attributes:
        SYSTEM: this interpreter, on every node.
        BASE: the lock of the project in the current folder.
        VLLM: the same with its extra `vllm`.
    """

    SYSTEM: str = sys.executable
    BASE: str = "uv run --locked"
    VLLM: str = "uv run --locked --extra vllm"


actor_environments: dict[str, str | VenvSpec] = {}
"""The registered environments by the full name of the class: a spec, a command of uv, or an interpreter."""


def register_actor_env(fqn: str, spec: str | VenvSpec) -> None:
    """Register the environment of a worker class. It replaces an earlier one of the same class.

    Args:
        fqn: full name of the class, "package.module.Worker".
        spec: a spec, a command "uv run ...", or the path of an interpreter that every node has.

    Raises:
        ValueError: the name is not the full name of a class, or the command is empty.
        TypeError: the environment is neither a spec nor a string.

    >>> register_actor_env("package.module.Worker", PY_EXECUTABLES.SYSTEM)
    >>> get_actor_python_env("package.module.Worker") == PY_EXECUTABLES.SYSTEM
    True
    >>> "package.module.Worker" in known_actor_environments()
    True
    >>> del actor_environments["package.module.Worker"]
    """
    if not isinstance(fqn, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", fqn):
        raise ValueError(f"expected the full name of a class, 'package.module.Worker', got {fqn!r}")
    if not isinstance(spec, (str, VenvSpec)):
        raise TypeError(f"expected a VenvSpec, a command or a path for {fqn}, got {type(spec).__name__}")
    if not spec:
        raise ValueError(f"the environment of {fqn} is an empty string")
    actor_environments[fqn] = spec


def get_actor_python_env(actor_class_fqn: str) -> str | VenvSpec:
    """Return the environment of a worker class: the registered one, else that of the pyproject.toml.

    The pyproject.toml is the one of the current folder, or of the next one above it that has the table
    `[tool.fairlead.actor-environments]`.

    Raises:
        ValueError: neither has this class, or the table cannot be read.
    """
    if actor_class_fqn in actor_environments:
        return actor_environments[actor_class_fqn]
    listed = _read_table()
    if actor_class_fqn in listed:
        return listed[actor_class_fqn]
    known = ", ".join(sorted({*actor_environments, *listed})) or "none"
    raise ValueError(
        f"no environment is known for the worker class {actor_class_fqn!r} (known are: {known}). Give one: by "
        f"register_actor_env({actor_class_fqn!r}, ...), by the table {TABLE} in a pyproject.toml, or by python= of the "
        "worker group"
    )


def known_actor_environments() -> dict[str, str | VenvSpec]:
    """Return all environments that are registered or in the pyproject.toml, sorted by name.

    Raises:
        ValueError: the table cannot be read.
    """
    return dict(sorted({**_read_table(), **actor_environments}.items()))


def _read_table() -> dict[str, str | VenvSpec]:
    for folder in (Path.cwd(), *Path.cwd().parents):
        table = read_pyproject(folder).get("tool", {}).get("fairlead", {})
        if "actor-environments" in table:
            return {fqn: _parse_entry(fqn, value, folder) for fqn, value in table["actor-environments"].items()}
    return {}


def _parse_entry(fqn: str, value: Any, folder: Path) -> str | VenvSpec:
    """Read one entry. Its paths are relative to the folder of the pyproject."""
    try:
        if isinstance(value, Mapping):
            return VenvSpec(**_resolve_paths(value, folder))
        if not isinstance(value, str) or not value:
            raise TypeError(f"expected a command, a path or a table of VenvSpec's arguments, got {value!r}")
        if is_uv_command(value):
            return VenvSpec(**_resolve_paths(parse_command(value, folder), folder))
        return PY_EXECUTABLES.SYSTEM if value == "system" else os.path.join(folder, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{TABLE} in {folder / 'pyproject.toml'}, {fqn}: {error}") from None


def _resolve_paths(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    resolved = dict(arguments)
    if "command" in resolved:
        resolved |= parse_command(resolved.pop("command"), folder)
    if resolved.get("project") is not None:
        resolved["project"] = os.path.join(folder, resolved["project"])
        resolved.pop("requirements", None)
    elif "requirements" in resolved:
        wanted = resolved["requirements"]
        resolved["requirements"] = [os.path.join(folder, text) if is_wheel(text) else text for text in wanted]
    if "find_links" in resolved:
        resolved["find_links"] = [
            link if "://" in link else os.path.join(folder, link) for link in resolved["find_links"]
        ]
    return resolved
