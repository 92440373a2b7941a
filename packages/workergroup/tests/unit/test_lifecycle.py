# SPDX-License-Identifier: Apache-2.0
"""What a group holds, without Ray: how it starts actors, and what its end gives back."""

import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from fairlead_workergroup import WorkerStartError
from fairlead_workergroup._membership import owned, slots
from fairlead_workergroup._membership.owned import Owned
from fairlead_workergroup._membership.shutdown import Shutdown
from fairlead_workergroup._membership.slots import Slots
from fairlead_workergroup._start import launch
from fairlead_workergroup._start.launch import create_actors, wait_started
from fairlead_workergroup._world import NEVER, Deadline


class Answer(Future):
    """The reference to an answer, which is its own future."""

    def future(self):
        return self


def make_plans(count):
    return [SimpleNamespace(place=SimpleNamespace(rank=rank)) for rank in range(count)]


def make_members(count):
    return [SimpleNamespace(rank=rank, coords={}, node_id="node") for rank in range(count)]


def test_the_first_failure_is_reported():
    """If a worker fails and its peers fail because of it a moment later, the error names the first one."""
    refs = [Answer(), Answer()]
    later = threading.Timer(0.1, lambda: [refs[rank].set_exception(RuntimeError(f"from {rank}")) for rank in (1, 0)])
    later.start()
    with pytest.raises(WorkerStartError, match="rank 1 on node node: its constructor raised RuntimeError: from 1"):
        wait_started(refs, make_members(2), name="a group", until=Deadline.after(10), check=lambda: None)
    later.join()


def test_each_answer_is_looked_at_once():
    """The cost of the wait for the start grows with the number of workers, not with its square."""
    looked = Counter()

    class Counted(Answer):
        def result(self, timeout=None):
            looked[self] += 1
            return super().result(timeout)

    refs = [Counted() for _ in range(1000)]
    for at, ref in enumerate(refs):
        ref.set_result({"at": at})
    answers = wait_started(refs, make_members(1000), name="a group", until=Deadline.after(10), check=lambda: None)
    assert [answer["at"] for answer in answers.values()] == list(range(1000))
    assert set(looked.values()) == {1}


def test_workers_that_are_late():
    """If constructors take too long, the error says how many, and names the first of them."""
    refs = [Answer() for _ in range(10)]
    refs[0].set_result({})
    with pytest.raises(
        WorkerStartError, match=r"9 of 10 workers .* after 0.1 s(?s:.*)rank=1,(?s:.*)rank=8,(?s:.*)and 1 others"
    ):
        wait_started(refs, make_members(10), name="a group", until=Deadline.after(0.1), check=lambda: None)


class TestCreation:
    """The creation of actors, whose requests Ray's head acknowledges one by one."""

    def test_window(self, monkeypatch):
        """No more requests wait for Ray's head than the window holds, and several do."""
        running, most, lock, several = 0, 0, threading.Lock(), threading.Event()

        def create_actor(plan, described, suffix):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            if running > 1:
                several.set()
            elif plan.place.rank:  # the first one is requested alone
                several.wait(60)
            with lock:
                running -= 1
            return plan.place.rank, suffix

        monkeypatch.setattr(launch, "create_actor", create_actor)
        suffixes = [f"s{rank}" for rank in range(100)]
        created = {}

        def add(plan, actor):
            created[plan.place.rank] = actor

        create_actors(make_plans(100), None, suffixes, add)
        assert created == {rank: (rank, suffix) for rank, suffix in enumerate(suffixes)}
        assert 1 < most <= launch.WINDOW

    def test_failure(self, monkeypatch):
        """After a failure no further actor is requested, and those that were created are known."""
        requested, known, cancelled = [], [], threading.Event()
        wait = launch.wait

        def create_actor(plan, described, suffix):
            requested.append(plan.place.rank)
            if plan.place.rank == 3:
                raise RuntimeError("the head is gone")
            if plan.place.rank > 3:  # what is under way when the failure arrives
                assert cancelled.wait(60)

        def cancel_and_wait(futures):
            cancelled.set()
            return wait(futures)

        monkeypatch.setattr(launch, "create_actor", create_actor)
        monkeypatch.setattr(launch, "wait", cancel_and_wait)
        with pytest.raises(RuntimeError, match="the head is gone"):
            create_actors(
                make_plans(1000),
                None,
                [""] * 1000,
                lambda plan, _: known.append(plan.place.rank),
            )
        assert len(requested) <= 4 + launch.WINDOW
        assert sorted([*known, 3]) == sorted(requested)


def make_owned(connected=True):
    return Owned(SimpleNamespace(connected=connected, name_prefix="policy", ended_error=lambda: ValueError("ended")))


WORKER = SimpleNamespace(actor_id="a", rank=0)


def test_an_interrupt_during_the_end(monkeypatch):
    """Ctrl-C in one step of the end does not keep the others from being done."""
    done = []

    def interrupt():
        done.append("port")
        raise KeyboardInterrupt

    monkeypatch.setattr(owned, "kill_and_wait", lambda workers, until: done.append("workers") or [])
    held = make_owned()
    held.own(("slot", 1), lambda: done.append("slot"))
    held.own(("port",), interrupt)
    held.own(("publication",), lambda: done.append("publication"))
    held.own_worker(WORKER)
    with pytest.raises(KeyboardInterrupt):
        held.close(NEVER)
    assert done == ["workers", "publication", "port", "slot"]


def test_what_arrives_after_the_end(monkeypatch):
    """What a change acquires while the group ends is returned at once."""
    done = []
    monkeypatch.setattr(owned, "kill_and_wait", lambda workers, until: done.append("worker") or [])
    held = make_owned()
    assert held.close(NEVER)
    held.own(("port",), lambda: done.append("port"))
    with pytest.raises(ValueError, match="ended"):
        held.own_worker(WORKER)
    assert done == ["port", "worker"]


def test_an_interrupt_while_slots_are_claimed(monkeypatch):
    """Ctrl-C while a slot is waited for releases the slots that were claimed before."""
    released = []

    def claim_slots(slots, holder, group):
        if slots[0].key == "full":
            raise KeyboardInterrupt
        return SimpleNamespace(release=lambda: released.append(slots[0].key))

    monkeypatch.setattr(slots, "claim_slots", claim_slots)
    monkeypatch.setattr(slots, "usable_slots", list)
    claims = Slots([], SimpleNamespace(name_prefix="policy"), make_owned())
    with pytest.raises(KeyboardInterrupt):
        claims.claim([SimpleNamespace(key="free"), SimpleNamespace(key="full")])
    assert released == ["free"]


def test_an_interrupt_at_the_beginning():
    """Ctrl-C at the very beginning of a shutdown leaves no worker behind either."""
    ended = []

    def interrupt():
        raise KeyboardInterrupt

    core = SimpleNamespace(refuse_waiting=interrupt, end=lambda: None, ending=False)
    held = SimpleNamespace(close=lambda until: ended.append("workers"))
    provisioner = SimpleNamespace(owned=held, release_arguments=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        Shutdown(core, SimpleNamespace(join=lambda deadline: True), provisioner).run(None, 30.0, force=False)
    assert ended == ["workers"]


def test_ray_that_ends_during_the_release(monkeypatch, caplog):
    """An error of Ray is not reported if Ray has been shut down meanwhile: it has ended everything."""
    held = make_owned()

    def kill_and_wait(workers, until):
        held._core.connected = False
        raise RaySystemError("Ray has not been started yet")

    monkeypatch.setattr(owned, "kill_and_wait", kill_and_wait)
    held.own_worker(WORKER)
    assert held.close(NEVER)
    assert not caplog.records


def test_a_release_that_was_interrupted_is_repeated_at_the_end():
    """A group forgets what it holds when that has been released: Ctrl-C in between leaves it to the end."""
    released, interrupts = [], [True]

    def release():
        if interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        released.append("port")

    held = make_owned()
    held.own(("port", 1), release)
    with pytest.raises(KeyboardInterrupt):
        held.drop([("port", 1)])
    held.close(NEVER)
    assert released == ["port"]
