# SPDX-License-Identifier: Apache-2.0
"""Leased ports, which only the server that they are for can use, and the agents that hold them."""

import contextlib
import os
import signal
import socket
import time

import pytest

from fairlead_placement import (
    PlacementError,
    PlacementTimeoutError,
    PortUnavailableError,
    RayVirtualCluster,
    lease_ports,
)
from fairlead_placement._reserve import held as _held

# Other processes on this machine may run these tests at the same time.
LOW = 20000 + os.getpid() % 1000 * 10
RANGE = {"low": LOW, "high": LOW + 3}


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as made:
        yield made


@pytest.fixture
def slots(cluster):
    return cluster.slots()


@pytest.fixture
def leased(bind):
    """Return a function that returns which ports of the range nobody else can bind."""

    def read():
        held = []
        for port in range(LOW, LOW + 10):
            try:
                bind(port)
            except OSError:
                held.append(port)
        return held

    return read


@pytest.fixture
def kill_agent(slots, agent_pids, eventually):
    """Return a function that kills the agent of the node, and waits until its process has gone."""

    def kill():
        (pid,) = agent_pids(slots[0].node_id)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: pid not in agent_pids(slots[0].node_id))

    return kill


@pytest.mark.smoke
def test_a_leased_port_is_held(slots, leased, bind):
    """While a port is leased, no plain bind and no other lease gets it; afterwards both can."""
    ((lease,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    assert (lease.port, lease.address, lease.node_id) == (LOW, slots[0].node_ip, slots[0].node_id)
    assert leased() == [LOW]
    with pytest.raises(OSError, match="Address already in use"):
        bind(LOW)
    with pytest.raises(PortUnavailableError):
        lease_ports(slots[:1], low=LOW, high=LOW)
    lease.release()
    bind(LOW)
    with lease_ports(slots[:1], low=LOW, high=LOW)[0][0]:
        assert leased() == [LOW]
    assert leased() == []


def test_a_shutdown_while_ports_are_leased(local_ray, monkeypatch, leased):
    """A lease that arrives after a shutdown by another thread is released, with an error (seam: the moment)."""
    before = leased()

    def shut_down_meanwhile(*args, **options):
        leases = lease_ports(*args, **options)
        cluster.shutdown()
        return leases

    with RayVirtualCluster([1], use_gpus=False, port_range_low=LOW, port_range_high=LOW + 3) as cluster:
        monkeypatch.setattr(_held, "lease_ports", shut_down_meanwhile)
        with pytest.raises(PlacementError, match="was shut down in the meantime"):
            cluster.get_master_address_and_port()
    assert leased() == before


@pytest.mark.smoke
def test_counts(slots):
    """Each slot gets as many different ports as requested, with one request to each node."""
    leases = lease_ports(slots, count=2, **RANGE)
    try:
        assert [len(of_slot) for of_slot in leases] == [2, 2]
        assert sorted(lease.port for of_slot in leases for lease in of_slot) == list(range(LOW, LOW + 4))
    finally:
        for lease in (*leases[0], *leases[1]):
            lease.release()
    assert lease_ports([]) == ()


def test_a_range_that_is_used_up(slots, leased):
    """The error for too few ports counts who has them; nothing stays leased."""
    with contextlib.closing(socket.socket()) as other, lease_ports(slots[:1], low=LOW + 1, high=LOW + 1)[0][0]:
        other.bind(("", LOW))
        with pytest.raises(PortUnavailableError) as caught:
            lease_ports(slots, count=2, **RANGE)
        assert leased() == [LOW, LOW + 1]
        error = caught.value
        assert (error.count, error.low, error.high, error.leased, error.in_use) == (4, LOW, LOW + 3, 1, 1)
        assert str(error) == (
            f"4 port(s) in {LOW}-{LOW + 3} were requested on {slots[0].node_ip}, but of these 4 ports 1 are leased by "
            "this process and 1 are, or were a moment ago, bound by other processes. Release leases (shut groups "
            "and clusters down) or give a wider range (port_range_low, port_range_high)."
        )


def test_releasing_twice(slots, leased):
    """A second release does nothing, even if the port has been leased again since."""
    ((mine,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    mine.release()
    mine.release()
    ((theirs,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    mine.release()
    assert leased() == [LOW]
    theirs.release()


def test_a_cluster_leases_until_shutdown(local_ray, leased):
    """Each method of the cluster leases a new port of its range, held until shutdown."""
    own = {"port_range_low": LOW, "port_range_high": LOW + 3}
    with RayVirtualCluster([1, 2], use_gpus=False, **own) as cluster:
        ip = cluster.slots()[0].node_ip
        pairs = [cluster.get_master_address_and_port(), cluster.get_available_address_and_port(1, 1)]
        pairs += cluster.get_available_addresses_and_ports_batch(iter([(0, 0), (1, 0)]))
        assert sorted(pairs) == [(ip, port) for port in range(LOW, LOW + 4)]
        assert leased() == list(range(LOW, LOW + 4))
        with pytest.raises(PortUnavailableError):
            cluster.get_master_address_and_port()
        for pair in ((2, 0), (-1, 0), (0, 1)):
            message = f"has no bundle {pair[1]} in placement group {pair[0]} of 2"
            with pytest.raises(IndexError, match=message):
                cluster.get_available_address_and_port(*pair)
    assert leased() == []


def test_a_killed_agent(slots, leased, kill_agent, eventually, caplog):
    """When an agent dies its leases are lost, with a warning. The next request creates another one."""
    ((old,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    kill_agent()
    assert eventually(lambda: f"The agent of node {old.node_id[:8]} has died" in caplog.text)
    ((new,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    old.release()
    assert leased() == [LOW]
    new.release()


@pytest.mark.nightly
def test_a_stopped_agent(slots, agent_pids, stop_process, leased, eventually):
    """Requests to an agent that does not answer end by their deadline, and it holds nothing afterwards."""
    ((lease,),) = lease_ports(slots[:1], low=LOW, high=LOW)
    (pid,) = agent_pids(slots[0].node_id)
    with stop_process(pid):
        began = time.monotonic()
        with pytest.raises(PlacementTimeoutError, match=r"did not answer 'lease' within 2 s"):
            lease_ports(slots[:1], low=LOW + 1, high=LOW + 1, timeout_s=2.0)
        lease.release(timeout_s=1.0)  # it holds nothing else, so it is killed
        assert time.monotonic() - began < 4
    assert eventually(lambda: leased() == [])
    assert eventually(lambda: pid not in agent_pids(slots[0].node_id))


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torch(slots, run_script, use_libuv):
    """torch's store, with either backend and in another process, listens on a port while it is leased."""
    pytest.importorskip("torch")
    with lease_ports(slots[:1], **RANGE)[0][0] as lease:
        out = run_script(f"""
            from datetime import timedelta
            from torch.distributed import TCPStore
            options = dict(world_size=2, timeout=timedelta(seconds=120), wait_for_workers=False, use_libuv={use_libuv})
            server = TCPStore("{lease.address}", {lease.port}, is_master=True, **options)
            client = TCPStore("{lease.address}", {lease.port}, is_master=False, **options)
            client.set("key", "reached")
            print(server.get("key").decode(), server.port, server.libuvBackend)
            """)
        assert out == f"reached {lease.port} {use_libuv}\n"
