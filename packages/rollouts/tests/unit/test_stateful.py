# SPDX-License-Identifier: Apache-2.0
"""Random calls in random order: the invariants hold after each, and the job can always be brought to its end."""

import pytest
from hypothesis import settings
from machine import Machine

pytestmark = pytest.mark.usefixtures("no_thread")


class Often(Machine):
    """The same for longer."""


# 2,000 steps, and 20,000 each night.
Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
Often.TestCase.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
TestOften = pytest.mark.nightly(Often.TestCase)
