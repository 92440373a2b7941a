# SPDX-License-Identifier: Apache-2.0
"""Settings of the tests without Ray."""

from hypothesis import settings

# No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
settings.register_profile("fairlead", max_examples=150, deadline=None, database=None)
settings.load_profile("fairlead")
