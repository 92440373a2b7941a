# SPDX-License-Identifier: Apache-2.0
"""Exceptions that keep their own type when they arrive from real workers."""

import threading

import pytest

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, RemoteError

from ..user_errors import HoldingError, PrefixError, StubbornError, TwoArgumentsError


class Failing:
    """Fails in every way there is."""

    def two_arguments(self):
        raise TwoArgumentsError(3, where="home")

    def holding(self):
        raise HoldingError("text", threading.Lock())

    def stubborn(self):
        raise StubbornError(1, where="home")

    def items(self):
        yield 1
        raise PrefixError(5)

    async def later(self):
        raise PrefixError(6)

    def interrupted(self):
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def failing(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Failing) as group:
        yield group


class TestArrivals:
    def test_types(self, failing):
        """An exception of a method arrives with its type, whatever its constructor takes and whatever it holds."""
        with pytest.raises(TwoArgumentsError, match="code 3 at home") as caught:
            failing.call("two_arguments").result()
        assert caught.value.code == 3
        with pytest.raises(HoldingError) as held:
            failing.call("holding").result()
        assert held.value.text == "text"
        for method in ("items", "later"):
            with pytest.raises(PrefixError, match=r"^failed with \d(\n|$)"):
                failing.call(method).result()

    def test_what_cannot_be_copied(self, failing):
        """The text of an exception arrives that cannot be copied."""
        with pytest.raises(RemoteError, match="StubbornError"):
            failing.call("stubborn").result()

    def test_interrupt(self, failing):
        """A KeyboardInterrupt in a worker is neither the caller's own nor a cancelled call, and ends no worker."""
        with pytest.raises(RemoteError, match="'interrupted' was interrupted in the worker") as caught:
            failing.call("interrupted").result()
        assert caught.value.type_name == "KeyboardInterrupt"
        assert {status.state for status in failing.get_worker_status()} == {"idle"}
