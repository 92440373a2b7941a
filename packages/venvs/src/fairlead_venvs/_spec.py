# SPDX-License-Identifier: Apache-2.0
"""The fields of a request for an environment, checked once; also those that a command of uv stands for."""

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ._node.uv import NOT_INHERITED, is_secret_name, redact

OF_PROJECT = ("extras", "groups", "default_groups", "frozen")
# The options of `uv run` that are supported, with the field that each one gives, and those without a value.
OPTIONS = {
    "--directory": "project",
    "--project": "project",
    "--python": "python",
    "--extra": "extras",
    "--group": "groups",
    "--with": "requirements",
}
SWITCHES = ("--locked", "--frozen", "--no-project")


@dataclass(frozen=True, kw_only=True, repr=False)
class BaseSpec:
    """The fields of `VenvSpec`, which documents them."""

    requirements: Sequence[str] | None = None
    project: str | Path | None = None
    extras: Sequence[str] = ()
    groups: Sequence[str] = ()
    default_groups: bool = False
    install_project: bool = True
    frozen: bool = False
    command: dataclasses.InitVar[str | None] = None
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    find_links: Sequence[str] = ()
    index: str | None = None
    no_index: bool = False
    setup: Sequence[str] = ()
    system_site_packages: bool = False

    def __post_init__(self, command: str | None) -> None:
        given = {"requirements": self.requirements, "project": self.project, "command": command}
        sources = [name for name, value in given.items() if value is not None]
        if len(sources) != 1:
            raise ValueError(f"exactly one of requirements, project and command is needed, got {sources or 'none'}")
        if self.project is None and (unfit := [name for name in OF_PROJECT if getattr(self, name)]):
            raise ValueError(f"{', '.join(unfit)} belong to project=, or into the command as its options")
        fields = {**vars(self), **({} if command is None else parse_command(command))}
        for name in ("extras", "groups", "find_links", "setup"):
            fields[name] = _check_strings(name, fields[name])
        for name in ("extras", "groups"):
            fields[name] = tuple(sorted(set(fields[name])))
        if fields["project"] is not None:
            fields["project"] = _absolute(fields["project"])
        else:
            wanted = _check_strings("requirements", fields["requirements"])
            fields["requirements"] = tuple(sorted({_normalise(text) for text in wanted}))
        fields["find_links"] = tuple(link if "://" in link else _absolute(link) for link in fields["find_links"])
        fields["env"] = _check_variables(self.env)
        python = fields["python"]
        if python is not None and not (isinstance(python, str) and re.fullmatch(r"\d+\.\d+(\.\d+)?", python)):
            raise ValueError(f"python must be a version such as '3.11' or '3.11.7', got {python!r}")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shown = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) not in (item.default, {}, None)
        }
        if "env" in shown:
            shown["env"] = {name: "***" if is_secret_name(name) else value for name, value in self.env.items()}
        return redact(f"VenvSpec({', '.join(f'{name}={value!r}' for name, value in shown.items())})")


def is_uv_command(text: str) -> bool:
    """Return whether this is a command of uv, and not the path of an interpreter."""
    words = text.split()
    return len(words) > 1 and Path(words[0]).name == "uv"


def parse_command(command: str) -> dict[str, Any]:
    """Return the fields of the spec that a command means. The path of its project may be relative."""
    program, *words = shlex.split(command) or [""]
    shown = redact(command)
    if Path(program).name != "uv" or words[:1] != ["run"]:
        raise ValueError(f"expected a command that starts with 'uv run', got {shown!r}")
    switches, given = set(), dict[str, list[str]]()
    rest = iter(words[1:])
    for word in rest:
        option, is_joined, value = word.partition("=")
        if word in SWITCHES:
            switches.add(word)
        elif option not in OPTIONS:
            supported = ", ".join([*OPTIONS, *SWITCHES])
            raise ValueError(f"{shown!r} cannot be read: {redact(word)!r} is not supported. Use only {supported}.")
        elif not (value := value if is_joined else next(rest, "")) or value.startswith("--"):
            raise ValueError(f"{shown!r} cannot be read: {option} needs a value.")
        else:
            given.setdefault(OPTIONS[option], []).append(value)
    fields: dict[str, Any] = {
        name: values[-1] if name in ("project", "python") else values for name, values in given.items()
    }
    wanted = fields.pop("requirements", [])
    if "--no-project" in switches:
        if fields.keys() - {"python"} or "--frozen" in switches:
            raise ValueError(f"--no-project contradicts other options in {shown!r}, which need a project")
        return {**fields, "requirements": [text.strip() for value in wanted for text in value.split(",")]}
    if wanted:
        raise ValueError(
            f"--with in {shown!r} is a second source beside the project. Add the requirement to the project as a "
            "group or an extra, or use --no-project"
        )
    return {"project": ".", **fields, "default_groups": True, "frozen": "--frozen" in switches}


def _absolute(path: str | Path) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _normalise(text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{redact(text)!r} is not a requirement: {redact(str(error)).splitlines()[0]}. Options such as -r and -e "
            "are not supported: list the requirements, or give a project"
        ) from None
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)


def _check_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a sequence of strings, got {redact(repr(value))}")
    return tuple(value)


def _check_variables(env: Any) -> dict[str, str]:
    if not isinstance(env, Mapping) or not all(isinstance(text, str) for item in env.items() for text in item):
        raise TypeError("env must map names to strings")
    if taken := [name for name in env if name in NOT_INHERITED]:
        raise ValueError(f"env may not set {', '.join(taken)}: it is set for each build")
    return dict(sorted(env.items()))
