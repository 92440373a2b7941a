# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of the torch helpers in a store, and their network interface, without Ray; skipped without torch."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the torch helpers need torch")

import torch.distributed as dist

from fairlead_workergroup import torch as helpers

WORLD = 3
# Longer than a test may take.
LONG_S = 3600.0


class Connection(dist.TCPStore):
    """A connection to the store that reports the arrival of its rank."""

    def __init__(self, port):
        # Only waiting for others has a short deadline: connecting takes long on a busy machine.
        super().__init__("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG_S), wait_for_workers=False)
        self.arrived = threading.Event()

    def set(self, key, value):
        super().set(key, value)
        self.arrived.set()


@pytest.fixture
def server():
    """Return a store that any thread can connect to."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


@pytest.fixture
def meet(server):
    """Return a function that lets a rank arrive, with a connection of its own unless one is given."""

    def run(rank, timeout_s=LONG_S, store=None):
        store = store or Connection(server.port)
        store.set_timeout(timedelta(seconds=timeout_s))
        worker = SimpleNamespace(rank=rank, world_size=WORLD, epoch=0)
        return helpers._meet(store, worker, timeout_s)

    return run


@pytest.fixture
def pool():
    """Return a thread for each rank."""
    with ThreadPoolExecutor(WORLD) as made:
        yield made


def test_all_fail_together(server, meet, pool, eventually):
    """When rank 0 gives up, those that have arrived fail at once, and the next attempt of all succeeds."""
    waits = pool.submit(meet, 2)
    assert eventually(lambda: server.check(["epoch 0 rank 2"]))
    with pytest.raises(dist.DistStoreError, match=r"rank\(s\) 1 did not call .* within 0.5 s"):
        meet(0, 0.5)
    with pytest.raises(dist.DistStoreError, match="Rank 0 knows which ranks did not call it"):
        waits.result()
    names = list(pool.map(meet, range(WORLD)))
    assert names[0] == names[1] == names[2] != ""


def test_some_have_given_up(server, meet, pool):
    """Rank 0 does not wait for an answer from a worker whose own time has passed."""
    store = Connection(server.port)
    waits = pool.submit(meet, 2, 0.5, store)
    assert store.arrived.wait(LONG_S)
    with pytest.raises(dist.DistStoreError, match=r"rank\(s\) 1(, 2)? did not call .* within 1 s"):
        meet(0, 1.0)
    with pytest.raises(dist.DistStoreError, match=r"which had 0\.5 s to call init_process_group"):
        waits.result()


def test_interface_of_a_host_name():
    """A node may have the name of a host in place of an address, which is that of no interface."""
    assert helpers._interface_of("localhost") is None
    assert helpers._interface_of("127.0.0.1") is not None
