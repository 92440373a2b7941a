# SPDX-License-Identifier: Apache-2.0
"""Reads commands such as `uv run --locked --extra vllm --directory X` as the fields of a spec."""

import shlex
from pathlib import Path
from typing import Any

from .._build.redact import redact

# The field that the value of a flag sets, or is added to. A value is written as `--flag value` or `--flag=value`.
SETS = {"--default-index": "index", "--directory": "project", "--project": "project", "--python": "python"}
ADDS = {
    "--extra": "extras",
    "--find-links": "find_links",
    "--group": "groups",
    "--no-group": "no_groups",
    "--with": "requirements",
}
# The fields that a flag without a value sets.
FLAGS: dict[str, dict[str, Any]] = {
    "--frozen": {"frozen": True},
    # These two have no effect: the lock is never changed, and nothing is installed editable.
    "--locked": {},
    "--no-editable": {},
    "--no-default-groups": {"default_groups": False},
    "--no-index": {"no_index": True},
    "--no-project": {"no_project": True},
}
OF_PROJECT = ("extras", "groups", "no_groups", "default_groups")
SHORT = {"-f": "--find-links", "-p": "--python", "-w": "--with"}


def is_uv_command(text: str) -> bool:
    """Return whether this is a command of uv, and not the path of an interpreter."""
    words = text.split()
    return len(words) > 1 and Path(words[0]).name == "uv"


def parse_command(command: str, folder: str | Path | None = None) -> dict[str, Any]:
    """Return the fields of the spec that a command means.

    Args:
        command: a command that starts with `uv run`.
        folder: the folder to which the command's project is relative; by default the current one.

    Raises:
        ValueError: it is another command, or has flags that a spec cannot represent.
    """
    words = iter(shlex.split(command))
    command = redact(command)  # from here on it is only shown
    if Path(next(words, "")).name != "uv" or next(words, "") != "run":
        raise ValueError(f"expected a command that starts with 'uv run', got {command!r}")
    fields: dict[str, Any] = {"project": None, "default_groups": True, "no_project": False}
    fields.update({name: [] for name in ("extras", "find_links", "groups", "no_groups", "requirements")})
    for word in words:
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in SETS or flag in ADDS:
            if not equals and (value := next(words, "")) == "":
                raise ValueError(f"{flag} needs a value in {command!r}")
            if flag in SETS:
                fields[SETS[flag]] = value
            else:
                fields[ADDS[flag]] += [one.strip() for one in value.split(",")] if flag == "--with" else [value]
        elif flag in FLAGS and not equals:
            fields |= FLAGS[flag]
        elif word == "--no-dev":
            fields["no_groups"].append("dev")
        elif word in ("python", "--") and not list(words):
            break  # the command runs an interpreter, which is what a spec gives
        else:
            supported = ", ".join(sorted([*SETS, *ADDS, *FLAGS, "--no-dev"]))
            raise ValueError(f"{redact(word)!r} in {command!r} is not supported. Supported are {supported}")
    return _finish(fields, command, folder)


def _finish(fields: dict[str, Any], command: str, folder: str | Path | None) -> dict[str, Any]:
    if fields.pop("no_project"):
        if fields.pop("project") or fields["extras"] or fields["groups"] or fields.get("frozen"):
            raise ValueError(f"--no-project contradicts other flags in {command!r}, which need a project")
        return {name: value for name, value in fields.items() if name not in OF_PROJECT}
    if fields.pop("requirements"):
        raise ValueError(
            f"--with in {command!r} is a second source beside the project. Add the requirement to the project as a "
            "group or an extra, or use --no-project"
        )
    here = Path.cwd() if folder is None else Path(folder)
    fields["project"] = str(here / (fields["project"] or ""))
    return fields
