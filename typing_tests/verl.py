# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-verl as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

from fairlead_verl import VERSIONS, install


def right() -> None:
    assert_type(install(), bool)
    assert_type(VERSIONS, tuple[str, ...])


def wrong() -> None:
    install("0.9.1")  # type: ignore[call-arg]
