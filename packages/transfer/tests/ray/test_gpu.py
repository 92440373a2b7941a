# SPDX-License-Identifier: Apache-2.0
"""Links between workers that hold their tensors on one GPU; skipped without one."""

import contextlib
import itertools

import pytest

from fairlead_sharding import NamedSharding
from fairlead_transfer import Link
from fairlead_workergroup import RayWorkerBuilder, RayWorkerGroup, Restart

from ..gpu_holders import AsyncHolder, Holder

SLOTS = 8

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(400)]
TRANSPORTS = ["auto", "object_store"]


@contextlib.contextmanager
def groups_of(slots, worker):
    """Yield a source whose two ranks hold half of the rows each, and a target with half of the columns each."""
    options = {"sharding_annotations": NamedSharding.from_shape(tp=2), "restart": Restart(max_restarts=1000)}
    with (
        RayWorkerGroup(slots[:2], RayWorkerBuilder(worker, {0: "tp"}, 1.0), **options) as source,
        RayWorkerGroup(slots[2:4], RayWorkerBuilder(worker, {1: "tp"}), **options) as target,
    ):
        yield source, target


@pytest.fixture(scope="module")
def groups(slots):
    with groups_of(slots, Holder) as made:
        yield made


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_send(groups, transport):
    """Every byte arrives, in every send, also into memory that was allocated again."""
    source, target = groups
    with Link(source, target, source="weights", target="weights", transport=transport) as link:
        for step in range(6):
            if step == 3:
                source.call("reallocate").result()
            if step == 4:
                target.call("reallocate").result()
            source.call("fill", step + 2.0).result()
            report = link.send(step, timeout=60)
            assert set(report.transports) == {transport.replace("auto", "shared_memory")}
            assert target.call("holds").result() == [step + 2.0] * 2


def test_apply(groups):
    """A method that loads tensors gets them in host memory."""
    source, target = groups
    source.call("fill", 5.0).result()
    with Link(source, target, source="weights", apply="load", chunk_bytes=1 << 16) as link:
        link.send(0, timeout=60)
    assert target.call("holds").result() == [5.0, 5.0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_overlapping_methods(slots, transport):
    """On asyncio workers, where reads run in other threads, no method sees a mixture."""
    with (
        groups_of(slots[4:], AsyncHolder) as (source, target),
        Link(source, target, source="weights", target="weights", transport=transport) as link,
    ):
        for step in range(3):
            source.call("fill", step + 2.0).result()
            running = target.call("generate", 0.2)
            link.send(step, timeout=60)
            assert None not in itertools.chain(*running.result())
            assert target.call("holds").result() == [step + 2.0] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left(groups, transport):
    """A link that was closed keeps no memory of the GPU."""
    source, target = groups
    before = source.call("memory").result(), target.call("memory").result()
    with Link(source, target, source="weights", target="weights", transport=transport) as link:
        link.send(0, timeout=60)
    assert (source.call("memory").result(), target.call("memory").result()) == before
