# SPDX-License-Identifier: Apache-2.0
"""What an environment is to hold, checked once."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ._build.redact import is_secret_name, redacted, secrets_of_command
from ._build.variables import NOT_INHERITED
from ._planning.command import parsed
from ._planning.requirements import normalised

__all__ = ["VenvSpec"]

PYTHON = r"\d+\.\d+(\.\d+)?"
OF_PROJECT = ("extras", "groups", "default_groups", "no_groups", "frozen")


@dataclass(frozen=True, kw_only=True, repr=False)
class VenvSpec:
    """What an environment is to hold. Two that mean the same have the same fingerprint, and share one environment.

    Exactly one of `requirements`, `project` and `command` is given.

    Args:
        requirements: as for pip: "numpy>=2", "pkg @ https://...", or the path of a wheel. May be empty.
        project: folder with a pyproject.toml; its uv.lock is beside it, or in the workspace that it is part of.
            Nothing is installed editable: its own code, and that of local folders it depends on, goes in as a
            wheel, as `uv build` makes it.
        extras: of the project. Their order does not matter.
        groups: of the project's dependencies. No others are installed.
        default_groups: whether those groups are added that uv installs by default (usually `dev`).
        no_groups: those that are left out all the same.
        install_project: whether the project's own code is installed.
        frozen: do not check that the lock matches the pyproject. The environment is another one than that of a spec
            that has the lock checked.
        command: "uv run --locked --extra vllm --directory X", read as a project with its extras, groups and default
            groups; or "uv run --no-project --with numpy", read as requirements.
        python: version, "3.11" or "3.11.7"; by default major and minor version of the Python that asks.
        env: variables for uv and `setup`, such as UV_INDEX or UV_TORCH_BACKEND. They come before uv's variables of
            this process, of which those that decide what is installed hold and count, too. Credentials in them are
            never shown nor written. The fingerprint counts a digest of a secret variable. It does not count
            credentials of package indexes, nor what only affects speed.
        find_links: folders with wheels, as paths or `file:` URLs, whose content counts and is shipped to the nodes;
            or other URLs.
        index: URL of the package index, instead of the one uv is configured to use.
        no_index: use no index at all.
        setup: a command, as a list, run in the new environment at the end.
        system_site_packages: let it see the packages of the base interpreter, whose content does not count.

    Raises:
        ValueError: nothing that could be built, or means anything.
        TypeError: a string where a sequence of strings is needed.

    >>> spec = VenvSpec(requirements=["NumPy >= 2", "ray"])
    >>> spec.requirements
    ('numpy>=2', 'ray')
    >>> spec == VenvSpec(requirements=("ray", "numpy>=2"))
    True
    """

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
            self._take(parsed(command), command)
        for name in ("extras", "groups", "no_groups", "find_links", "setup"):
            self._set(name, _strings(name, getattr(self, name)))
        if self.project is not None:
            self._set("project", os.path.abspath(os.path.expanduser(self.project)))
        else:
            self._set("requirements", normalised(_strings("requirements", self.requirements)))
            if unfit := [name for name in OF_PROJECT if getattr(self, name)]:
                raise ValueError(f"{', '.join(unfit)} belong to a project, and there is none")
        for name in ("extras", "groups", "no_groups"):
            self._set(name, tuple(sorted(set(getattr(self, name)))))
        links = tuple(_link(link) for link in self.find_links)
        self._set("find_links", links)
        self._set("env", _variables(self.env, links=bool(links), index=self.index is not None))
        self._check()

    def _take(self, fields: dict[str, Any], command: str) -> None:
        """Become what a command stands for; what it does not say, such as a Python, may be given beside it."""
        if beside := [name for name in OF_PROJECT if getattr(self, name)]:
            raise ValueError(f"{', '.join(beside)} beside the command {redacted(command)!r}: say it in the command")
        for name, value in fields.items():
            if value or name == "requirements":
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        if self.python is not None and not (isinstance(self.python, str) and re.fullmatch(PYTHON, self.python)):
            raise ValueError(f"python must be a version such as '3.11' or '3.11.7', got {self.python!r}")
        if any("," in link for link in self.find_links):
            raise ValueError(f"find_links cannot hold a comma, got {redacted(str(self.find_links))}")
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
        return redacted(text, secrets_of_command(self.setup))

    def fingerprint(self) -> str:
        """Hash of everything that decides the content, 64 hexadecimal digits.

        It counts: for a project the bytes of its lock, what its pyproject says about dependencies and uv, the content
        of its wheel, extras and groups; the requirements and the versions that they were resolved to; wheels by their
        content; version and implementation of Python; the platform; uv's settings in `env` and in the variables of
        this process; `setup`. The wheel of a project that has changed is built for it, and requirements that have not
        been resolved before are resolved.

        Raises:
            ValueError: the project has no lock, or lacks an extra or group; a variable of uv names a file that cannot
                be read.
            VenvBuildError: its wheel cannot be built, or nothing satisfies the requirements.
        """
        from ._planning.plan import planned

        return planned(self).recipe.fingerprint


def _link(link: str) -> str:
    """A folder of this machine as its absolute path; any other URL as it is."""
    if link.lower().startswith("file:"):
        parts = urlsplit(link)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"find_links: {link!r} names a file of another host. Give a path, or an http URL.")
        link = url2pathname(parts.path)
    return link if "://" in link else os.path.abspath(os.path.expanduser(link))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a sequence of strings, got {redacted(repr(value))}")
    return tuple(value)


def _variables(env: Any, *, links: bool, index: bool) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env must map names to strings, got {type(env).__name__}")
    ours = {*NOT_INHERITED, *(["UV_FIND_LINKS"] if links else []), *(["UV_DEFAULT_INDEX"] if index else [])}
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map names to strings, got {name!r}: {type(value).__name__}")
        if name in ours:
            raise ValueError(f"env may not set {name}: it is set for each build")
    return dict(sorted(env.items()))
