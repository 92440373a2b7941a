# SPDX-License-Identifier: Apache-2.0
"""Whose files decide what is installed and run: the permissions of new files, and the check of files that are there."""

import os
import re
import stat
from pathlib import Path

from ..exceptions import VenvBuildError

# The name of one user's part of a folder in which anybody may create files.
OWN = r"of-user-\d+"
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def choose_root(folder: Path) -> Path:
    """Return a folder of environments, or this user's part of it if other users may create files there."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:  # it does not exist yet
        return folder
    # With the sticky bit, no user may replace another's files.
    return folder / f"of-user-{os.geteuid()}" if mode & (stat.S_IWOTH | stat.S_ISVTX) else folder


def make_root(root: Path) -> None:
    """Create the folder of all environments, unless it exists. The umask says whether the group may write to it."""
    if lacks_sticky_bit(base := _base_of(root)):
        raise VenvBuildError(
            f"Every user may replace what others have made in {base}, so it is not used. Its owner can change that: "
            f"`chmod +t {base}`. Or choose another folder (FAIRLEAD_VENV_DIR)."
        )
    root.mkdir(0o700 if re.fullmatch(OWN, root.name) else 0o775, parents=True, exist_ok=True)
    check_trusted(root, root)


def make_folder(folder: Path, root: Path) -> None:
    """Create a folder with the write permissions of the folder of all environments, unless it exists."""
    try:
        folder.mkdir(0o755)
    except FileExistsError:
        check_trusted(root, folder)
    else:
        share(folder, root)


def is_shared_by_group(seen: os.stat_result) -> bool:
    """Return whether the group of a folder may replace what is in it, and no other user but the owner."""
    return seen.st_mode & (OTHERS | stat.S_ISVTX) == stat.S_IWGRP


def share(path: str | Path, root: str | Path) -> None:
    """Let the group of `root` write to a new file or folder in it if it may write to `root`, else only the owner."""
    top, made = os.stat(root), os.stat(path)
    mode = stat.S_IMODE(made.st_mode) & ~OTHERS
    if is_shared_by_group(top) and made.st_gid == top.st_gid:
        mode |= stat.S_IRWXG | stat.S_ISGID if stat.S_ISDIR(made.st_mode) else stat.S_IRGRP | stat.S_IWGRP
    if mode != stat.S_IMODE(made.st_mode):
        os.chmod(path, mode)


def find_fault(root: Path, path: Path) -> str:
    """Return why somebody else may decide the content of a path in the folder of all environments.

    Every folder on the way must belong to this user, to root, to the owner of that folder, or to its group if this may
    write there.
    """
    base = _base_of(root)
    try:
        top = os.stat(base)
        if lacks_sticky_bit(base):
            return f"every user may replace what others have made in {base}"
        at = base
        for name in path.relative_to(base).parts:
            at = at / name
            seen = os.lstat(at)
            grouped = is_shared_by_group(top) and seen.st_gid == top.st_gid
            if stat.S_ISLNK(seen.st_mode):
                return f"{at} is a link"
            if seen.st_uid not in (os.geteuid(), 0, top.st_uid) and not grouped:
                return f"{at} belongs to user {seen.st_uid}"
            if seen.st_mode & (stat.S_IWOTH if grouped else OTHERS):
                return f"{at} can be changed by other users (mode {stat.S_IMODE(seen.st_mode):o})"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return str(error)
    return ""


def _base_of(root: Path) -> Path:
    """Return the folder of the environments of all users."""
    return root.parent if re.fullmatch(OWN, root.name) else root


def lacks_sticky_bit(folder: Path) -> bool:
    """Return whether every user may replace what others have made in a folder; False if it does not exist."""
    try:
        return os.stat(folder).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    except OSError:
        return False


def check_trusted(root: Path, path: Path) -> None:
    """Refuse a path whose content somebody else may decide."""
    if fault := find_fault(root, path):
        raise VenvBuildError(f"{fault}, so it is not used. Remove it, or choose another folder (FAIRLEAD_VENV_DIR).")
