# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-lane as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

from fairlead_lane import make_lane
from fairlead_workergroup.spi import Site, Transport


def right(site: Site) -> None:
    assert_type(make_lane(site), Transport)


def wrong() -> None:
    make_lane(8)  # type: ignore[arg-type]
