# SPDX-License-Identifier: Apache-2.0
"""The bases of all errors, and the error about a version of Ray, which know nothing of reservations."""

from dataclasses import dataclass, fields


class ErrorWithFields(Exception):
    """Base of errors that are dataclasses: their fields are their arguments, so that a copy has all of them.

    Defaults come from factories. A default that is an attribute of the class would hide the field's value in the error
    that Ray makes of this one: it does not run `__init__`, and looks up only what the class does not have.
    """

    def __post_init__(self) -> None:
        # An OSError, which a TimeoutError is, would keep only two of them, and take them for an errno and its text.
        Exception.__init__(self, *(getattr(self, one.name) for one in fields(self)))  # type: ignore[arg-type]


class PlacementError(ErrorWithFields):
    """Base of the errors that this package raises after it has sent a request to Ray.

    Misuse that can be detected before that is a ValueError or a TypeError instead.
    """


@dataclass(eq=False, repr=False)
class RayVersionError(PlacementError, RuntimeError):
    """A private part of this version of Ray has another shape than Fairlead reads, so Fairlead does not use it.

    Attributes:
        package: the package that reads it.
        version: the version of Ray.
        differences: what differs, a sentence for each part.
    """

    package: str
    version: str
    differences: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.package} cannot read private parts of Ray {self.version}, and gives no result, which could be "
            f"wrong: {'; '.join(self.differences)}. Use a version of {self.package} that was tested with this Ray."
        )
