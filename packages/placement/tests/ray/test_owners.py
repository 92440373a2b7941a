# SPDX-License-Identifier: Apache-2.0
"""Ports and agents of a process that ends, and also placement groups of a job that ends."""

import contextlib
import os
import socket
import time

import pytest
import ray
from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fairlead_placement import NodeAgent, PlacementTimeoutError, RayVirtualCluster, _ray_private
from fairlead_placement._nodes import agent_process
from fairlead_placement._nodes.agent import AGENT_NAME_PREFIX
from fairlead_placement._ray_private import live_actors, worker_is_alive

LOW = 30000 + os.getpid() % 1000 * 2
# How long the agents of these tests stay, and how often they look for owners that have ended. A process sends these
# values with the code of an agent, so each process that creates one sets them first.
IDLE_S, OWNERS_S = 1.0, 1.0
HASTEN = f"from fairlead_placement._nodes import agent_process as it; it.IDLE_S, it.OWNERS_S = {IDLE_S}, {OWNERS_S}"


@pytest.fixture(scope="module")
def nodes(raylets):
    """Start a head of 4 CPUs and attach this process to it; a test may add a node."""
    with (
        pytest.MonkeyPatch.context() as patch,
        raylets({"num_cpus": 4}, quick_deaths=True, logging_level="error", log_to_driver=False) as made,
    ):
        patch.setattr(agent_process, "IDLE_S", IDLE_S)
        patch.setattr(agent_process, "OWNERS_S", OWNERS_S)
        yield made


@pytest.fixture
def head(nodes):
    return nodes.head_node.node_id


@ray.remote(num_cpus=0)
class Controller:
    """Reserves, as an RL controller does, and keeps its reservation."""

    def __init__(self):
        from fairlead_placement._nodes import agent_process as there  # the global one comes by value

        there.IDLE_S, there.OWNERS_S = IDLE_S, OWNERS_S

    def reserve(self, name, port, where):
        selector = {"ray.io/node-id": where}
        self.cluster = RayVirtualCluster(
            [2],
            use_gpus=False,
            name=name,
            port_range_low=port,
            port_range_high=port,
            label_selector=selector,
        ).reserve()
        self.cluster.get_master_address_and_port()
        return ray.get_runtime_context().get_worker_id()

    def agent(self, node_id):
        return NodeAgent(node_id).run(lambda: (os.getpid(), os.environ.get("MINE")))

    def exit(self):
        ray.actor.exit_actor()


def groups():
    return [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]


def is_free(port):
    with contextlib.closing(socket.socket()) as server:
        try:
            server.bind(("", port))
        except OSError:
            return False
        return True


def agents_of(job):
    return [actor.name for actor in live_actors() if actor.name.startswith(f"{AGENT_NAME_PREFIX}{job}")]


def test_a_controller_that_ends(nodes, head, eventually):
    """However an actor ends, its ports are released; the agent and others' leases stay.

    Its groups stay if it was killed; one that is dropped may still return them before its process exits.
    """
    first = Controller.options(runtime_env={"env_vars": {"MINE": "yes"}}).remote()
    pid, mine = ray.get(first.agent.remote(head))
    assert not mine  # the agent does not run in the environment of the process that asks first
    ends = {"killed": ray.kill, "exits": lambda actor: actor.exit.remote(), "dropped": lambda actor: None}
    first.__ray_terminate__.remote()
    with RayVirtualCluster([1], use_gpus=False, port_range_low=LOW + 1, port_range_high=LOW + 1) as cluster:
        cluster.get_master_address_and_port()
        for how, end in ends.items():
            controller = Controller.remote()
            worker = ray.get(controller.reserve.remote(how, LOW, head))
            assert len(groups()) == 2
            assert not is_free(LOW)
            end(controller)
            if how == "dropped":
                del controller
            assert eventually(lambda: is_free(LOW)), (how, worker_is_alive(worker), live_actors())
            (left,) = [row for row in placement_group_table().values() if row["name"].startswith(how)]
            with contextlib.suppress(*[ValueError] * (how != "killed")):  # it is removed already
                remove_placement_group(get_placement_group(left["name"]))  # Ray would do so at the end of the job
            assert worker_is_alive(worker) is False
        assert NodeAgent(head).leased() == [LOW + 1]
        assert NodeAgent(head).run(os.getpid) == pid
        assert len(agents_of(ray.get_runtime_context().get_job_id())) == 1
    assert groups() == []


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.nightly), "exits"])
def test_a_driver_that_ends(nodes, start_script, eventually, how):
    """The agents of a job, and all that they hold, end with it; a driver that exits prints nothing."""
    source = f"""
        import ray
        ray.init(address={nodes.address!r}, logging_level="error")
        from fairlead_placement import RayVirtualCluster
        {HASTEN}
        cluster = RayVirtualCluster([1], use_gpus=False, port_range_low={LOW}, port_range_high={LOW})
        cluster.get_master_address_and_port()
        print(ray.get_runtime_context().get_job_id())
        input()
        """
    # Without this setting Ray 2.55 prints a tip in every driver that starts workers.
    script = start_script(source, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    job = script.line()
    assert len(agents_of(job)) == 1
    assert not is_free(LOW)
    if how == "killed":
        script.process.kill()
    else:
        assert script.finish() == ("", "")
    assert eventually(lambda: not agents_of(job))
    assert eventually(lambda: is_free(LOW))
    assert eventually(lambda: not groups())


@pytest.mark.nightly
def test_a_lease_that_outlives_its_driver(nodes, start_script, eventually):
    """The port of a detached actor stays leased after the driver has ended, until the actor ends."""
    script = start_script(
        f"""
        import ray
        ray.init(address={nodes.address!r}, namespace="here", logging_level="error")
        from fairlead_placement import NodeAgent

        @ray.remote(num_cpus=0)
        class Keeper:
            def lease(self, node_id):
                {HASTEN}
                return NodeAgent(node_id).lease(1, {LOW}, {LOW})

        keeper = Keeper.options(name="keeper", lifetime="detached").remote()
        ray.get(keeper.lease.remote({nodes.head_node.node_id!r}))
        print(ray.get_runtime_context().get_job_id())
        """
    )
    job = script.line()
    script.finish()
    assert not eventually(lambda: is_free(LOW), IDLE_S + OWNERS_S + 1)
    ray.kill(ray.get_actor("keeper", namespace="here"))
    assert eventually(lambda: is_free(LOW))
    assert eventually(lambda: not agents_of(job))


def test_an_agent_without_an_autoscaler(nodes, head, eventually):
    """An agent that nothing keeps stays for further requests of its job, as nobody would remove its node."""
    job = ray.get_runtime_context().get_job_id()
    pid = NodeAgent(head).run(os.getpid)
    assert not eventually(lambda: not agents_of(job), IDLE_S + 1)
    assert NodeAgent(head).run(os.getpid) == pid


def test_unknown_is_not_dead(nodes, monkeypatch):
    """An unknown process, or one that Ray's private calls cannot report, is unknown (seam: they are missing)."""
    me = ray.get_runtime_context().get_worker_id()
    assert worker_is_alive(me) is True
    assert worker_is_alive("ab" * 28) is None
    with monkeypatch.context() as patch:
        patch.setattr(ray._private.state, "state", None)
        assert worker_is_alive(me) is None
    with monkeypatch.context() as patch:
        patch.setattr(ray._private.worker, "global_worker", None)
        assert worker_is_alive(me) is None
    assert _ray_private.driver_of(ray.get_runtime_context().get_job_id()) == me


class Holder:
    """Reserves the CPUs of the head, as the controller of a job does."""

    def reserve(self, count, timeout_s):
        self.cluster = RayVirtualCluster([count], use_gpus=False, reserve_timeout_s=timeout_s)
        return len(self.cluster.reserve().slots())

    def exit(self):
        os._exit(1)


def live_groups():
    return [group_id for group_id, row in placement_group_table().items() if row["state"] != "REMOVED"]


def test_groups_of_a_dead_controller(head, caplog):
    """A reservation that lacks room removes what an actor of this job that was killed has left."""
    controller = ray.remote(num_cpus=0)(Holder).remote()
    assert ray.get(controller.reserve.remote(3, 60), timeout=120) == 3
    (left,) = live_groups()
    ray.kill(controller)
    with RayVirtualCluster([2], use_gpus=False, reserve_timeout_s=60) as cluster:
        assert len(cluster.slots()) == 2
        assert left not in live_groups()
    assert "that dead actors of this job have left: fairlead-0-" in caplog.text


def test_groups_of_a_live_controller_and_of_others(head):
    """Nothing is removed that an actor holds which is alive, nor a group of a dead actor that another actor uses."""
    first, second = (ray.remote(num_cpus=0)(Holder).remote() for _ in range(2))
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


def test_a_controller_that_is_restarted(head):
    """A controller that Ray restarts does not wait for the reservation of its earlier process."""
    controller = ray.remote(num_cpus=0, max_restarts=1, max_task_retries=0)(Holder).remote()
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
