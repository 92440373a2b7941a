# SPDX-License-Identifier: Apache-2.0
"""`assert_no_leaks` finds what a test leaves behind, and names it."""

import re

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from fairlead_placement import RayVirtualCluster, lease_ports
from fairlead_placement.testing import assert_no_leaks

pytestmark = pytest.mark.usefixtures("local_ray")


def test_nothing_left():
    """Resources released in time are no leak; errors of the body are raised."""
    with assert_no_leaks(), RayVirtualCluster([1], use_gpus=False) as cluster:
        lease_ports(cluster.slots())[0][0].release()
    with pytest.raises(ZeroDivisionError), assert_no_leaks(timeout_s=0.1):
        raise ZeroDivisionError


def leak(make):
    """Return the message of `assert_no_leaks` about `make`, and what that created."""
    made = []
    shown = pytest.raises(AssertionError, match=r"after 0.3 s the cluster is not as it was")
    with shown as caught, assert_no_leaks(timeout_s=0.3):
        made.append(make())
    return str(caught.value), made[0]


def test_a_placement_group_is_left(eventually):
    """The message names a placement group and the resources that are missing."""

    def make():
        group = placement_group([{"CPU": 1}], name="forgotten")
        ray.get(group.ready())
        assert eventually(lambda: ray.available_resources()["CPU"] == 15)
        return group

    message, group = leak(make)
    assert f"new placement group: {group.id.hex()} forgotten" in message
    assert ": 16 CPU" in message.partition("missing free resource")[2]
    remove_placement_group(group)


def test_an_actor_is_left():
    """The message names an actor, even one that holds no resources."""

    class Forgotten:
        pass

    def make():
        actor = ray.remote(Forgotten).options(name="named", num_cpus=0).remote()
        ray.get(actor.__ray_ready__.remote())
        return actor

    message, actor = leak(make)
    assert re.search(r"new actor: \w+ \S*Forgotten named", message)
    ray.kill(actor)


def test_a_port_is_left():
    """The message names a leased port."""
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        slots = cluster.slots()
        message, ((lease,),) = leak(lambda: lease_ports(slots))
    assert f"new leased port: {lease.node_id[:8]}: {lease.port}" in message
    lease.release()
