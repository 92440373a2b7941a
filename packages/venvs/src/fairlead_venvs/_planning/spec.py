# SPDX-License-Identifier: Apache-2.0
"""The fields of a request for an environment, checked once. `VenvSpec` is the public class of them."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .._build.redact import find_command_secrets, is_secret_name, redact
from .._build.variables import NOT_INHERITED
from .command import parse_command
from .requirements import normalise

PYTHON = r"\d+\.\d+(\.\d+)?"
OF_PROJECT = ("extras", "groups", "default_groups", "no_groups", "frozen")


@dataclass(frozen=True, kw_only=True, repr=False)
class BaseSpec:
    """The fields of `VenvSpec`, which documents them."""

    requirements: Sequence[str] | None = None
    project: str | Path | None = None
    extras: Sequence[str] = ()
    groups: Sequence[str] = ()
    default_groups: bool = False
    no_groups: Sequence[str] = ()
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
            self._read_command(command)
        for name in ("extras", "groups", "no_groups", "find_links", "setup"):
            self._set(name, _check_strings(name, getattr(self, name)))
        if self.project is not None:
            self._set("project", os.path.abspath(os.path.expanduser(self.project)))
        else:
            self._set("requirements", normalise(_check_strings("requirements", self.requirements)))
            if unfit := [name for name in OF_PROJECT if getattr(self, name)]:
                raise ValueError(f"{', '.join(unfit)} belong to a project, and there is none")
        for name in ("extras", "groups", "no_groups"):
            self._set(name, tuple(sorted(set(getattr(self, name)))))
        self._set("find_links", tuple(map(_resolve_link, self.find_links)))
        self._set("env", _check_variables(self.env, links=bool(self.find_links), index=self.index is not None))
        self._check()

    def _read_command(self, command: str) -> None:
        """Set the fields that a command gives. Fields that it does not give, such as a Python, stay as they are."""
        if beside := [name for name in OF_PROJECT if getattr(self, name)]:
            raise ValueError(f"{', '.join(beside)} beside the command {redact(command)!r}: put it into the command")
        for name, value in parse_command(command).items():
            if value or name == "requirements":
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
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

    def __repr__(self) -> str:
        shown = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if getattr(self, one.name) not in (one.default, {}, None)
        }
        if "env" in shown:
            shown["env"] = {name: "***" if is_secret_name(name) else value for name, value in self.env.items()}
        text = f"VenvSpec({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
        return redact(text, find_command_secrets(self.setup))


def _resolve_link(link: str) -> str:
    """Return a folder of this machine as its absolute path, and any other URL unchanged."""
    if link.lower().startswith("file:"):
        parts = urlsplit(link)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"find_links: {link!r} names a file of another host. Give a path, or an http URL.")
        link = url2pathname(parts.path)
    return link if "://" in link else os.path.abspath(os.path.expanduser(link))


def _check_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a sequence of strings, got {redact(repr(value))}")
    return tuple(value)


def _check_variables(env: Any, *, links: bool, index: bool) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env must map names to strings, got {type(env).__name__}")
    ours = {*NOT_INHERITED, *(["UV_FIND_LINKS"] if links else []), *(["UV_DEFAULT_INDEX"] if index else [])}
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to strings, got {name!r}: {type(value).__name__}")
        if name in ours:
            raise ValueError(f"env may not set {name}: it is set for each build")
    return dict(sorted(env.items()))
