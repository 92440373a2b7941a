# SPDX-License-Identifier: Apache-2.0
"""A wait for a condition."""

import time


def wait_until(holds, timeout_s=60.0):
    """Wait until a condition holds; a test that waits longer fails."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
