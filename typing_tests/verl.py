# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-verl as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

from fairlead_verl import VERSIONS, install


def right() -> None:
    assert_type(install(), bool)
    assert_type(VERSIONS, tuple[str, ...])


def wrong() -> None:
    install("0.9.1")  # type: ignore[call-arg]
