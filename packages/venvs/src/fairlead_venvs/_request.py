# SPDX-License-Identifier: Apache-2.0
"""The fields of a request for an environment, checked once; also those that a command of uv stands for."""

import argparse
import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ._node.redact import is_secret_name, redact
from ._node.uv import NOT_INHERITED

OF_PROJECT = ("extras", "groups", "default_groups", "frozen")
PYTHON = r"\d+\.\d+(\.\d+)?"


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
        if command is not None:
            if beside := [name for name in OF_PROJECT if getattr(self, name)]:
                raise ValueError(f"{', '.join(beside)} beside the command {redact(command)!r}: put it into the command")
            for name, value in parse_command(command).items():
                # A field that the command does not give, such as a Python, stays as it is.
                if value or name == "requirements":
                    self._set(name, value)
        for name in ("extras", "groups", "find_links", "setup"):
            self._set(name, _check_strings(name, getattr(self, name)))
        if self.project is not None:
            self._set("project", _absolute(self.project))
        else:
            wanted = _check_strings("requirements", self.requirements)
            self._set("requirements", tuple(sorted({_normalise(text) for text in wanted})))
            if unfit := [name for name in OF_PROJECT if getattr(self, name)]:
                raise ValueError(f"{', '.join(unfit)} belong to a project, and there is none")
        for name in ("extras", "groups"):
            self._set(name, tuple(sorted(set(getattr(self, name)))))
        self._set("find_links", tuple(link if "://" in link else _absolute(link) for link in self.find_links))
        self._set("env", _check_variables(self.env))
        if self.python is not None and not (isinstance(self.python, str) and re.fullmatch(PYTHON, self.python)):
            raise ValueError(f"python must be a version such as '3.11' or '3.11.7', got {self.python!r}")
        if any("," in link for link in self.find_links):
            raise ValueError(f"find_links must not contain a comma, got {redact(str(self.find_links))}")
        if self.index is not None and (not isinstance(self.index, str) or "://" not in self.index):
            raise ValueError("index must be a URL, https://...")
        if self.index is not None and self.no_index:
            raise ValueError("index and no_index contradict each other")
        if self.setup and not self.setup[0]:
            raise ValueError("setup must start with a program")

    def _set(self, name: str, value: Any) -> None:
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `uv run`, whose results are fields of a spec."""
    parser = _Parser(prog="uv run", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory", dest="project")
    parser.add_argument("--project")
    parser.add_argument("--python")
    parser.add_argument("--with", dest="requirements", action="append", default=[])
    parser.add_argument("--extra", dest="extras", action="append", default=[])
    parser.add_argument("--group", dest="groups", action="append", default=[])
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--no-project", action="store_true", default=False)
    # The lock is never changed, so this has no effect.
    parser.add_argument("--locked", dest="ignored", action="store_true")
    return parser


def is_uv_command(text: str) -> bool:
    """Return whether this is a command of uv, and not the path of an interpreter."""
    words = text.split()
    return len(words) > 1 and Path(words[0]).name == "uv"


def parse_command(command: str, folder: str | Path | None = None) -> dict[str, Any]:
    """Return the fields of the spec that a command means. Its project is relative to a folder, or the current one."""
    program, *words = shlex.split(command) or [""]
    command = redact(command)  # from here on it is only shown
    if Path(program).name != "uv" or words[:1] != ["run"]:
        raise ValueError(f"expected a command that starts with 'uv run', got {command!r}")
    parser = _make_parser()
    try:
        fields = vars(parser.parse_args(words[1:]))
    except ValueError as error:
        supported = " ".join(parser.format_usage().split()[1:])
        raise ValueError(f"{command!r} cannot be read: {redact(str(error))}. Supported is {supported}.") from None
    fields.pop("ignored", None)
    fields["requirements"] = [text.strip() for value in fields["requirements"] for text in value.split(",")]
    if fields.pop("no_project"):
        if "project" in fields or fields["extras"] or fields["groups"] or "frozen" in fields:
            raise ValueError(f"--no-project contradicts other flags in {command!r}, which need a project")
        return {name: value for name, value in fields.items() if name not in OF_PROJECT}
    if fields.pop("requirements"):
        raise ValueError(
            f"--with in {command!r} is a second source beside the project. Add the requirement to the project as a "
            "group or an extra, or use --no-project"
        )
    here = Path.cwd() if folder is None else Path(folder)
    return {**fields, "default_groups": True, "project": str(here / fields.get("project", ""))}


def is_wheel(text: str) -> bool:
    """Return whether a requirement is the path of a wheel."""
    return text.endswith(".whl") and "@" not in text and "://" not in text


def _absolute(path: str | Path) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _normalise(text: str) -> str:
    if is_wheel(text):
        path = _absolute(text)
        if not os.path.isfile(path):
            raise ValueError(f"there is no wheel {path}")
        return path
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{redact(text)!r} is not a requirement: {redact(str(error)).splitlines()[0]}. Options such as -r and -e "
            "are not supported: list the requirements, or give a project"
        ) from None
    if requirement.url is not None and requirement.url.startswith("file:"):
        raise ValueError(
            f"{text!r} names a path of this machine. Give a wheel by its path alone; give a folder as project=, or "
            "build its wheel with `uv build`"
        )
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)


def _check_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a sequence of strings, got {redact(repr(value))}")
    return tuple(value)


def _check_variables(env: Any) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env must map names to strings, got {type(env).__name__}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to strings, got {name!r}: {type(value).__name__}")
        if name in NOT_INHERITED:
            raise ValueError(f"env may not set {name}: it is set for each build")
    return dict(sorted(env.items()))
