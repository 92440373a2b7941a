# SPDX-License-Identifier: Apache-2.0
"""A master port that the user gives: one for all epochs, or a range."""

import os
import socket
import time

import pytest

from fairlead_placement import PortUnavailableError, RayVirtualCluster
from fairlead_workergroup import RayWorkerGroup, Restart, WorkerFailureError, WorkerOptions
from fairlead_workergroup.testing import assert_no_leaks, kill


class Worker:
    """Rank 0 serves the others at the master port, as the store of torch does."""

    def __init__(self):
        self.port = int(os.environ["MASTER_PORT"])

    def meet(self):
        address = os.environ["MASTER_ADDR"], self.port
        if os.environ["RANK"] == "0":
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", self.port))
                server.listen()
                server.accept()[0].close()
            return self.port
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                with socket.create_connection(address) as connection:
                    connection.recv(1)
                return self.port
            except ConnectionRefusedError:
                time.sleep(0.01)
        raise TimeoutError("rank 0 does not listen")

    def read_port(self):
        return os.environ["MASTER_PORT"]


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([4], use_gpus=False) as reserved:
        yield reserved


@pytest.fixture
def port():
    """Return the first of two ports that are free."""
    for first in range(28500, 29000):
        try:
            for one in (first, first + 1):
                with socket.socket() as free:
                    free.bind(("", one))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.mark.parametrize("is_of_cluster", [False, True])
def test_one_port(local_ray, port, is_of_cluster):
    """The group has the port in all epochs, also after a restart of all workers; a resize is refused."""
    bounds = {"port_range_low": port, "port_range_high": port} if is_of_cluster else {}
    options, restart = WorkerOptions(master_port=None if is_of_cluster else port), Restart(scope="group")
    with (
        RayVirtualCluster([3], use_gpus=False, **bounds) as cluster,
        RayWorkerGroup(cluster, Worker, 2, worker=options, restart=restart) as group,
    ):
        assert (group.master_port, group.call("meet").result(timeout=30)) == (port, [port, port])
        kill(group, 1)
        with pytest.raises(WorkerFailureError):
            group.call("read_port").result()
        assert group.restart_failed_workers() == [0, 1]
        assert (group.master_port, group.call("meet").result(timeout=30)) == (port, [port, port])
        epoch = group.state().group_epoch
        with pytest.raises(ValueError, match=rf"second master port.* has {port} only.*master_port=\(first, last\)"):
            group.resize(worker=3)
        assert (group.state().group_epoch, group.world_size) == (epoch, 2)


def test_a_range(cluster, port):
    """A resize takes another port of the range, and the next one may take the first one again."""
    with RayWorkerGroup(cluster, Worker, 2, worker=WorkerOptions(master_port=(port, port + 1))) as group:
        ports = [group.master_port]
        for size in (3, 2):
            group.resize(worker=size)
            ports.append(group.master_port)
            assert group.call("read_port").result() == [str(group.master_port)] * size
    assert sorted(ports[:2]) == sorted(ports[1:]) == [port, port + 1]


def test_a_port_in_use(cluster, port):
    """A port that another process uses is refused before a worker starts, and nothing is left."""
    with socket.socket() as other:
        other.bind(("", port))
        with (
            assert_no_leaks(),
            pytest.raises(PortUnavailableError, match="1 are, or were a moment ago, bound") as refused,
        ):
            RayWorkerGroup(cluster, Worker, 2, worker=WorkerOptions(master_port=port))
    assert (refused.value.low, refused.value.high) == (port, port)
    with RayWorkerGroup(cluster, Worker, 2, worker=WorkerOptions(master_port=port)) as group:
        with pytest.raises(PortUnavailableError, match="1 are leased"):
            RayWorkerGroup(cluster.slots()[2:], Worker, worker=WorkerOptions(master_port=port))
        assert group.call("read_port", collect=()).result() == str(port)
