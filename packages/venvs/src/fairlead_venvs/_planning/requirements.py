# SPDX-License-Identifier: Apache-2.0
"""Requirements in one spelling, so that the same ones are the same."""

import os
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from .._build.redact import redacted

__all__ = ["applies", "excluded_version", "is_wheel", "normalised"]


def is_wheel(requirement: str) -> bool:
    """Whether it is the path of a wheel on this machine, as opposed to a requirement or a URL."""
    return requirement.endswith(".whl") and "://" not in requirement


def normalised(requirements: Iterable[str]) -> tuple[str, ...]:
    """Sorted, each once, with canonical names; paths of wheels absolute.

    Raises:
        ValueError: no requirement, or one that no other machine could follow.
    """
    return tuple(sorted({_one(requirement.strip()) for requirement in requirements}))


def applies(marker: Marker | str | None, python: str) -> bool:
    """Return whether a marker holds for a version of Python on this platform; True where that cannot be decided."""
    if not marker or "extra" in str(marker):
        return True
    version = ".".join(python.split(".")[:2])
    full = python if python.count(".") == 2 else f"{python}.0"
    try:
        parsed = marker if isinstance(marker, Marker) else Marker(marker)
        return parsed.evaluate({"python_version": version, "python_full_version": full})
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        return True


def excluded_version(requirements: Iterable[str], name: str, version: str, python: str) -> str | None:
    """Return what requirements ask for of a distribution if a version of it cannot satisfy them.

    Args:
        requirements: in one spelling, as `normalised` returns them.
        name: the canonical name of the distribution.
        version: the version that is needed.
        python: the version of Python they are for.

    Returns:
        The first specifier that excludes the version, such as "==2.59", or the other version that a wheel has; None if
        nothing excludes it.
    """
    for requirement in requirements:
        found = _excluded(requirement, name, version, python)
        if found is not None:
            return found
    return None


def _excluded(text: str, name: str, version: str, python: str) -> str | None:
    if is_wheel(text):
        return _other_version(os.path.basename(text), name, version)
    requirement = Requirement(text)
    # Outside of a distribution's own metadata no extra is chosen.
    if requirement.name != name or "extra" in str(requirement.marker) or not applies(requirement.marker, python):
        return None
    if requirement.url is not None:
        return _other_version(unquote(os.path.basename(urlsplit(requirement.url).path)), name, version)
    matches = requirement.specifier.contains(version, prereleases=True)
    return None if matches else str(requirement.specifier)


def _other_version(wheel: str, name: str, version: str) -> str | None:
    """Return the version in a wheel's file name if it is of this distribution and is another one."""
    try:
        distribution, found, *_ = parse_wheel_filename(wheel)
    except InvalidWheelFilename:
        return None
    return None if distribution != name or found == Version(version) else str(found)


def _one(text: str) -> str:
    if is_wheel(text):
        path = os.path.abspath(os.path.expanduser(text))
        if not os.path.isfile(path):
            raise ValueError(f"there is no wheel {path}")
        return path
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(
            f"{redacted(text)!r} is no requirement: {redacted(str(error)).splitlines()[0]}. Options, such as -r and "
            "-e, are none either: give what they stand for, or a project"
        ) from None
    if requirement.url is not None and requirement.url.startswith("file:"):
        raise ValueError(
            f"{text!r} names a path of this machine: give a wheel by its path alone, and a folder as project=, or "
            "`uv build` its wheel"
        )
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)
