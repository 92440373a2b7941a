# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-lane as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

from fairlead_lane import make_lane
from fairlead_workergroup.spi import Site, Transport


def right(site: Site) -> None:
    assert_type(make_lane(site), Transport)


def wrong() -> None:
    make_lane(8)  # type: ignore[arg-type]
