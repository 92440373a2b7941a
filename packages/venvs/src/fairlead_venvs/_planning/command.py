# SPDX-License-Identifier: Apache-2.0
"""Commands such as `uv run --locked --extra vllm --directory X`, read as what they would install."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._build.redact import redacted

__all__ = ["is_uv_command", "parsed"]

# What each flag does to the fields of a spec. Those with a value take it from `--flag value` and `--flag=value`.
WITH_VALUE: dict[str, Callable[[dict[str, Any], str], None]] = {
    "--default-index": lambda fields, value: fields.update(index=value),
    "--directory": lambda fields, value: fields.update(project=value),
    "--extra": lambda fields, value: fields["extras"].append(value),
    "--find-links": lambda fields, value: fields["find_links"].append(value),
    "--group": lambda fields, value: fields["groups"].append(value),
    "--no-group": lambda fields, value: fields["no_groups"].append(value),
    "--project": lambda fields, value: fields.update(project=value),
    "--python": lambda fields, value: fields.update(python=value),
    "--with": lambda fields, value: fields["requirements"].extend(one.strip() for one in value.split(",")),
}
WITHOUT: dict[str, Callable[[dict[str, Any]], None]] = {
    "--frozen": lambda fields: fields.update(frozen=True),
    # The two that are so anyway: the lock is never changed, and nothing is installed editable.
    "--locked": lambda fields: None,
    "--no-editable": lambda fields: None,
    "--no-default-groups": lambda fields: fields.update(default_groups=False),
    "--no-dev": lambda fields: fields["no_groups"].append("dev"),
    "--no-index": lambda fields: fields.update(no_index=True),
    "--no-project": lambda fields: fields.update(no_project=True),
}
OF_PROJECT = ("extras", "groups", "no_groups", "default_groups")
SHORT = {"-f": "--find-links", "-p": "--python", "-w": "--with"}


def is_uv_command(text: str) -> bool:
    """Whether it is a command of uv, as opposed to the path of an interpreter."""
    words = text.split()
    return len(words) > 1 and Path(words[0]).name == "uv"


def parsed(command: str, folder: str | Path | None = None) -> dict[str, Any]:
    """The fields of the spec that a command stands for.

    Args:
        command: starts with `uv run`.
        folder: where the project is if the command does not say; the current folder by default.

    Raises:
        ValueError: the command is no such one, or has flags whose meaning would be lost.
    """
    words = iter(shlex.split(command))
    command = redacted(command)  # from here on only shown
    if Path(next(words, "")).name != "uv" or next(words, "") != "run":
        raise ValueError(f"expected a command that starts with 'uv run', got {command!r}")
    fields: dict[str, Any] = {"project": None, "default_groups": True, "no_project": False}
    fields.update({name: [] for name in ("extras", "find_links", "groups", "no_groups", "requirements")})
    for word in words:
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in WITH_VALUE:
            WITH_VALUE[flag](fields, value if equals else _value(flag, words, command))
        elif flag in WITHOUT and not equals:
            WITHOUT[flag](fields)
        elif word in ("python", "--") and not list(words):
            break  # what would be run: an interpreter, and that is what is given
        else:
            raise ValueError(
                f"cannot read {redacted(word)!r} in {command!r}: what it means would be lost. Supported are "
                f"{', '.join(sorted([*WITH_VALUE, *WITHOUT]))}"
            )
    return _settled(fields, command, folder)


def _value(flag: str, words: Iterator[str], command: str) -> str:
    try:
        return next(words)
    except StopIteration:
        raise ValueError(f"{flag} needs a value in {command!r}") from None


def _settled(fields: dict[str, Any], command: str, folder: str | Path | None) -> dict[str, Any]:
    if fields.pop("no_project"):
        if fields.pop("project") or fields["extras"] or fields["groups"] or fields.get("frozen"):
            raise ValueError(f"--no-project leaves no project for the other flags in {command!r}")
        return {name: value for name, value in fields.items() if name not in OF_PROJECT}
    if fields.pop("requirements"):
        raise ValueError(
            f"--with in {command!r} would be a second source, next to the project. Add it to the project as a group or "
            "an extra, or use --no-project"
        )
    here = Path.cwd() if folder is None else Path(folder)
    fields["project"] = str(here / (fields["project"] or ""))
    return fields
