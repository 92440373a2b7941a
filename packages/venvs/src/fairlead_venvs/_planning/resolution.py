# SPDX-License-Identifier: Apache-2.0
"""Requirements resolved once, on the driver: what every node installs, now and when it joins later."""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from .._build.build import locked
from .._build.install import interpreter_for, lay_out
from .._build.publish import ABANDONED_S, leftover_name, leftovers, remove_leftovers
from .._build.redact import redacted
from .._build.store import BUILDING, FORMAT, USED_S, share, share_folder
from .._build.uv import Deadline, Runner, find_uv
from ..exceptions import VenvBuildError, VenvError
from .requirements import is_wheel

__all__ = ["RESOLVED", "Resolution", "find_resolution", "installed_lines", "parse_resolution", "resolve"]

# The folder of all resolutions, one file each.
RESOLVED = ".resolved"
PINS = "pins.txt"
COMMIT = r"@([0-9a-f]{40})(?=[#\s;]|$)"
# A user without a password, by which git's hosts are reached by convention, opens nothing.
PLAIN_USER = "://git@"


@dataclass(frozen=True)
class Resolution:
    """What a list of requirements stands for.

    Attributes:
        pins: distributions with their versions, "numpy==2.4.6".
        direct: the names of those that a requirement gives by its URL or as a wheel, and for git the commit.
    """

    pins: tuple[str, ...] = ()
    direct: Mapping[str, str] = field(default_factory=dict, hash=False)


def find_resolution(root: Path, request: str) -> Resolution | None:
    """Return the stored resolution of a request; None if there is none, or a damaged one. Nothing is started."""
    path = root / RESOLVED / request
    found = _read(path)
    if found is not None:
        with contextlib.suppress(OSError):  # a folder that may be read only
            if time.time() - path.stat().st_mtime > USED_S:
                os.utime(path)  # `prune` looks at it
    return found


def resolve(
    request: str,
    requirements: Sequence[str],
    staged: Sequence[str],
    wheels: Iterable[tuple[str, "bytes | Path"]],
    *,
    root: Path,
    python: str,
    implementation: str,
    no_index: bool,
    runner: Runner,
    deadline: Deadline,
    secrets: frozenset[str],
    refresh: bool = False,
) -> Resolution:
    """Return what requirements stand for: as it was resolved before, or by uv, which is then remembered.

    Args:
        request: a hash of everything that uv is told.
        requirements: as in the spec.
        staged: the same as lines for uv, with wheels by their relative paths.
        wheels: those paths, and the wheels.
        root: of all environments; resolutions are kept there.
        python: for which version.
        implementation: of Python.
        no_index: use no index.
        runner: runs uv, with the spec's variables.
        deadline: of the runner, too.
        secrets: what must not be written.
        refresh: resolve again, and remember that.

    Raises:
        VenvBuildError: nothing satisfies the requirements, or the result cannot be kept.
        VenvTimeoutError: it took too long.
    """
    path = root / RESOLVED / request

    def known() -> Resolution | None:
        return None if refresh else find_resolution(root, request)

    if (ready := known()) is not None:
        return ready
    try:
        root.mkdir(parents=True, exist_ok=True)
        share_folder(path.parent)
        with locked(path, deadline, lambda: known() is not None, doing="resolves the requirements for"):
            if (ready := known()) is not None:
                return ready
            remove_leftovers(leftovers(path.parent), older_than_s=ABANDONED_S)
            aside = leftover_name(path, BUILDING)
            try:
                aside.mkdir(mode=0o700)
                lay_out(wheels, aside)
                text = _compiled(staged, aside, python, implementation, no_index, runner, deadline)
                return _kept(parse_resolution(text, requirements, secrets), aside / request, path, refresh)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if isinstance(error, VenvError):
            raise  # VenvTimeoutError is an OSError, too
        raise VenvBuildError(
            f"The requirements could not be resolved in {root} (FAIRLEAD_VENV_DIR), which must be writable and have "
            f"room: {error}"
        ) from None


def _compiled(
    staged: Sequence[str],
    aside: Path,
    python: str,
    implementation: str,
    no_index: bool,
    runner: Runner,
    deadline: Deadline,
) -> str:
    """Return uv's list of what is to be installed. No interpreter of that version need be here."""
    # An empty uv.toml ends the search for settings in the folders above.
    (aside / "uv.toml").touch()
    version = [] if interpreter_for(python, implementation) == sys.executable else ["--python-version", python]
    # A configuration of uv may say otherwise.
    form = [
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-generate-hashes"),
        *("--no-universal", "--strip-extras"),
    ]
    runner.run(
        [
            *(find_uv(deadline), "pip", "compile", "--python", sys.executable, *version),
            *(["--no-index"] if no_index else []),
            # Requirements may be URLs with credentials: they are no arguments, which everybody can see.
            *(*form, "--output-file", PINS, "-"),
        ],
        cwd=aside,
        stdin="\n".join(staged) + "\n",
        failed="uv could not resolve the requirements",
    )
    return (aside / PINS).read_text(encoding="utf-8")


def parse_resolution(text: str, requirements: Sequence[str], secrets: frozenset[str] = frozenset()) -> Resolution:
    """Return the resolution in what `uv pip compile` has written.

    Args:
        text: lines "name==version", "name @ URL", or the path of a wheel.
        requirements: those that were resolved. What they give by URL or as a wheel is not repeated in the result.
        secrets: what the result must not hold.

    Raises:
        VenvBuildError: the metadata of a distribution names a dependency by a URL with a credential.
    """
    given = {name for one in requirements if (name := _direct_name(one)) is not None}
    pins: list[str] = []
    direct: dict[str, str] = {}
    for line in (one.strip() for one in text.splitlines()):
        if not line or line.startswith(("#", "-")):
            continue
        name = _direct_name(line)
        if name is not None and name in given:
            commit = re.search(COMMIT, line) if "git+" in line else None
            direct[name] = commit[1] if commit else ""
            continue
        shown = redacted(line, secrets)
        if name is not None and redacted(line.replace(PLAIN_USER, "://"), secrets) != line.replace(PLAIN_USER, "://"):
            raise VenvBuildError(
                f"A dependency is named by a URL with a credential, which is not stored: {shown}. Add it to the "
                "requirements of the spec."
            )
        pins.append(line)
    return Resolution(tuple(sorted(pins)), dict(sorted(direct.items())))


def installed_lines(requirements: Sequence[str], staged: Sequence[str], resolution: Resolution) -> tuple[str, ...]:
    """Return the lines that install exactly a resolution.

    Args:
        requirements: as in the spec.
        staged: the same as lines for uv.
        resolution: of them.
    """
    lines = []
    for requirement, line in zip(requirements, staged, strict=True):
        name = _direct_name(requirement)
        if name is not None and name in resolution.direct:
            commit = resolution.direct[name]
            lines.append(_at_commit(line, commit) if commit else line)
    return (*lines, *resolution.pins)


def _direct_name(line: str) -> str | None:
    """Return the name of a distribution that is given by its URL or as a wheel."""
    if is_wheel(line):
        return parse_wheel_filename(os.path.basename(line))[0]
    name, at, _ = line.partition("@")
    return canonicalize_name(re.sub(r"\[.*", "", name).strip()) if at else None


def _at_commit(line: str, commit: str) -> str:
    """Return a requirement of git at a commit, whatever revision it names."""
    requirement = Requirement(line)
    address, hash_sign, fragment = (requirement.url or "").partition("#")
    scheme, _, place = address.partition("://")
    host, _, path = place.partition("/")
    repository, at, rest = path.rpartition("@")
    requirement.url = f"{scheme}://{host}/{repository if at else rest}@{commit}{hash_sign}{fragment}"
    return str(requirement)


def _read(path: Path) -> Resolution | None:
    try:
        stored: Any = json.loads(path.read_bytes())
        pins, direct = stored["pins"], stored["direct"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the last by brackets without end
        return None
    texts = [*pins, *direct, *direct.values()] if isinstance(pins, list) and isinstance(direct, dict) else [None]
    if stored.get("format") != FORMAT or not all(isinstance(one, str) for one in texts):
        return None
    return Resolution(tuple(pins), direct)


def _kept(resolution: Resolution, new: Path, path: Path, refresh: bool) -> Resolution:
    """Remember a resolution in one step. The first one stays unless it is to be replaced."""
    stored = {"direct": dict(resolution.direct), "format": FORMAT, "pins": resolution.pins}
    new.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if not refresh:
        # Where the file system has no locks, another process may have finished first.
        with contextlib.suppress(OSError):
            os.link(new, path)
            share(path)
            return resolution
        if (ready := _read(path)) is not None:
            return ready
    os.replace(new, path)
    share(path)
    return resolution
