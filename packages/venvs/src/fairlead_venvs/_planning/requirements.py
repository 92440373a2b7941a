# SPDX-License-Identifier: Apache-2.0
"""Requirements in one spelling, and the versions that the driver resolves them to, once for all nodes."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from .._build.build import LINES, choose_interpreter, lay_out, lay_out_requirements
from .._build.permissions import share
from .._build.publish import make_once
from .._build.recipe import File, Recipe, this_python
from .._build.redact import redact
from .._build.store import read_facts, write_facts
from .._build.users import touch
from .._build.uv import Runner
from ..exceptions import VenvBuildError


def is_wheel(requirement: str) -> bool:
    """Return whether this is the path of a wheel on this machine, and not a requirement or a URL."""
    return requirement.endswith(".whl") and "://" not in requirement


def normalise(requirements: Iterable[str]) -> tuple[str, ...]:
    """Return requirements sorted, each once, with canonical names and absolute paths of wheels."""
    return tuple(sorted({_normalise(requirement.strip()) for requirement in requirements}))


def applies(marker: Marker | str | None, python: str) -> bool:
    """Return whether a marker holds for a version of Python on this platform; True if that cannot be decided."""
    if not marker or "extra" in str(marker):
        return True
    version = ".".join(python.split(".")[:2])
    full = this_python(3) if python == this_python() else python if python.count(".") == 2 else f"{python}.0"
    try:
        parsed = marker if isinstance(marker, Marker) else Marker(marker)
        return parsed.evaluate({"python_version": version, "python_full_version": full})
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        return True


def find_excluded_version(requirements: Iterable[str], name: str, version: str, python: str) -> str | None:
    """Return a specifier that excludes a version, such as "==2.59", or the other version of a wheel; else None."""
    excluding = (_read_excluding(requirement, name, version, python) for requirement in requirements)
    return next((one for one in excluding if one is not None), None)


def _read_excluding(text: str, name: str, version: str, python: str) -> str | None:
    if is_wheel(text):
        return _read_other_version(os.path.basename(text), name, version)
    requirement = Requirement(text)
    # Outside a distribution's own metadata no extra is active.
    if requirement.name != name or "extra" in str(requirement.marker) or not applies(requirement.marker, python):
        return None
    if requirement.url is not None:
        return _read_other_version(unquote(os.path.basename(urlsplit(requirement.url).path)), name, version)
    matches = requirement.specifier.contains(version, prereleases=True)
    return None if matches else str(requirement.specifier)


def _read_other_version(wheel: str, name: str, version: str) -> str | None:
    """Return the version in the file name of a wheel if it is another version of this distribution."""
    try:
        distribution, found, *_ = parse_wheel_filename(wheel)
    except InvalidWheelFilename:
        return None
    return None if distribution != name or found == Version(version) else str(found)


def _normalise(text: str) -> str:
    if is_wheel(text):
        path = os.path.abspath(os.path.expanduser(text))
        if not os.path.isfile(path):
            raise ValueError(f"there is no wheel {path}")
        return path
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{redact(text)!r} is not a requirement: {redact(str(error)).splitlines()[0]}. Options such as -r and -e "
            "are not supported: list the requirements, or give a project"
        ) from None
    if requirement.url is not None and requirement.url.startswith("file:"):
        raise ValueError(
            f"{text!r} names a path of this machine. Give a wheel by its path alone; give a folder as project=, or "
            "build its wheel with `uv build`"
        )
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)


# The folder of all resolutions, one file each.
RESOLVED = ".resolved"
PINS = "pins.txt"
COMMIT = r"@([0-9a-f]{40})(?=[#\s;]|$)"
# The conventional user of git's hosts has no password and is not a credential.
PLAIN_USER = "://git@"


@dataclass(frozen=True)
class Resolution:
    """The versions that a list of requirements was resolved to."""

    pins: tuple[str, ...] = ()  # such as "numpy==2.4.6"
    # The distributions that a requirement gives by URL or as a wheel, with the commit of those from git.
    direct: Mapping[str, str] = field(default_factory=dict, hash=False)


def resolve(
    draft: Recipe, given: Sequence[str], files: Iterable[File], runner: Runner, check: Callable[[], None], refresh: bool
) -> Resolution:
    """Return the stored resolution of a request, or let uv resolve the requirements and store the result."""
    root = Path(draft.folder)
    path = root / RESOLVED / draft.request
    lines = draft.requirements or ()

    def make(aside: Path) -> Resolution:
        lay_out([(name, content) for name, content in files if f"./{name}" in lines], aside)
        resolution = parse_resolution(_compile(draft, lines, aside, runner), given, draft.secrets)
        check()
        return _store(resolution, aside / draft.request, path, root, refresh)

    doing = "resolves the requirements for"
    return make_once(root, path, lambda: None if refresh else _read(path, root), make, runner.deadline, doing=doing)


def _compile(draft: Recipe, lines: Iterable[str], aside: Path, runner: Runner) -> str:
    """Return uv's list of everything to install. This machine need not have an interpreter of the requested version."""
    lay_out_requirements(lines, aside)
    ours = choose_interpreter(draft.python, draft.implementation) == sys.executable
    runner.uv(
        *("pip", "compile", "--python", sys.executable, *([] if ours else ["--python-version", draft.python])),
        # These override a configuration of uv.
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-generate-hashes"),
        *("--no-universal", "--strip-extras"),
        *("--output-file", PINS, LINES),
        cwd=aside,
        failed="uv could not resolve the requirements",
    )
    return (aside / PINS).read_text(encoding="utf-8")


def parse_resolution(text: str, requirements: Sequence[str], secrets: frozenset[str] = frozenset()) -> Resolution:
    """Read the output of `uv pip compile`. The result repeats no URLs and wheels of the spec, and has no secrets."""
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
        shown = redact(line, secrets)
        if name is not None and redact(line.replace(PLAIN_USER, "://"), secrets) != line.replace(PLAIN_USER, "://"):
            raise VenvBuildError(
                f"A dependency is named by a URL with a credential, which is not stored: {shown}. Add it to the "
                "requirements of the spec."
            )
        pins.append(line)
    return Resolution(tuple(sorted(pins)), dict(sorted(direct.items())))


def installed_lines(requirements: Sequence[str], staged: Sequence[str], resolution: Resolution) -> tuple[str, ...]:
    """Return the lines that install exactly a resolution. The staged lines are the requirements as lines for uv."""
    lines = []
    for requirement, line in zip(requirements, staged, strict=True):
        name = _direct_name(requirement)
        if name is not None and name in resolution.direct:
            commit = resolution.direct[name]
            lines.append(_at_commit(line, commit) if commit else line)
    return (*lines, *resolution.pins)


def _direct_name(line: str) -> str | None:
    """Return the name of a distribution that a line gives by URL or as a wheel; None for any other line."""
    if is_wheel(line):
        return parse_wheel_filename(os.path.basename(line))[0]
    name, at, _ = line.partition("@")
    return canonicalize_name(re.sub(r"\[.*", "", name).strip()) if at else None


def _at_commit(line: str, commit: str) -> str:
    """Return a requirement of git with a commit in the place of its revision."""
    requirement = Requirement(line)
    address, hash_sign, fragment = (requirement.url or "").partition("#")
    scheme, _, place = address.partition("://")
    host, _, path = place.partition("/")
    repository, at, rest = path.rpartition("@")
    requirement.url = f"{scheme}://{host}/{repository if at else rest}@{commit}{hash_sign}{fragment}"
    return str(requirement)


def _read(path: Path, root: Path) -> Resolution | None:
    """Return a stored resolution, and mark it as used; None if there is none, it is damaged, or it may be another's."""
    facts = read_facts(root, path)
    pins, direct = facts.get("pins"), facts.get("direct")
    if not isinstance(pins, list) or not isinstance(direct, dict):
        return None
    if not all(isinstance(one, str) for one in [*pins, *direct, *direct.values()]):
        return None
    touch(path)  # `prune` reads its time
    return Resolution(tuple(pins), direct)


def _store(resolution: Resolution, new: Path, path: Path, root: Path, refresh: bool) -> Resolution:
    """Store a resolution in one step. A resolution that is there stays, unless this is a refresh."""
    write_facts(new, {"direct": dict(resolution.direct), "pins": resolution.pins})
    share(new, root)
    if not refresh:
        # On a file system without locks, another process may have finished first.
        with contextlib.suppress(OSError):
            os.link(new, path)
            return resolution
        if (ready := _read(path, root)) is not None:
            return ready
    os.replace(new, path)
    return resolution
