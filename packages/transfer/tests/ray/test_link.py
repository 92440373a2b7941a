# SPDX-License-Identifier: Apache-2.0
"""Links between groups of real workers."""

import concurrent.futures
import gc
import os
import re
import threading
import time
import traceback

import numpy as np
import pytest

from fairlead_transfer import LayoutMismatchError, Link, TransferError

SLOTS = 8
pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.smoke
@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_send(groups, transport):
    """Each send brings the current tensors to all target ranks."""
    policy, generation = groups
    generation.call("fill", 0.0).result()
    with Link(policy, generation, source="weights", target="weights", transport=transport) as link:
        assert link.versions() == dict.fromkeys(range(4))
        assert link.version is None
        for step in range(3):
            policy.call("fill", step + 2.0).result()
            report = link.send(step, timeout=60)
            assert generation.call("holds").result() == [step + 2.0] * 4
            assert report.replicas_compared == (step == 0)
            assert report.version == step
            assert set(report.transports) == {transport.replace("auto", "shared_memory")}
            assert report.bytes_moved == link.explain().plan.bytes_moved
            assert set(report.seconds) >= {"collect", "stage", "move", "commit"}
        assert link.versions() == dict.fromkeys(range(4), 2)
        assert link.version == 2


def test_colocated(groups):
    """A link from a group to itself stages all that it sends; nothing can be synced before a send."""
    policy, generation = groups
    policy.call("fill", 3.0).result()
    with Link(policy, policy, source="weights", target="weights") as link:
        assert link.send(0, timeout=60).bytes_moved == link.explain().plan.bytes_moved > 0
        assert policy.call("holds").result() == [3.0] * 4
    with (
        Link(policy, generation, source="weights", target="weights") as link,
        pytest.raises(ValueError, match="nothing has been sent yet"),
    ):
        link.sync()


def test_two_links(groups):
    """Two links between the same groups do not disturb each other."""
    policy, generation = groups
    with (
        Link(policy, generation, source="weights", target="weights", exclude=["w"]) as first,
        Link(policy, generation, source="weights", target="weights") as second,
    ):
        policy.call("fill", 4.0).result()
        first.send(0, timeout=60)
        second.send(5, timeout=60)
        policy.call("fill", 5.0).result()
        second.send(6, timeout=60)
        first.send(1, timeout=60)
        assert generation.call("holds").result() == [5.0] * 4


def test_bad_input_is_refused_before_anything_moves(groups):
    """Tensors that do not fit are listed in one error; the targets keep what they had."""
    policy, generation = groups
    generation.call("fill", 1.5).result()
    with Link(policy, generation, source="weights", target="odd") as link:
        with pytest.raises(LayoutMismatchError) as caught:
            link.send(0, timeout=60)
        reasons = {one.name: one.reason for one in caught.value.mismatches}
        assert set(reasons) == {"w", "norm", "step", "more"}
        assert "dtypes differ" in reasons["norm"]
        assert link.versions() == dict.fromkeys(range(4))
    with (
        Link(policy, generation, source="weights", target="weights", rename={"unused": "other"}) as link,
        pytest.raises(LayoutMismatchError, match="rename= has this name"),
    ):
        link.send(0, timeout=60)
    with (
        Link(policy, generation, source="wrong", target="weights") as link,
        pytest.raises(LayoutMismatchError, match="must return a dict"),
    ):
        link.send(0, timeout=60)
    with (
        Link(policy, generation, source="fail", target="weights") as link,
        pytest.raises(TransferError, match=r"source rank \d .*ArithmeticError: broken") as failed,
    ):
        link.send(0, timeout=60)
    assert failed.value.phase == "collect"
    assert isinstance(failed.value.__cause__, ArithmeticError)
    shown = "".join(traceback.format_exception(failed.value))
    assert re.search(r"holders\.py\", line \d+, in fail", shown), "the line in the user's method"
    assert generation.call("holds").result() == [1.5] * 4


def test_replicas_that_disagree_are_refused(groups):
    """Source ranks that hold the same box with other bytes are named; nothing is applied."""
    policy, generation = groups
    generation.call("fill", 1.5).result()
    policy.call("fill", 2.0).result()
    policy.workers[1].fill.remote(3.0)
    with (
        Link(policy, generation, source="weights", target="weights") as link,
        pytest.raises(LayoutMismatchError, match="different bytes"),
    ):
        link.send(0, timeout=60)
    assert generation.call("holds").result() == [1.5] * 4


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": "weights", "apply": "load"}, ValueError, "either target= or apply="),
        ({}, ValueError, "either target= or apply="),
        ({"target": "nothing"}, AttributeError, "nothing"),
        ({"target": "weights", "transport": "pigeon"}, ValueError, "transport must be one of"),
        ({"target": "weights", "check_replicas": "maybe"}, ValueError, "check_replicas must be one of"),
        ({"target": "weights", "dtype": np.float32}, TypeError, "name of a dtype"),
        ({"target": "weights", "dtype": "int32"}, ValueError, "dtype must be one of"),
        ({"target": "weights", "exclude": "w"}, TypeError, "several names"),
        ({"apply": "load", "chunk_bytes": 0}, ValueError, "chunk_bytes"),
        ({"apply": "weights"}, TypeError, "weights"),
        ({"target": "weights", "before_commit": "nothing"}, AttributeError, "nothing"),
    ],
)
def test_bad_options(groups, options, error, text):
    """Options are checked before anything is sent."""
    with pytest.raises(error, match=text):
        Link(*groups, source="weights", **options)


def test_tensors_that_cannot_be_written(groups):
    """A read-only tensor of the target is refused by name, unless the link excludes it."""
    policy, generation = groups
    policy.call("fill", 2.5).result()
    with (
        Link(policy, generation, source="with_table", target="with_table") as link,
        pytest.raises(LayoutMismatchError, match="read-only"),
    ):
        link.send(0, timeout=60)
    with Link(policy, generation, source="with_table", target="with_table", exclude=("table",)) as link:
        for version in range(2):
            link.send(version, timeout=60)
    assert generation.call("holds").result() == [2.5] * 4


@pytest.mark.smoke
def test_versions_grow(groups):
    """A version must be larger than the last one, unless it is sent again on purpose."""
    policy, generation = groups
    policy.call("fill", 1.0).result()
    link = Link(policy, generation, source="weights", target="weights")
    link.send(3, timeout=60)
    with pytest.raises(ValueError, match="not larger than the last one, 3"):
        link.send(3)
    policy.call("fill", 2.0).result()
    link.send(3, timeout=60, again=True)
    assert generation.call("holds").result() == [2.0] * 4
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match="version must be"):
            link.send(wrong)
    with pytest.raises(ValueError, match="timeout must be"):
        link.send(4, timeout=0)
    assert link.sync() is None
    with pytest.raises(ValueError, match="do not exist"):
        link.sync([7])
    link.close()
    link.close()
    with pytest.raises(ValueError, match="has been closed"):
        link.send(5)


def test_names_casts_and_hooks(groups):
    """Tensors are renamed, left out, and cast at the source; methods run around the commit."""
    policy, generation = groups
    policy.call("fill", 1.0).result()
    generation.call("fill", 0.0).result()
    generation.call("events").result()
    with Link(
        policy,
        generation,
        source="weights",
        target="weights",
        rename={"w": "w"},
        dtype="float16",
        exclude=["n*"],
        before_commit="note",
        after_commit="note",
    ) as link:
        report = link.send(0, timeout=60)
        # New tensors are collected twice, and what is written is collected again when before_commit has run.
        assert generation.call("events").result() == [["weights", "weights", "note", "weights", "note"]] * 4
        # Of "w" half on each rank, and the scalar.
        assert report.bytes_moved == 4 * (12 * 8 // 2 + 1) * 2
        assert generation.call("holds").result() == [None] * 4  # "norm" was left out


def test_apply(groups):
    """An engine that loads tensors itself gets whole tensors in chunks; one that fails midway is then synced."""
    policy, generation = groups
    policy.call("fill", 6.0).result()
    generation.call("events").result()
    with Link(policy, generation, source="weights", apply="load", chunk_bytes=64) as link:
        link.send(0, timeout=60)
        assert generation.call("holds").result() == [6.0] * 4
        assert [sorted(map(tuple, chunks)) for chunks in generation.call("events").result()] == [
            [("norm", "step"), ("w",)]
        ] * 4
    with Link(policy, generation, source="weights", apply="load_one", chunk_bytes=1) as link:
        with pytest.raises(TransferError, match="ArithmeticError: broken") as caught:
            link.send(0, timeout=60)
        assert caught.value.phase == "commit"
        assert caught.value.versions == link.versions() == dict.fromkeys(range(4), "inconsistent")
        generation.call("note").result()
        assert link.sync(timeout=60).version == 0
        assert link.versions() == dict.fromkeys(range(4), 0)


def open_segments(group):
    """Return how many segments of shared memory the workers of a group have open."""
    count = 0
    for status in group.get_worker_status():
        folder = f"/proc/{status.pid}/fd"
        for name in os.listdir(folder):
            try:
                count += os.readlink(f"{folder}/{name}").startswith("/memfd:fairlead-transfer")
            except OSError:
                continue
    return count


def test_nothing_is_left(groups):
    """Closing a link gives back the shared memory of its workers."""
    policy, generation = groups
    assert open_segments(policy) == 0
    with Link(policy, generation, source="weights", target="weights") as link:
        link.send(0, timeout=60)
        assert open_segments(policy) >= 4
    policy.call("note").result()
    assert open_segments(policy) == open_segments(generation) == 0


def test_dropped_link_releases_its_memory(groups, eventually, recwarn):
    """A link that is dropped without `close()` is closed in the background, with a warning; a closed one without."""
    policy, generation = groups
    link = Link(policy, generation, source="weights", target="weights")
    link.send(0, timeout=60)
    closed = Link(generation, policy, source="weights", target="weights")
    closed.send(0, timeout=60)
    closed.close()
    unused = Link(policy, generation, source="weights", target="weights")
    assert open_segments(policy) >= 4
    del link, closed, unused
    gc.collect()
    assert eventually(lambda: open_segments(policy) == open_segments(generation) == 0)
    texts = [str(one.message) for one in recwarn if one.category is ResourceWarning]
    assert ["dropped" in text and "from 'policy' to 'generation'" in text for text in texts] == [True]


@pytest.fixture
def hold(gate, eventually):
    """Return a function that keeps all workers of a group busy until the gate is open."""

    def wait_for_gate(worker):
        while not gate.exists():
            time.sleep(0.01)

    def hold_group(group):
        busy = group.call(wait_for_gate)
        assert eventually(lambda: {one.state for one in group.get_worker_status()} == {"busy"}, 60)
        return busy

    return hold_group


def is_used(link):
    """Return whether another thread uses a link."""
    free = link._lock.acquire(blocking=False)
    if free:
        link._lock.release()
    return not free


def test_close_waits_for_its_turn(groups, gate, hold, eventually):
    """A send that has begun ends before another thread closes the link; one that waits is refused."""
    policy, generation = groups
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        link = Link(policy, generation, source="weights", target="weights")
        policy.call("fill", 8.0).result()
        busy = hold(policy)
        sending = threads.submit(link.send, 0, 60)
        assert eventually(lambda: is_used(link), 60)
        closing = threads.submit(link.close)
        time.sleep(0.2)
        gate.touch()
        assert sending.result().version == 0
        closing.result()
        busy.result()
        assert generation.call("holds").result() == [8.0] * 4
        link = Link(policy, generation, source="weights", target="weights")
        link.send(0, timeout=60)
        with link._lock:
            waiting = threads.submit(link.send, 1, 60)
            time.sleep(0.2)
            link.close()
        with pytest.raises(ValueError, match="has been closed"):
            waiting.result()


def test_one_transfer_at_a_time(groups, gate, hold, eventually):
    """A second thread waits for its turn, at most for its timeout."""
    policy, generation = groups
    policy.call("fill", 7.0).result()
    with Link(policy, generation, source="weights", target="weights") as link:
        link.send(0, timeout=60)
        busy = hold(policy)
        sender = threading.Thread(target=link.send, args=(1,))
        sender.start()
        assert eventually(lambda: is_used(link), 60)
        with pytest.raises(TransferError, match="Another thread uses the link"):
            link.send(2, timeout=0.2)
        gate.touch()
        sender.join()
        busy.result()
        assert link.version == 1


def test_deadline(groups, gate, hold):
    """A busy worker is named with what it does, while it is busy; the next send works."""
    policy, generation = groups
    policy.call("fill", 8.0).result()
    with Link(policy, generation, source="weights", target="weights") as link:
        busy = hold(policy)
        with pytest.raises(TransferError, match=r"did not reply by the deadline\. It is in") as caught:
            link.send(0, timeout=1)
        assert {failure.rank for failure in caught.value.failures} == {0, 1, 2, 3}
        assert caught.value.phase == "collect"
        gate.touch()
        busy.result()
        link.send(0, timeout=60)
        assert generation.call("holds").result() == [8.0] * 4


def test_tables(groups):
    """Reports and explanations show as text."""
    policy, generation = groups
    with Link(policy, generation, source="weights", target="weights") as link:
        report = link.send(0, timeout=60)
        assert "version 0" in str(report)
        assert "shared_memory" in str(link.explain())
        assert repr(link) == "Link('policy' -> 'generation', version 0)"


def test_hook_that_fails(groups):
    """A `before_commit` that raises leaves the tensors as they were, and its error names the method's."""
    policy, generation = groups
    policy.call("fill", 3.0).result()
    generation.call("fill", 1.0).result()
    with Link(policy, generation, source="weights", target="weights", before_commit="fail") as link:
        with pytest.raises(TransferError, match="ArithmeticError: broken"):
            link.send(0, timeout=60)
        assert generation.call("holds").result() == [1.0] * 4
