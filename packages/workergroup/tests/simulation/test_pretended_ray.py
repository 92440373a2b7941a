# SPDX-License-Identifier: Apache-2.0
"""Tests of the pretended Ray of the simulation."""

import os
import sys

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from fairlead_placement import HeadTimeoutError
from fairlead_placement.extension import alive_nodes

from .actors import HANG, Takes
from .exploration import explore
from .ray import PretendedRay
from .seam import actor_id_of, actor_id_of_ref, dead_actors, find_ended

FACTS = {"rank": 1, "epoch": 0, "world_size": 2, "env": {"RANK": "1", "WORLD_SIZE": "2"}}


def simulate(script, *, overlapping=False, seeds=100):
    """Run a script with many seeds; it gets the world, a pretended Ray and an actor."""

    def run(world):
        ray = PretendedRay(world, overlapping=overlapping)
        script(world, ray, ray.create("node-0"))

    report = explore(run, range(seeds))
    if report.failed is not None:
        raise report.failed.failure


def start(world, handle):
    return world.get([handle._fairlead_start.remote(FACTS, [], [], {})], timeout=None)[0]


class TestActors:
    """Actors that live."""

    def test_start(self):
        """A constructor gets the facts of its worker, and the answer has the process."""

        def script(world, ray, handle):
            begun = []
            ray.on_construct.append(begun.append)
            assert start(world, handle)["pid"] == handle.actor.key[0]
            assert [one.rank for one in begun] == [1]
            assert world.get([handle.step.remote(), handle.__ray_ready__.remote()], timeout=None) == [(1, 0, 2), True]

        simulate(script)

    def test_constructors_that_fail(self):
        """A constructor raises its own error, or hangs until a timeout."""

        def construct(worker):
            if worker.actor.name == "actor 1":
                raise ValueError("no such model")
            return HANG

        def script(world, ray, handle):
            ray.construct = construct
            with pytest.raises(ValueError, match="no such model") as caught:
                start(world, handle)
            assert isinstance(caught.value, RayTaskError)
            with pytest.raises(GetTimeoutError):
                world.get([ray.create("node-1")._fairlead_start.remote(FACTS, [], [], {})], timeout=5)
            assert world.now() == 5

        simulate(script)

    def test_order(self):
        """Requests begin in order one after the other, and their answers name the actor."""

        def script(world, ray, handle):
            refs = [handle.step.remote() for _ in range(3)]
            ready, pending = world.wait(refs, num_returns=2, timeout=None)
            assert ready == refs[:2]
            assert pending == refs[2:]
            world.get(refs, timeout=None)
            assert [one.number for one in handle.actor.worker.ran] == [ref.number for ref in refs]
            assert {actor_id_of_ref(ref) for ref in refs} == {actor_id_of(handle)}

        simulate(script)

    def test_overlapping(self):
        """Requests of an overlapping actor begin in any order, and a function that runs alone waits for all of them."""
        orders, epochs = set(), set()

        def script(world, ray, handle):
            start(world, handle)
            refs = [handle.step.remote() for _ in range(2)]
            facts = {"epoch": 1}
            alone = handle._fairlead_call.remote({"method": "apply_facts", "alone": 60.0}, b"", facts)
            world.get([*refs, alone], timeout=None)
            ran = [one.number - refs[0].number for one in handle.actor.worker.ran if one.method == "step"]
            orders.add(tuple(ran))
            epochs.update(ref.value()[1] for ref in refs)

        simulate(script, overlapping=True)
        assert orders == {(0, 1), (1, 0)}
        assert epochs == {0, 1}

    def test_function_that_does_not_run_alone(self):
        """It fails at its deadline if a method runs on."""

        def script(world, ray, handle):
            ray.methods["hang"] = lambda worker: HANG
            start(world, handle)
            handle.hang.remote()
            world.wait_for("waits for the method", lambda: handle.actor.running)
            with pytest.raises(TimeoutError, match=r"1 methods were still running after 5\.0 s"):
                world.get([handle._fairlead_call.remote({"method": "do_nothing", "alone": 5.0}, b"")], timeout=None)
            assert world.now() == 5

        simulate(script, overlapping=True)

    def test_facts(self):
        """The real `apply_facts` changes the facts and the environment of the worker, and nothing of this process."""

        def script(world, ray, handle):
            start(world, handle)
            changes = {"epoch": 3, "env": {"WORLD_SIZE": "4"}}
            world.get([handle._fairlead_apply.remote("apply_facts", b"", changes, ["dp"])], timeout=None)
            worker = handle.actor.worker
            assert worker.facts == {**FACTS, "epoch": 3, "env": {"RANK": "1", "WORLD_SIZE": "4"}, "layout": ["dp"]}
            assert worker.environ == {"RANK": "1", "WORLD_SIZE": "4"}
            assert "WORLD_SIZE" not in os.environ
            assert "_fairlead_worker" not in sys.modules

        simulate(script, seeds=10)

    def test_arguments_and_values(self):
        """Arguments may be references, silent methods return None, and methods may take time."""

        def script(world, ray, handle):
            ray.methods |= {"add": lambda worker, a, b: a + b, "slow": lambda worker, value: Takes(9, value)}
            slow = handle.slow.remote(4)
            added = handle.add.remote(slow, b=ray.put(3))
            silent = handle._fairlead_call.remote({"method": "add", "silent": True}, 1, b=1)
            assert ray.get([slow, added, silent]) == [4, 7, None]
            assert world.now() == 9

        simulate(script)


class TestDeaths:
    """Actors and nodes that die, and a head that is silent."""

    def test_crash(self):
        """A call of a worker that crashes ends with its value or with Ray's error, and later ones with the error."""
        kinds = set()

        def script(world, ray, handle):
            ray.lose_actor()
            ref = handle.step.remote()
            world.wait([ref], num_returns=1, timeout=None)
            ran = "ran" if handle.actor.worker.ran else "did not run"
            kinds.add(ran if ref.has_failed else "answered")
            world.wait_for("waits for the crash", lambda: handle.actor.is_known_dead)
            with pytest.raises(ActorDiedError, match="it crashed"):
                world.get([handle.step.remote()], timeout=None)
            assert ray.ask_head("list the dead actors", dead_actors) == {actor_id_of(handle)}

        simulate(script)
        assert kinds == {"answered", "ran", "did not run"}

    def test_kill(self):
        """A killed actor may run calls before it ends, and its agent knows of the end before Ray does."""
        ran, known = set(), set()

        def script(world, ray, handle):
            ray.kill(handle)
            ref = handle.step.remote()
            world.wait_for("waits for the end", lambda: handle.actor.is_created and not handle.actor.is_running)
            assert ray.run_on_nodes(find_ended, {"node-0": ([handle.actor.key],)}) == {"node-0": [True]}
            known.add(handle.actor.is_known_dead)
            world.wait([ref], num_returns=1, timeout=None)
            ran.add(ref.has_failed)

        simulate(script)
        assert ran == known == {False, True}

    def test_node(self):
        """The actors of a node that dies die too, its agent does not answer, and no actor starts there."""

        def script(world, ray, handle):
            ray.drain("node-0", 30)
            world.wait_for("waits for the drain", lambda: ray.nodes["node-0"].drains_until)
            assert world.now() == 0
            world.wait_for("waits for the death", lambda: handle.actor.is_known_dead)
            assert world.now() == 30
            assert ray.ask_head("list the nodes", alive_nodes) == {"node-1"}
            assert ray.choose_alive(["node-0", "node-1"]) == ["node-1"]
            answers = ray.run_on_nodes(find_ended, {"node-0": ([],), "node-1": ([],)}, timeout_s=2)
            assert isinstance(answers["node-0"], TimeoutError)
            assert answers["node-1"] == []
            with pytest.raises(ActorDiedError):
                start(world, ray.create("node-0"))

        simulate(script)

    def test_silent_head(self):
        """It creates, kills and reports nothing, and does what was requested when it answers again."""

        def script(world, ray, handle):
            world.get([handle.step.remote()], timeout=None)
            ray.silence(ray.head, 100)
            world.wait_for("waits for the silence", lambda: ray.head.is_silent)
            with pytest.raises(HeadTimeoutError):
                ray.ask_head("list the nodes", alive_nodes)
            assert world.now() == 10
            other = ray.create("node-1")
            ray.kill(handle)
            assert world.get([handle.step.remote()], timeout=None) == [(None, -1, None)]
            assert world.wait([other.step.remote()], num_returns=1, timeout=5)[0] == []
            handle.actor.end("it crashed")
            with pytest.raises(ActorUnavailableError):
                world.get([handle.step.remote()], timeout=None)
            world.wait_for("waits for the head", lambda: not ray.head.is_silent)
            world.get([other.step.remote()], timeout=None)
            with pytest.raises(ActorDiedError):
                world.get([handle.__ray_ready__.remote()], timeout=None)

        simulate(script)

    def test_silent_agent(self):
        """An agent that is silent for a while answers in time, or not."""

        def script(world, ray, handle):
            node = ray.nodes["node-0"]
            ray.silence(node, 10)
            world.wait_for("waits for the silence", lambda: node.is_silent)
            asks = {"node-0": ([],)}
            assert isinstance(ray.run_on_nodes(find_ended, asks, timeout_s=4)["node-0"], TimeoutError)
            assert ray.run_on_nodes(find_ended, asks, timeout_s=40) == {"node-0": []}
            assert world.now() == 10

        simulate(script)
