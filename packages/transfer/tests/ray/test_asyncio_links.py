# SPDX-License-Identifier: Apache-2.0
"""Links to asyncio workers, whose methods overlap: what a commit waits for, and what waits for it."""

import contextlib
import logging
import sys
import threading
import time

import pytest

from fairlead_transfer import Link, TransferError
from fairlead_transfer._side import Side

SLOTS = 12
pytestmark = pytest.mark.usefixtures("local_ray")


def test_interrupted_commit(groups, engine, gate, monkeypatch, eventually):
    """Ctrl-C in the wait for commits leaves them to end: the link learns of each without another transfer."""
    policy, _ = groups
    policy.call("fill", 2.0).result()
    wait = Side.wait

    def interrupt(side, requests, timeout_s, *, all_of_them=False):
        """Interrupt the wait for commits."""
        if all_of_them:
            raise KeyboardInterrupt
        return wait(side, requests, timeout_s)

    with Link(policy, engine, source="weights", target="weights") as link:
        link.send(0, timeout=60)
        ask = Side.ask

        def ask_and_hold(side, ranks, operation, arguments, **options):
            """Have a method of the target run when the commit arrives."""
            if operation == "commit":
                slow.append(engine.call("generate_until", gate))
                # Requests to an asyncio actor may overtake one whose argument is still fetched.
                assert eventually(lambda: {one.method for one in engine.get_worker_status()} == {"generate_until"}, 60)
            return ask(side, ranks, operation, arguments, **options)

        slow = []
        monkeypatch.setattr(Side, "wait", interrupt)
        monkeypatch.setattr(Side, "ask", ask_and_hold)
        with pytest.raises(KeyboardInterrupt):
            link.send(1, timeout=60)
        monkeypatch.undo()
        assert set(link.versions().values()) == {"committing"}
        gate.touch()
        slow[0].result()
        assert eventually(lambda: link.versions() == dict.fromkeys(range(4), 1), 60)


def test_commit_is_exclusive_on_asyncio_workers(groups, engine, gate, monkeypatch, eventually):
    """While methods of an asyncio worker overlap, the commit waits for them, and later ones wait for it."""
    policy, _ = groups
    policy.call("fill", 2.0).result()
    engine.call("fill", 1.0).result()
    with Link(policy, engine, source="weights", target="weights") as link:
        calls = [engine.call("generate", 0.05) for _ in range(4)]
        done = threading.Event()

        def keep_calling():
            while not done.is_set():
                calls.append(engine.call("generate", 0.05))
                time.sleep(0.01)

        thread = threading.Thread(target=keep_calling)
        thread.start()
        try:
            for version in range(3):
                policy.call("fill", version + 2.0).result()
                link.send(version, timeout=60)
        finally:
            done.set()
            thread.join()
        calls.append(engine.call("generate", 0.05))  # after the last commit
        seen = [pair for call in calls for pair in call.result(timeout=60)]
        assert all(before == after for before, after in seen)
        assert {before for before, _ in seen} >= {1.0, 4.0}
        ask = Side.ask

        def ask_briefly(side, ranks, operation, arguments, *, alone_s=None, first=None):
            """Let the commit alone wait for methods for a short time only, and not the steps before it."""
            within_s = 0.5 if operation == "commit" else alone_s
            return ask(side, ranks, operation, arguments, alone_s=within_s, first=first)

        monkeypatch.setattr(Side, "ask", ask_briefly)
        slow = engine.call("generate_until", gate)
        assert eventually(lambda: {one.method for one in engine.get_worker_status()} == {"generate_until"}, 60)
        with pytest.raises(TransferError, match="methods were still running") as caught:
            link.send(9, timeout=60)
        monkeypatch.undo()
        assert caught.value.phase == "commit"
        assert set(link.versions().values()) == {"committing"}
        gate.touch()
        slow.result()
        link.sync(timeout=60)
        assert link.versions() == dict.fromkeys(range(4), 9)


def test_a_version_is_one_state_of_the_source(groups, engine, gate, eventually):
    """While a method changes the weights of the source, a send waits for its end or fails; it never mixes states."""
    _, generation = groups
    generation.call("fill", 1.5).result()
    engine.call("fill", 2.0).result()
    step = engine.call("fill_in_two_steps", 3.0, gate)
    assert eventually(lambda: {one.method for one in engine.get_worker_status()} == {"fill_in_two_steps"})
    try:
        with Link(engine, generation, source="weights", target="weights", check_replicas="never") as link:
            with contextlib.suppress(TransferError):
                link.send(0, timeout=3)
            assert generation.call("holds").result() == [1.5] * 4
    finally:
        gate.touch()
        step.result(timeout=60)


def test_before_commit_ends_the_requests_in_flight(groups, engine, gate, eventually):
    """An engine whose `before_commit` lets its requests end takes new weights while requests are in flight."""
    policy, _ = groups
    policy.call("fill", 4.0).result()
    requests = engine.call("generate_until", gate)
    assert eventually(lambda: {one.method for one in engine.get_worker_status()} == {"generate_until"})
    try:
        with Link(policy, engine, source="weights", target="weights", before_commit="end_requests") as link:
            engine.call("set_gate", gate).result()
            link.send(0, timeout=60)
            assert engine.call("holds").result(timeout=60) == [4.0] * 4
    finally:
        gate.touch()
        requests.result(timeout=60)


def test_before_commit_comes_before_the_commit(groups, engine, gate, monkeypatch):
    """A rank runs its `before_commit` before the commit, also if Ray delivers requests late (seam: a thread sends)."""
    policy, _ = groups
    policy.call("fill", 6.0).result()
    engine.call("set_gate", gate).result()
    ask, threads = Side.ask, []

    def ask_late(side, ranks, operation, *args, **kwargs):
        """Send late what nobody waits for, as Ray may for workers whose methods overlap."""
        if operation != "prepare":
            return ask(side, ranks, operation, *args, **kwargs)
        threads.append(threading.Timer(1.0, ask, (side, ranks, operation, *args), kwargs))
        threads[-1].start()
        return {}

    monkeypatch.setattr(Side, "ask", ask_late)
    with Link(policy, engine, source="weights", target="weights", before_commit="end_requests") as link:
        link.send(0, timeout=60)
        assert gate.exists()
        assert engine.call("holds").result(timeout=60) == [6.0] * 4
    for one in threads:
        one.join()


def test_requests_stay_open(groups, engine, gate, eventually):
    """With `pauses=True` an engine that has made itself quiet takes new weights while its requests stay open."""
    policy, _ = groups
    policy.call("fill", 5.0).result()
    requests = engine.call("generate_until", gate)
    assert eventually(lambda: {one.method for one in engine.get_worker_status()} == {"generate_until"})
    with Link(policy, engine, source="weights", target="weights", before_commit="holds", pauses=True) as link:
        link.send(0, timeout=60)
        assert all(outcome.error is not None for outcome in requests.outcomes(timeout=0))
    gate.touch()
    requests.result(timeout=60)
    assert engine.call("holds").result() == [5.0] * 4
    with pytest.raises(ValueError, match="pauses=True needs before_commit"):
        Link(policy, engine, source="weights", target="weights", pauses=True)


def test_no_warnings_of_asyncio_workers(groups, engine):
    """Ray does not warn of a blocking wait when asyncio workers fetch from the object store."""
    policy, _ = groups

    def listen(worker):
        """Keep what Ray logs in the worker from now on, and let it warn again."""
        worker.heard = []
        handler = logging.Handler()
        handler.emit = lambda record: worker.heard.append(record.getMessage())
        logging.getLogger("ray").addHandler(handler)
        sys.modules["ray._private.worker"].blocking_get_inside_async_warned = False

    engine.call(listen).result()
    with Link(policy, engine, source="weights", target="weights", transport="object_store") as link:
        link.send(0, timeout=60)
    assert engine.call(lambda worker: worker.heard).result() == [[]] * 4
