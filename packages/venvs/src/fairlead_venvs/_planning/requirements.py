# SPDX-License-Identifier: Apache-2.0
"""Requirements in one spelling, so that equal requirements are equal strings."""

import os
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from .._build.redact import redact


def is_wheel(requirement: str) -> bool:
    """Return whether this is the path of a wheel on this machine, and not a requirement or a URL."""
    return requirement.endswith(".whl") and "://" not in requirement


def normalise(requirements: Iterable[str]) -> tuple[str, ...]:
    """Return requirements sorted, each once, with canonical names and absolute paths of wheels.

    Raises:
        ValueError: one of them is not a requirement, or has a meaning on this machine only.
    """
    return tuple(sorted({_normalise(requirement.strip()) for requirement in requirements}))


def applies(marker: Marker | str | None, python: str) -> bool:
    """Return whether a marker holds for a version of Python on this platform; True if that cannot be decided."""
    if not marker or "extra" in str(marker):
        return True
    version = ".".join(python.split(".")[:2])
    full = python if python.count(".") == 2 else f"{python}.0"
    try:
        parsed = marker if isinstance(marker, Marker) else Marker(marker)
        return parsed.evaluate({"python_version": version, "python_full_version": full})
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        return True


def find_excluded_version(requirements: Iterable[str], name: str, version: str, python: str) -> str | None:
    """Find a requirement that excludes a version of a distribution.

    Args:
        requirements: in one spelling, as `normalise` returns them.
        name: the canonical name of the distribution.
        version: the version that is needed.
        python: the version of Python that the requirements are for.

    Returns:
        The first specifier that excludes the version, such as "==2.59", or the other version that a wheel has; None if
        nothing excludes it.
    """
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
