# SPDX-License-Identifier: Apache-2.0
"""Requirements in one spelling, so that the same ones are the same."""

import os
from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ._redact import redacted

__all__ = ["is_wheel", "normalised"]


def is_wheel(requirement: str) -> bool:
    """Whether it is the path of a wheel on this machine, as opposed to a requirement or a URL."""
    return requirement.endswith(".whl") and "://" not in requirement


def normalised(requirements: Iterable[str]) -> tuple[str, ...]:
    """Sorted, each once, with canonical names; paths of wheels absolute.

    Raises:
        ValueError: no requirement, or one that no other machine could follow.
    """
    return tuple(sorted({_one(requirement.strip()) for requirement in requirements}))


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
