# SPDX-License-Identifier: Apache-2.0
"""Environments on disk: one folder each, complete when its manifest says so."""

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..exceptions import VenvBuildError
from .permissions import check_trusted, choose_root, open_trusted, share

# Part of every fingerprint: environments of another format are other environments.
FORMAT = 3
FACTS = frozenset({"description", "built_at", "fingerprint", "python", "ray", "request"})
MANIFEST = ".fairlead-complete.json"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
# Every process of an environment's Python holds a shared lock on the manifest while it lives. The kernel releases it.
# Other containers of the machine see no process, but the lock.
HOLD = (
    "import fcntl, os, sys; exec('try: fcntl.flock(os.open(os.path.join(sys.prefix, "
    f'"{MANIFEST}"), os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)\\nexcept OSError: pass\')\n'
)


def venv_root() -> Path:
    """Return this user's folder of environments: in `FAIRLEAD_VENV_DIR`, else in the user's cache folder."""
    given = os.environ.get("FAIRLEAD_VENV_DIR")
    if given:
        root = os.path.abspath(os.path.expanduser(given))
        if "," in root:
            raise ValueError(
                f"FAIRLEAD_VENV_DIR is {root!r}. uv separates folders with wheels by commas, so the path must not have "
                "one. Choose another folder."
            )
        return choose_root(Path(root))
    import platformdirs

    return choose_root(Path(platformdirs.user_cache_dir("fairlead", appauthor=False), "venvs"))


def check_name(name: Any) -> str:
    """Return a name that can be part of a folder's name, or raise a ValueError."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or ".." in name:
        raise ValueError(
            f"venv_name must be a plain word of at most 100 letters, digits, '_', '-' and '.', and must not start with "
            f"'-' or '.', got {name!r}"
        )
    return name


def python_of(folder: str | Path) -> str:
    return os.path.join(folder, "bin", "python")


def lock_path(folder: Path) -> Path:
    """Return the lock file of an environment. It is not in the environment's folder, which may be replaced."""
    return folder.parent / ".locks" / f"{folder.name}.lock"


def read_manifest(folder: str | Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """Read the manifest of a complete environment; None if it is missing, damaged or another one, or another user's."""
    root, python = Path(folder).parent, python_of(folder)
    manifest = read_facts(root, Path(folder, MANIFEST))
    if not manifest.keys() >= FACTS:
        return None
    try:
        check_trusted(root, Path(python).parent)
    except VenvBuildError:
        return None
    if fingerprint is not None and manifest["fingerprint"] != fingerprint:
        return None
    # A link: it may point to a base interpreter that has been removed.
    return manifest if os.path.exists(python) else None


def write_manifest(folder: Path, root: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of an environment and the code that locks it, as the last files before it is published."""
    for packages in folder.glob("lib/python*/site-packages"):
        hold = packages / "fairlead_hold.pth"
        hold.write_text(HOLD, encoding="utf-8")
        share(hold, root)
    write_facts(folder / MANIFEST, facts)
    share(folder / MANIFEST, root)


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump({**facts, "format": FORMAT}, file, indent=1, sort_keys=True)
        file.write("\n")


def read_facts(root: Path, path: Path) -> dict[str, Any]:
    """Read a file of facts; empty if there is none, or it is damaged, in another format, or may be another user's."""
    try:
        with open(path, "rb", opener=functools.partial(open_trusted, root)) as file:
            facts = json.loads(file.read())
    except (OSError, VenvBuildError, ValueError, RecursionError):  # the last for endless brackets
        return {}
    return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else {}
