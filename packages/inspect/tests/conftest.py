# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fairlead_workergroup import RayWorkerGroup


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a file that workers wait for. It is created at the end of the test at the latest."""
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture(scope="session")
def wait_until_running(eventually: Callable[..., bool]) -> Callable[..., None]:
    """Return a function that waits until the given ranks of a group run a method."""

    def wait(group: "RayWorkerGroup", method: str, *ranks: int) -> None:
        def methods() -> list[str | None]:
            statuses = group.get_worker_status()
            return [statuses[rank].method for rank in ranks]

        assert eventually(lambda: methods() == [method] * len(ranks), 60), methods()

    return wait
