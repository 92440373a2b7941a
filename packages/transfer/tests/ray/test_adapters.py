# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engines in plain actors: two that send and four that receive, none of them a worker of a group."""

import functools

import pytest
import ray

from fairlead_placement.testing import assert_no_leaks
from fairlead_transfer import TransferError
from fairlead_transfer.adapters.verl import FairleadCheckpointEngine

from .. import engines
from ..engines import Member, digest, make_weights

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("local_ray")
SENDERS, RECEIVERS = 2, 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def lasting(local_ray):
    """Return the processes, the senders first. A test replaces one that it has killed."""
    ray.cloudpickle.register_pickle_by_value(engines)
    with assert_no_leaks(timeout_s=60):
        members = [ray.remote(num_cpus=0)(Member).remote() for _ in range(SENDERS + RECEIVERS)]
        yield members
        for one in members:
            ray.kill(one)
    ray.cloudpickle.unregister_pickle_by_value(engines)


@pytest.fixture
def members(lasting):
    """Return the processes of the module."""
    return lasting


def connect(members, framework, bucket_size, timeout=30.0):
    """Do what a framework does before a transfer."""
    prepared = [one.prepare.remote(framework, bucket_size, timeout, is_first=one is members[0]) for one in members]
    metadata = ray.get(prepared, timeout=60)
    if framework == "verl":
        sides = FairleadCheckpointEngine.build_topology(SENDERS, RECEIVERS, metadata)
        places = [place for side in sides for place in side["membership"]]
        ray.get([one.call.remote("init_process_group", place) for one, place in zip(members, places, strict=True)])
        return
    sizes = {"train_world_size": SENDERS, "rollout_world_size": RECEIVERS, "metadata": metadata}
    # One after the other: none waits for another one here.
    for rank, one in enumerate(members[:SENDERS]):
        ray.get(one.call.remote("init_policy_process_group", worker_rank=rank, **sizes))
    for rank, one in enumerate(members[SENDERS:]):
        ray.get(one.call.remote("init_rollout_process_group", rollout_rank=rank, **sizes))


def transfer(members, seed, kill=None, **options):
    """Begin a transfer; return the references of senders and receivers."""
    sent = [one.send.remote(seed, **options) for one in members[:SENDERS]]
    received = [
        one.receive.remote(seed, "layer30" if rank == kill else None) for rank, one in enumerate(members[SENDERS:])
    ]
    return sent, received


def find_left(members):
    """Return what is left in processes, after their engines have been finalized or have failed."""
    return [left for found in ray.get([one.find_left.remote() for one in members]) for left in found]


@pytest.mark.parametrize("framework", ["verl", "nemo_rl"])
def test_deliver(members, framework):
    """Every receiver gets every tensor bit for bit, one after the other, also those larger than a bucket."""
    bucket = 64 << 10
    connect(members, framework, bucket)
    for seed in (1, 2) if framework == "nemo_rl" else (1,):  # NeMo RL connects once, and verl each time
        weights = make_weights(seed, scale=5003)
        assert max(tensor.nbytes for _, tensor in weights) > 2 * bucket
        sent, received = transfer(members, seed, scale=5003)
        ray.get(sent, timeout=60)
        for _, found in ray.get(received, timeout=60):
            assert list(found.items()) == [(name, digest(tensor)) for name, tensor in weights]
    ray.get([one.call.remote("finalize") for one in members])
    assert find_left(members) == []


def test_memory(members):
    """A process holds at most two buckets: senders with what they share, and receivers of their own."""
    bucket, slack = 4 * MIB, 2 * MIB
    weights = make_weights(2, count=70, scale=MIB // 12)
    assert sum(tensor.nbytes for _, tensor in weights) > 6 * bucket > 6 * max(tensor.nbytes for _, tensor in weights)
    for count in (14, 70):  # the first one brings allocators and threads into being
        connect(members, "verl", bucket)
        sent, received = transfer(members, 2, count=count, scale=MIB // 12)
        grown = ray.get(sent, timeout=60) + [one for one, _ in ray.get(received, timeout=60)]
        ray.get([one.call.remote("finalize") for one in members])
    assert max(grown) < 2 * bucket + slack, grown
    assert min(grown) > bucket // 2, grown  # it was measured


@pytest.mark.nightly
def test_killed_receiver(members, call_in_time):
    """When a receiver is killed, all others get an error that names it; nothing is left, and the next one works."""
    connect(members, "verl", 256 << 10)
    sent, received = transfer(members, 1, kill=2, scale=20011)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(received.pop(2), timeout=60)
    waits = {str(at): functools.partial(ray.get, ref) for at, ref in enumerate([*sent, *received])}
    for error in call_in_time(waits, 15).values():  # the deadline of an engine is 600 s
        with pytest.raises(TransferError, match=r"target rank 2 on node .*its process has exited") as caught:
            raise error
        assert (caught.value.phase, caught.value.versions) == (
            "commit",
            dict.fromkeys(range(RECEIVERS), "inconsistent"),
        )
    assert find_left([one for rank, one in enumerate(members) if rank != SENDERS + 2]) == []
    members[SENDERS + 2] = ray.remote(num_cpus=0)(Member).remote()
    connect(members, "verl", 256 << 10)
    sent, received = transfer(members, 2)
    expected = {name: digest(tensor) for name, tensor in make_weights(2)}
    assert all(found == expected for _, found in ray.get(received, timeout=60))
    ray.get([*sent, *(one.call.remote("finalize") for one in members)], timeout=60)
