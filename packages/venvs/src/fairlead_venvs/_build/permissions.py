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
# Opens a folder that may be entered but not read, and a link instead of its target (on Linux).
LOOK = getattr(os, "O_PATH", os.O_RDONLY)
REMEDY = "Remove it, or choose another folder (FAIRLEAD_VENV_DIR)."


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
    check_trusted(root, _base_of(root))
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


def share(path: str | Path | int, root: str | Path) -> None:
    """Let the group of `root` write to a new file or folder in it if it may write to `root`, else only the owner."""
    top, made = os.stat(root), os.stat(path)
    mode = stat.S_IMODE(made.st_mode) & ~OTHERS
    if is_shared_by_group(top) and made.st_gid == top.st_gid:
        mode |= stat.S_IRWXG | stat.S_ISGID if stat.S_ISDIR(made.st_mode) else stat.S_IRGRP | stat.S_IWGRP
    if mode != stat.S_IMODE(made.st_mode):
        os.chmod(path, mode)


def open_trusted(root: Path, path: str | Path, flags: int = LOOK) -> int:
    """Open a path in the folder of all environments; a VenvBuildError if somebody else may decide its content.

    Every folder on the way must belong to this user, to root, to the owner of that folder, or to its group if this may
    write there. Each is opened and then checked, because a path may be replaced after a check.
    """
    base = _base_of(root)
    names = Path(path).relative_to(base).parts
    at = 0  # how many of these are open, or being opened: a path of each would slow the look for a venv by a tenth
    file = os.open(base, LOOK | os.O_CLOEXEC)
    try:
        top = os.fstat(file)
        if top.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise VenvBuildError(
                f"Every user may replace what others have made in {base}, so it is not used. Its owner can change "
                f"that: `chmod +t {base}`. Or choose another folder (FAIRLEAD_VENV_DIR)."
            )
        for at, name in enumerate(names, 1):
            # Without O_NONBLOCK, another user's pipe would be waited for.
            how = (flags if at == len(names) else LOOK) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            above, file = file, os.open(name, how, dir_fd=file)
            os.close(above)
            if fault := _find_fault(os.fstat(file), top):
                raise VenvBuildError(f"{base.joinpath(*names[:at])} {fault}, so it is not used. {REMEDY}")
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError):
            error.filename = str(base.joinpath(*names[:at]))  # the whole path, of which only the last name was opened
        raise
    return file


def _find_fault(seen: os.stat_result, top: os.stat_result) -> str:
    """Return why another user may decide the content of something below the folder `top`; empty if none may."""
    grouped = is_shared_by_group(top) and seen.st_gid == top.st_gid
    if stat.S_ISLNK(seen.st_mode):
        return "is a link"
    if seen.st_uid not in (os.geteuid(), 0, top.st_uid) and not grouped:
        return f"belongs to user {seen.st_uid}"
    if seen.st_mode & (stat.S_IWOTH if grouped else OTHERS):
        return f"can be changed by other users (mode {stat.S_IMODE(seen.st_mode):o})"
    return ""


def check_trusted(root: Path, path: Path) -> None:
    """Refuse a path whose content somebody else may decide. A missing path passes."""
    try:
        os.close(open_trusted(root, path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise VenvBuildError(f"{error}, so it is not used. {REMEDY}") from None


def _base_of(root: Path) -> Path:
    """Return the folder of the environments of all users."""
    return root.parent if re.fullmatch(OWN, root.name) else root
