# SPDX-License-Identifier: Apache-2.0
"""Tests of a lane that is opened or closed while another thread holds the turn of the group, without Ray."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from fairlead_workergroup.exceptions import LaneError

from ..lanes import Resources, open_lane, restarting


class TestTurns:
    """Another operation changes the group meanwhile, such as a restart of workers."""

    def test_opening(self, sender):
        """A lane that cannot be opened in time, because another thread restarts workers, says so."""
        with (
            restarting(sender.membership),
            pytest.raises(LaneError, match=r"did not open within 0\.1 s\. A restart goes on"),
        ):
            open_lane(sender, Resources(), 0.1).__enter__()
        assert sender.transport is None

    def test_closing(self, sender, eventually, clock):
        """Closing ends at its timeout, and the lane is closed when the other thread is ready."""
        resources = Resources()
        lane = open_lane(sender, resources, 600)
        lane.__enter__()
        with restarting(sender.membership), ThreadPoolExecutor(1) as threads:
            closed = threads.submit(lane.__exit__, None, None, None)
            assert eventually(lambda: sender.membership._queue)
            clock.skip(600)
            with pytest.raises(LaneError, match=r"did not close within 600 s\. A restart goes on\. The lane closes"):
                closed.result(60)
            assert sender.transport is not None
        assert eventually(lambda: resources.published == [True, False])
        assert sender.transport is None

    def test_publishing(self, sender, eventually):
        """A restart that begins while the workers follow does not keep the lane from opening."""
        resources, restart = Resources(), contextlib.ExitStack()

        def open_and_restart(_):
            restart.enter_context(restarting(sender.membership))

        sender.opens = open_and_restart
        lane = open_lane(sender, resources, 20)
        with restart:
            lane.__enter__()
            assert resources.published == [True]
        lane.__exit__(None, None, None)
        assert eventually(lambda: sender.transport is None)
