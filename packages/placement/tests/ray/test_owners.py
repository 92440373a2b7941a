# SPDX-License-Identifier: Apache-2.0
"""Ports, agents and placement groups of a process that ends."""

import contextlib
import os
import time
import uuid

import psutil
import pytest
import ray
from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import PlacementTimeoutError, RayVirtualCluster
from fairlead_placement.extension import find_boards, publish, read_boards, withdraw

LOW = 30000 + os.getpid() % 1000 * 2


@pytest.fixture(scope="module")
def nodes(raylets):
    """Start a head of 4 CPUs and attach this process to it."""
    with raylets({"num_cpus": 4}, quick_deaths=True, logging_level="error", log_to_driver=False) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(nodes):
    """Kill the actors and remove the groups that a failed test leaves, so that the next test is not affected."""
    yield
    for row in ray.util.list_named_actors(all_namespaces=True):
        if row["namespace"] == "controllers":
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(row["name"], namespace="controllers"))
    for group in live_groups():
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def live_groups():
    return [group_id for group_id, row in placement_group_table().items() if row["state"] != "REMOVED"]


class Controller:
    """Reserves, leases a port and publishes, as an RL controller does."""

    def hold(self, port):
        own = {"port_range_low": port, "port_range_high": port}
        self.cluster = RayVirtualCluster([1], use_gpus=False, **own)
        self.cluster.get_master_address_and_port()
        publish("theirs", 1, "value")
        return os.getpid()

    def exit(self):
        ray.actor.exit_actor()


def start_controller(port, **options):
    """Return an actor that holds something, and its process."""
    controller = ray.remote(num_cpus=0)(Controller).options(namespace="controllers", name=f"at-{port}", **options)
    actor = controller.remote()
    return actor, ray.get(actor.hold.remote(port), timeout=120)


@pytest.fixture
def is_free(bind):
    """Return a function that returns whether a port can be bound."""

    def read(port):
        try:
            bind(port)
        except OSError:
            return False
        return True

    return read


ENDS = {
    "killed": ray.kill,
    "exits": lambda actor: actor.exit.remote(),
    "dropped": lambda actor: None,
}


@pytest.mark.parametrize("how", ENDS)
def test_a_controller_that_ends(nodes, agent_pids, is_free, eventually, how):
    """However an actor ends, its agent ends with it, and the port and the board of another owner stay."""
    own = {"port_range_low": LOW, "port_range_high": LOW}
    with RayVirtualCluster([1], use_gpus=False, **own) as cluster:
        cluster.get_master_address_and_port()
        publish("mine", 1, "value")
        mine = agent_pids()
        assert len(mine) == 1
        port = LOW + 1
        actor, pid = start_controller(port)
        # The two owners of this job have an agent each, and do not meet.
        assert len(agent_pids()) == 2
        boards = read_boards(find_boards(), "", timeout_s=60).values()
        assert sorted(map(str, boards)) == ["{'mine': 'value'}", "{'theirs': 'value'}"]
        assert not is_free(port)
        ENDS[how](actor)
        del actor
        assert eventually(lambda: is_free(port) and agent_pids() == mine, 60), agent_pids()
        assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 60)
        assert not is_free(LOW)
        withdraw("mine")
    assert eventually(lambda: agent_pids() == [])


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.nightly), "exits"])
def test_a_driver_that_ends(nodes, agent_pids, is_free, start_script, eventually, how):
    """No process of a job is left 5 s after it, nor what they held; a driver that exits prints nothing."""
    source = f"""
        import ray
        ray.init(address={nodes.address!r}, logging_level="error")
        from fairlead_placement import RayVirtualCluster
        cluster = RayVirtualCluster([1], use_gpus=False, port_range_low={LOW}, port_range_high={LOW})
        cluster.get_master_address_and_port()
        print("ready")
        input()
        """
    # Without this setting Ray 2.55 prints a tip in every driver that starts workers.
    script = start_script(source, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    assert script.line() == "ready"
    (agent,) = agent_pids()
    assert not is_free(LOW)
    if how == "killed":
        script.process.kill()
    else:
        assert script.finish() == ("", "")
    assert eventually(lambda: not psutil.pid_exists(agent) and is_free(LOW))
    assert eventually(lambda: not live_groups())


class Holder:
    """Reserves the CPUs of the head, as the controller of a job does."""

    def reserve(self, count, timeout_s):
        self.cluster = RayVirtualCluster([count], use_gpus=False, reserve_timeout_s=timeout_s)
        return len(self.cluster.reserve().slots())

    def make_group(self, name):
        ray.get(placement_group([{"CPU": 1}], name=name).ready())

    def exit(self):
        os._exit(1)


def start_holder(**options):
    name = uuid.uuid4().hex
    return ray.remote(num_cpus=0)(Holder).options(namespace="controllers", name=name, **options).remote()


def test_groups_of_a_dead_controller(nodes, caplog):
    """A reservation that lacks room removes what an actor of this job that was killed has left."""
    controller = start_holder()
    assert ray.get(controller.reserve.remote(3, 60), timeout=120) == 3
    (left,) = live_groups()
    ray.kill(controller)
    with RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=60) as cluster:
        assert len(cluster.slots()) == 2
        assert left not in live_groups()
    assert "that dead actors of this job have left: fairlead-0-" in caplog.text


def test_groups_of_a_live_controller_and_of_others(nodes):
    """Nothing is removed that an actor holds which is alive, nor a group of a dead actor that another actor uses."""
    first, second = (start_holder() for _ in range(2))
    assert ray.get([one.reserve.remote(2, 60) for one in (first, second)], timeout=120) == [2, 2]
    groups = [PlacementGroup(PlacementGroupID(bytes.fromhex(one))) for one in live_groups()]
    users = [
        ray.remote(num_cpus=1)(Holder).options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
        for group in groups
    ]
    ray.get([user.__ray_ready__.remote() for user in users], timeout=120)
    ray.kill(first)
    with pytest.raises(PlacementTimeoutError, match="others hold what it needs"):
        RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=3).reserve()
    assert {group.id.hex() for group in groups} == set(live_groups())
    for actor in (*users, second):
        ray.kill(actor)
    for group in groups:
        remove_placement_group(group)


def test_groups_of_the_controller_itself(nodes):
    """A reservation of an actor that lacks room leaves the groups that this actor has made in other ways."""
    controller = start_holder()
    ray.get(controller.make_group.remote("engine-0123abcd"), timeout=120)
    with pytest.raises(PlacementTimeoutError, match="others hold what it needs"):
        ray.get(controller.reserve.remote(4, 3), timeout=120)
    (left,) = live_groups()
    assert placement_group_table()[left]["name"] == "engine-0123abcd"


def test_a_controller_that_is_restarted(nodes):
    """A controller that Ray restarts does not wait for the reservation of its earlier process."""
    controller = start_holder(max_restarts=1, max_task_retries=0)
    assert ray.get(controller.reserve.remote(3, 60), timeout=120) == 3
    (left,) = live_groups()
    controller.exit.remote()
    for _ in range(100):
        try:
            assert ray.get(controller.reserve.remote(4, 60), timeout=120) == 4
            break
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.2)
    (present,) = live_groups()
    assert present != left
    ray.kill(controller)
    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(present))))
