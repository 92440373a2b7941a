# SPDX-License-Identifier: Apache-2.0
"""Where environments are: one folder each, complete when its manifest says so."""

import hashlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

__all__ = [
    "BUILDING",
    "FORMAT",
    "MANIFEST",
    "TRASH",
    "USED",
    "checked_name",
    "host_name",
    "host_tag",
    "lock_path",
    "look",
    "mark_used",
    "python_of",
    "venv_root",
    "write_manifest",
]

# Part of every fingerprint: environments of another format are other environments.
FORMAT = 1
FACTS = frozenset({"about", "built_at", "fingerprint", "python", "ray"})
MANIFEST = ".fairlead-complete.json"
# A folder with a file per host, whose time is that of its last use.
USED = ".fairlead-used"
BUILDING = ".building-"
TRASH = ".trash-"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
# How long a host's mark of use is taken to be fresh: within it nothing is written.
USED_S = 60.0


def venv_root() -> Path:
    """The folder of all environments: `FAIRLEAD_VENV_DIR`, else one in the user's cache folder."""
    given = os.environ.get("FAIRLEAD_VENV_DIR")
    if given:
        return Path(os.path.abspath(os.path.expanduser(given)))
    import platformdirs

    return Path(platformdirs.user_cache_dir("fairlead", appauthor=False), "venvs")


def checked_name(name: Any) -> str:
    """A plain word, fit for a folder's name."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or ".." in name:
        raise ValueError(
            f"venv_name must be a plain word of at most 100 letters, digits, '_', '-' and '.', that starts with none "
            f"of '-' and '.', got {name!r}"
        )
    return name


def host_name() -> str:
    """This host's name, fit for a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname()).strip("-")[:40] or "host"


def host_tag() -> str:
    """Tells processes apart that do not see each other: other hosts, other containers, before and after a reboot."""
    known = socket.gethostname()
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            known += os.readlink(source) if source.endswith("pid") else Path(source).read_text()
        except OSError:  # no Linux: the name has to do
            continue
    return f"{host_name()}_{hashlib.sha256(known.encode()).hexdigest()[:6]}"


def python_of(folder: str | Path) -> str:
    """The interpreter of an environment."""
    return os.path.join(folder, "Scripts" if sys.platform == "win32" else "bin", "python")


def lock_path(folder: Path) -> Path:
    """The file whose lock is held by who builds or removes an environment. Not in its folder, which comes and goes."""
    return folder.parent / ".locks" / f"{folder.name}.lock"


def look(folder: str | Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """The manifest of a complete environment; None if there is none, or a damaged one, or its Python is gone.

    Takes no lock and starts nothing. With a fingerprint, it has to be that one.
    """
    try:
        manifest = json.loads(Path(folder, MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.keys() >= FACTS:
        return None
    if fingerprint is not None and manifest.get("fingerprint") != fingerprint:
        return None
    # A link: it may point to a base interpreter that has been removed.
    return manifest if os.path.exists(python_of(folder)) else None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The last thing that is written into an environment before it is published."""
    path = folder / MANIFEST
    with path.open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.write("\n")


def mark_used(folder: str | Path) -> None:
    """Remember that this host uses it, at most once a minute. Where that cannot be written it is not remembered."""
    mark = os.path.join(folder, USED, host_name())
    try:
        if time.time() - os.stat(mark).st_mtime > USED_S:
            os.utime(mark)
    except FileNotFoundError:
        try:
            os.makedirs(os.path.dirname(mark), exist_ok=True)
            Path(mark).touch()
        except OSError:
            return
    except OSError:  # a folder that may be read only
        return
