# SPDX-License-Identifier: Apache-2.0
"""Ports and agents of a process that ends."""

import contextlib
import os

import psutil
import pytest
import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from fairlead_placement import RayVirtualCluster
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
    assert eventually(lambda: is_free(LOW))


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
    mine = agent_pids()
    # Without this setting Ray 2.55 prints a tip in every driver that starts workers.
    script = start_script(source, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    assert script.line() == "ready"
    (agent,) = {*agent_pids()} - {*mine}
    assert not is_free(LOW)
    if how == "killed":
        script.process.kill()
    else:
        assert script.finish() == ("", "")
    assert eventually(lambda: not psutil.pid_exists(agent) and is_free(LOW))
    assert eventually(lambda: not live_groups())
