# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

import importlib.util
import os

# The tests against other frameworks run without it.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # No deadline: on a busy machine it would fail tests for being slow. No database: a test run leaves no files.
    examples = int(os.environ.get("FAIRLEAD_EXAMPLES", "100"))
    settings.register_profile("fairlead", max_examples=examples, deadline=None, database=None)
    settings.load_profile("fairlead")
