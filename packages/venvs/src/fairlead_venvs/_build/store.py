# SPDX-License-Identifier: Apache-2.0
"""Where environments are: one folder each, complete when its manifest says so."""

import hashlib
import json
import os
import re
import socket
import stat
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
    "USED_S",
    "checked_name",
    "entries_of",
    "host_id",
    "host_tag",
    "lock_path",
    "look",
    "mark_used",
    "python_of",
    "share",
    "share_folder",
    "venv_root",
    "write_manifest",
]

# Part of every fingerprint: environments of another format are other environments.
FORMAT = 2
FACTS = frozenset({"about", "built_at", "entries", "fingerprint", "python", "ray", "request"})
MANIFEST = ".fairlead-complete.json"
# A folder with a file per host, whose time is that of its last use.
USED = ".fairlead-used"
BUILDING = ".building-"
TRASH = ".trash-"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
# How long a host's mark of use is taken to be fresh: within it nothing is written.
USED_S = 60.0
PID_NAMESPACE = "/proc/self/ns/pid"
# The inode of the machine's own namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h).
FIRST_PID_NAMESPACE = "pid:[4026531836]"


def venv_root() -> Path:
    """Return the folder of all environments: `FAIRLEAD_VENV_DIR`, else one in the user's cache folder.

    Raises:
        ValueError: its path has a comma.
    """
    given = os.environ.get("FAIRLEAD_VENV_DIR")
    if given:
        root = os.path.abspath(os.path.expanduser(given))
        if "," in root:
            raise ValueError(
                f"FAIRLEAD_VENV_DIR is {root!r}. uv separates folders with wheels by commas, so the path must not have "
                "one. Choose another folder."
            )
        return Path(root)
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


def host_tag() -> str:
    """Return an id of this host until it reboots: equal only for processes that see each other."""
    return _tagged(_system("/proc/sys/kernel/random/boot_id"), _system(PID_NAMESPACE))


def host_id() -> str:
    """Return an id of this host that outlives a reboot. Two containers of one name have different ids.

    A container has the id of its machine or of its image, or none, so its namespace of processes counts as well.
    """
    machine, namespace = _system("/etc/machine-id"), _system(PID_NAMESPACE)
    if machine and namespace == FIRST_PID_NAMESPACE:
        return _tagged(machine)
    return host_tag()


def _tagged(*known: str) -> str:
    name = socket.gethostname()
    fit = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "host"
    return f"{fit}_{hashlib.sha256(''.join((name, *known)).encode()).hexdigest()[:6]}"


def _system(path: str) -> str:
    """What a file or link of the system says; empty where there is none, as outside Linux."""
    try:
        return os.readlink(path) if path == PID_NAMESPACE else Path(path).read_text()
    except OSError:
        return ""


def python_of(folder: str | Path) -> str:
    """The interpreter of an environment."""
    return os.path.join(folder, "Scripts" if sys.platform == "win32" else "bin", "python")


def lock_path(folder: Path) -> Path:
    """The file whose lock is held by who builds or removes an environment. Not in its folder, which comes and goes."""
    return folder.parent / ".locks" / f"{folder.name}.lock"


def look(folder: str | Path, fingerprint: str | None = None) -> dict[str, Any] | None:
    """The manifest of a complete environment; None if there is none, or a damaged one, or a part of it is gone.

    Takes no lock and starts nothing. With a fingerprint, it has to be that one.
    """
    try:
        manifest = json.loads(Path(folder, MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):  # the last by brackets without end
        return None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.keys() >= FACTS:
        return None
    if fingerprint is not None and manifest.get("fingerprint") != fingerprint:
        return None
    # A link: it may point to a base interpreter that has been removed.
    return manifest if os.path.exists(python_of(folder)) and _has(folder, manifest.get("entries")) else None


def entries_of(folder: Path) -> dict[str, list[str]]:
    """Return what stands at the top of an environment's folders of programs and of packages, by relative path."""
    scripts = Path(python_of(folder)).parent
    listed = [scripts, *folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages")]
    # A cache comes and goes.
    return {
        str(one.relative_to(folder)): sorted(name for name in os.listdir(one) if name != "__pycache__")
        for one in listed
    }


def _has(folder: str | Path, entries: Any) -> bool:
    """Return whether all entries are there that were there when the environment was published.

    Two folders are listed, no more: it costs some 50 us, and shows a package that has been deleted.
    """
    try:
        return all(set(names) <= set(os.listdir(os.path.join(folder, where))) for where, names in entries.items())
    except (AttributeError, OSError, TypeError):  # a manifest that has been damaged, or a folder that is gone
        return False


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The last thing that is written into an environment before it is published."""
    path = folder / MANIFEST
    with path.open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.write("\n")


def mark_used(folder: str | Path) -> None:
    """Remember that this host uses it, at most once a minute. Where that cannot be written it is not remembered."""
    mark = os.path.join(folder, USED, host_id())
    try:
        # The time is the file server's, whose clock may be ahead of this one.
        if abs(time.time() - os.stat(mark).st_mtime) > USED_S:
            os.utime(mark)
    except FileNotFoundError:
        try:
            share_folder(Path(mark).parent)
            Path(mark).touch()
            share(mark)
        except OSError:
            return
    except OSError:  # a folder that may be read only
        return


def share_folder(folder: Path) -> None:
    """Make a folder in which all may write who may write into the folder above it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    share(folder)


def share(path: str | Path) -> None:
    """Let those write a file or folder that this user has made who may write into the folder above it.

    The umask of most users keeps a common group from writing. The folder of all environments says who may.
    """
    given = os.stat(os.path.dirname(path)).st_mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISGID)
    made = os.stat(path)
    if not stat.S_ISDIR(made.st_mode):
        given &= ~stat.S_ISGID
    if given & ~made.st_mode:
        os.chmod(path, stat.S_IMODE(made.st_mode) | given)
