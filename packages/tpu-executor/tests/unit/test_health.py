# SPDX-License-Identifier: Apache-2.0
"""When Ray's head counts as unreachable, with a clock that the test turns."""

import pytest

from fairlead_tpu_executor import HeadUnreachableError
from fairlead_tpu_executor._health import Head


def test_probes():
    """The deadline counts from the first probe without an answer; an answer or a long gap resets it."""
    now, answers = [0.0], [True]
    head = Head(5.0, probe=lambda _: answers[0], clock=lambda: now[0])
    for now[0] in (1.0, 2.0):
        head.check()
    answers[0] = False
    for now[0] in (3.0, 5.0, 7.0):
        head.check()
    answers[0], now[0] = True, 8.0
    head.check()
    answers[0] = False
    for now[0] in (9.0, 13.0):
        head.check()
    now[0] = 14.0
    with pytest.raises(HeadUnreachableError, match=r"has not answered for 5\.0 s"):
        head.check()
    now[0] = 100.0
    head.check()
