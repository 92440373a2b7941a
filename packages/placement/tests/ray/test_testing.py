# SPDX-License-Identifier: Apache-2.0
"""`assert_no_leaks` finds what a test leaves behind, and names it."""

import re

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from fairlead_placement import NodeAgent
from fairlead_placement.testing import assert_no_leaks

pytestmark = pytest.mark.usefixtures("local_ray")


def test_nothing_left():
    """Resources released in time are no leak, nor is a node agent; errors of the body are raised."""
    agent = NodeAgent(ray.nodes()[0]["NodeID"])
    with assert_no_leaks():
        group = placement_group([{"CPU": 1}])
        ray.get(group.ready())
        ((_, lease_id),) = agent.lease(1, 1400, 1999)[0]
        agent.release([lease_id])
        remove_placement_group(group)
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
    agent = NodeAgent(ray.nodes()[0]["NodeID"])
    message, ([(port, lease_id)], _, _) = leak(lambda: agent.lease(1, 1400, 1999))
    assert f"new leased port: {agent.node_id[:8]}: {port}" in message
    agent.release([lease_id])
