# SPDX-License-Identifier: Apache-2.0
"""Tests of the checkpoint engines of fairlead_transfer between hosts: equal bits, few bytes, and faults by name."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from fairlead_transfer import TransferError

from .engine_main import digest_weights
from .engines import EngineHosts, connect, transfer
from .network import Network

pytest.importorskip("torch")
MIB = 1 << 20
BUCKET = 4 * MIB
# Of float32 numbers: tensors of which only one fits in a bucket, some that are larger, and many small ones.
SIZES = [600_000] * 12 + [3_000_001, 7] + [1000] * 50
LENGTH = 4 * sum(SIZES)
TIMEOUT_S = 6.0


@pytest.fixture
def start(namespaces):
    """Return a function that starts hosts with so many processes each."""
    with Network() as network, contextlib.ExitStack() as stack:

        def start(*counts, **options):
            hosts = EngineHosts(network, counts, **options)
            stack.callback(hosts.close)
            return hosts

        yield start


def check_delivered(results, senders, seed):
    """Check that a transfer has brought the weights of a seed to all receivers."""
    assert results[:senders] == [None] * senders, results
    assert results[senders:] == [digest_weights(seed, SIZES)] * (len(results) - senders)


@pytest.mark.parametrize("framework", ["verl", "nemo_rl"])
def test_hosts(start, framework):
    """Two senders and four receivers over two hosts: equal bits, and every byte enters a host once."""
    hosts = start(3, 3)
    (first, *near), (second, *far) = hosts.processes
    senders, receivers = [first, second], [*near, *far]
    connect(framework, senders, receivers, bucket_size=BUCKET, timeout=60.0)
    for seed in (1, 2) if framework == "nemo_rl" else (1,):
        before = [hosts.count_entered(host) for host in (0, 1)]
        results, took = transfer(senders, receivers, seed, SIZES, 120)
        check_delivered(results, 2, seed)
        entered = [hosts.count_entered(host) - before[host] for host in (0, 1)]
        print(f"{entered} of {LENGTH} bytes entered the hosts in {took:.2f} s")  # noqa: T201
        # Each host has one of the two senders, and gets about the other half.
        assert sum(entered) <= 1.05 * LENGTH, entered
        assert min(entered) >= 0.4 * LENGTH, entered


@pytest.mark.parametrize("receivers", [1, 4])
def test_bytes_that_enter_a_host(start, receivers):
    """All weights enter a host without a sender once, whatever the number of receivers there."""
    hosts = start(2, receivers)
    connect("verl", hosts.processes[0], hosts.processes[1], bucket_size=BUCKET, timeout=60.0)
    before = hosts.count_entered(1)
    results, _ = transfer(*hosts.processes, 3, SIZES, 120)
    check_delivered(results, 2, 3)
    entered = hosts.count_entered(1) - before
    print(f"{entered} of {LENGTH} bytes entered: {entered / LENGTH:.3f}")  # noqa: T201
    assert entered <= 1.05 * LENGTH


@pytest.mark.nightly
def test_containers(start):
    """Two containers of one host, which do not see each other's processes, are two nodes."""
    hosts = start(2, 2, containers=True)
    connect("verl", hosts.processes[0], hosts.processes[1], bucket_size=BUCKET, timeout=60.0)
    results, _ = transfer(*hosts.processes, 4, SIZES, 120)
    check_delivered(results, 2, 4)


NIGHTLY = pytest.mark.nightly
FAULTS = [
    pytest.param("reader", signal.SIGKILL, id="kill-reader"),
    *[
        pytest.param(who, how, marks=NIGHTLY, id=f"{how.name[3:].lower()}-{who}")
        for who in ("reader", "other", "near", "leader", "sender")
        for how in (signal.SIGKILL, signal.SIGSTOP)
        if (who, how) != ("reader", signal.SIGKILL)
    ],
]


@pytest.mark.parametrize(("who", "how"), FAULTS)
def test_faults(start, who, how):
    """A process that is killed or stopped is named by all others by the deadline, and the next transfer works."""
    hosts = start(4, 4)
    # Each host has a process that takes the place of the one that is lost.
    (leader, near, _, spare_a), (sender, reader, other, spare_b) = hosts.processes
    senders, receivers = [leader, sender], [near, reader, other]
    names = {
        "leader": ("source rank 0", leader),
        "sender": ("source rank 1", sender),
        "near": ("target rank 0", near),
        "reader": ("target rank 1", reader),
        "other": ("target rank 2", other),
    }
    name, lost = names[who]
    connect("nemo_rl", senders, receivers, bucket_size=BUCKET, timeout=TIMEOUT_S)
    results, _ = transfer(senders, receivers, 1, SIZES, 60)
    check_delivered(results, 2, 1)
    results, took = transfer(senders, receivers, 2, SIZES, 3 * TIMEOUT_S, (lost, 5, how))
    assert len(results) == 4
    assert all(isinstance(error, TransferError) and name in str(error) for error in results), results
    print(f"{who}, {how.name}: named by all after {took:.1f} s")  # noqa: T201
    assert took <= 1.25 * TIMEOUT_S + 2 if how == signal.SIGSTOP else took < TIMEOUT_S
    spare = spare_a if lost in hosts.processes[0] else spare_b
    senders, receivers = ([spare if one is lost else one for one in side] for side in (senders, receivers))
    connect("nemo_rl", senders, receivers, bucket_size=BUCKET, timeout=60.0)
    results, _ = transfer(senders, receivers, 3, SIZES, 60)
    check_delivered(results, 2, 3)


@pytest.mark.nightly
def test_link_that_is_down(start):
    """A cut link ends the transfer by the deadline on both sides, and the next one works without a new connection."""
    hosts = start(2, 2)
    senders, receivers = hosts.processes
    connect("nemo_rl", senders, receivers, bucket_size=BUCKET, timeout=TIMEOUT_S)
    check_delivered(transfer(senders, receivers, 1, SIZES, 60)[0], 2, 1)
    hosts.network.link(hosts.spaces[1], "down")
    results, took = transfer(senders, receivers, 2, SIZES, 3 * TIMEOUT_S)
    hosts.network.link(hosts.spaces[1], "up")
    assert all(isinstance(error, TransferError) for error in results), results
    assert all("target rank 0" in str(error) for error in results[:2]), results
    assert all("source rank 0" in str(error) for error in results[2:]), results
    print(f"link down: named after {took:.1f} s")  # noqa: T201
    assert took <= 1.25 * TIMEOUT_S + 2
    check_delivered(transfer(senders, receivers, 3, SIZES, 60)[0], 2, 3)


@pytest.mark.nightly
def test_strangers(start):
    """A stranger who connects 200 times and says nothing neither learns anything nor stops a transfer."""
    hosts = start(2, 2)
    senders, receivers = hosts.processes
    connect("nemo_rl", senders, receivers, bucket_size=BUCKET, timeout=30.0)
    # The metadata is secret, so a stranger would scan for the ports.
    script = (
        "import socket, sys, time\n"
        "ports = [int(line.split()[1].split(':')[1], 16) for line in open('/proc/net/tcp').readlines()[1:]\n"
        "         if line.split()[3] == '0A']\n"
        "assert ports, 'nobody listens'\n"
        "made = [socket.create_connection((sys.argv[1], ports[n % len(ports)]), 5) for n in range(200)]\n"
        "[one.send(b'x' * 10) for one in made]\n"
        "print('connected', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = ["ip", "netns", "exec", hosts.spaces[0], sys.executable, "-c", script, hosts.addresses[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout.readline() == "connected\n"
        began = time.monotonic()
        check_delivered(transfer(senders, receivers, 1, SIZES, 60)[0], 2, 1)
        print(f"transfer beside strangers: {time.monotonic() - began:.1f} s")  # noqa: T201
        stranger.kill()
    check_delivered(transfer(senders, receivers, 2, SIZES, 60)[0], 2, 2)
