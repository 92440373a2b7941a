# SPDX-License-Identifier: Apache-2.0
"""One test for each case, against the system that `--system` names."""

from collections.abc import Callable

import pytest

from .cases import CASES, Case, check
from .system import System


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, make_system: Callable[[], System]) -> None:
    """The case passes; it is skipped if it does not apply."""
    report = check(make_system, cases=(case,))
    if report.verdicts[0].verdict == "not applicable":
        pytest.skip(report.verdicts[0].note)
    assert not report.failed, str(report)
