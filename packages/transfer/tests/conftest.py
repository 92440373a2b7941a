# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

from hypothesis import settings

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
settings.register_profile("fairlead", max_examples=100, deadline=None, database=None)
settings.load_profile("fairlead")
