# SPDX-License-Identifier: Apache-2.0
"""The group of the tests of calls that run on threads of the test."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fairlead_workergroup import spi
from fairlead_workergroup.testing import LocalGroup


class Group(LocalGroup):
    """A group with the members by which tests look at a group of processes."""

    def inspect(self) -> Any:
        return SimpleNamespace(statistics=self._sender.counters.now)

    def get_worker_status(self) -> Any:
        return self._sender.late_workers(range(self.world_size))

    def observe(self) -> spi.Observer:
        """Return what `spi.observe_workers` returns for a group of processes."""
        return spi.Observer(self._sender.roster)

    def observe_calls(self, observer: spi.CallObserver) -> None:
        """Do what `spi.observe_calls` does for a group of processes."""
        self._sender.observed.observe(observer)

    @property
    def _membership(self) -> Any:
        return self._sender.membership


@pytest.fixture(autouse=True, scope="module")
def no_ray() -> Iterator[None]:
    """Let everything fail that would start a Ray, or join one."""

    def refuse() -> None:
        raise AssertionError("A LocalGroup has asked for a Ray.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.auto_init_hook.auto_init_ray", refuse)
        yield
    assert not ray.is_initialized()
