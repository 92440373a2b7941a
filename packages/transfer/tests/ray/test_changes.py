# SPDX-License-Identifier: Apache-2.0
"""Sends while a group restarts, resizes, or is looked at from another process."""

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_sharding import NamedSharding
from fairlead_transfer import Link, StaleWeightsError, TransferError
from fairlead_workergroup import Elastic, RayWorkerBuilder, RayWorkerGroup
from fairlead_workergroup.extension import Site
from fairlead_workergroup.testing import kill

from ..holders import Gated

pytestmark = pytest.mark.usefixtures("local_ray")


@contextlib.contextmanager
def held(folder, name):
    """Have the constructors, or the methods `weights`, of workers wait until the end of the block."""
    file = folder / name
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@contextlib.contextmanager
def held_send(source, link, version, folder, eventually):
    """Yield a send that waits in the source's methods until the end of the block."""
    with ThreadPoolExecutor() as threads, held(folder, "weights"):
        send = threads.submit(link.send, version, 120)
        assert eventually(lambda: {one.state for one in source.get_worker_status()} == {"busy"})
        yield send


@pytest.fixture
def groups(local_ray, tmp_path):
    """Return a source of two ranks without replicas of "w", and a target of two replicas."""
    folder = str(tmp_path)
    with RayVirtualCluster([4], use_gpus=False) as cluster:
        slots = cluster.slots()
        with (
            RayWorkerGroup(
                slots[:2],
                RayWorkerBuilder(Gated, folder, {0: "tp"}, 1.0),
                sharding_annotations=NamedSharding.from_shape(tp=2),
                name_prefix="policy",
            ) as source,
            RayWorkerGroup(slots[2:], RayWorkerBuilder(Gated, folder, {}), name_prefix="generation") as target,
        ):
            yield source, target


def test_send_during_a_restart(groups, tmp_path, eventually):
    """A rank is named while it is being restarted, and nothing changes; the next send includes it again."""
    source, target = groups
    with Link(source, target, source="weights", target="weights") as link, ThreadPoolExecutor() as threads:
        for version, side in enumerate(["source", "target"]):
            group = source if side == "source" else target
            source.call("fill", 1.0 + version).result()
            link.send(version, timeout=60)
            source.call("fill", 5.0).result()
            with held(tmp_path, "constructor"):
                kill(group, 1)
                restart = threads.submit(group.restart_failed_workers)
                assert eventually(lambda one=group: one.worker_metadata[1]["state"] == "restarting")
                with pytest.raises(TransferError, match="it is being restarted") as caught:
                    link.send(9, timeout=600)
            assert [(failure.side, failure.rank) for failure in caught.value.failures] == [(side, 1)]
            assert caught.value.phase == "collect"
            assert restart.result(60) == [1]
            assert link.version == version
            assert link.versions() == {0: version, 1: version if side == "source" else None}
            assert target.call("holds", collect=()).result() == 1.0 + version
        source.call("fill", 3.0).result()
        link.send(9, timeout=60)
        assert target.call("holds").result() == [3.0, 3.0]
        assert link.versions() == {0: 9, 1: 9}


def test_sends_and_resizes(local_ray, tmp_path, eventually):
    """Each send serves the ranks that there are, also if a group has grown or shrunk since the last one."""
    options = {"sharding_annotations": NamedSharding.from_shape(replica=2), "workers_per_node": [2]}
    folder = str(tmp_path)
    with (
        RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, RayWorkerBuilder(Gated, folder, {}, 1.0), name_prefix="policy", **options) as source,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Gated, folder, {}),
            name_prefix="generation",
            elastic=Elastic(on_resize="rejoin"),
            **options,
        ) as target,
        Link(source, target, source="weights", target="weights") as link,
        Link(source, target, source="weights", apply="load") as applied,
    ):
        changes = [(source, 2), (target, 3), (target, 1), (source, 3), (target, 3), (source, 1), (target, 2)]
        for version, (group, size) in enumerate(changes):
            group.resize(replica=size)
            source.call("fill", version + 1.0).result()
            for one in (link, applied):
                one.send(version, timeout=60)
                assert one.versions() == dict.fromkeys(range(target.world_size), version)
                assert target.call("holds").result() == [version + 1.0] * target.world_size
                target.call("fill", 0.0).result()
        link.send(20, timeout=60)
        target.resize(replica=3)
        assert link.versions() == {0: 20, 1: 20, 2: None}
        assert link.sync(timeout=60) is not None
        assert target.call("holds").result() == [7.0] * 3

        # A resize that has begun: the request waits in the worker behind `on_resize`.
        with ThreadPoolExecutor() as threads:
            source.call("fill", 30.0).result()
            with held(tmp_path, "rejoin"):
                resize = threads.submit(target.resize, replica=2)
                assert eventually(lambda: target.state().group_epoch == 6)
                send = threads.submit(link.send, 30, 60)
                time.sleep(0.2)  # Long enough for the first round; the send is right in any case.
            resize.result(60)
            assert send.result(60).version == 30
        assert target.call("holds").result() == [30.0] * 2
        assert link.versions() == {0: 30, 1: 30}


def inspect(*arguments):
    """Run the command line in another process; return its exit status and what it prints."""
    command = [sys.executable, "-m", "fairlead_inspect", *arguments, "--timeout", "60", "--json"]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_inspection_during_a_send(groups, tmp_path, eventually):
    """Another process sees that the workers are busy with a send, finds nothing wrong, and disturbs nothing."""
    source, target = groups
    with Link(source, target, source="weights", target="weights") as link:
        link.send(0, timeout=60)
        source.call("fill", 2.0).result()
        with held_send(source, link, 1, tmp_path, eventually) as send:
            status, seen = inspect("ps")
            assert status == 0
            members = [one for one in seen["processes"] if one["worker_set"] == "policy"]
            assert [(one["rank"], one["does"]) for one in members] == [(0, "user"), (1, "user")]
            # No worker makes progress, but not for as long as would be suspicious.
            status, seen = inspect("why", "--after", "100")
            assert not seen["wrong"]
            assert not send.done()
        assert send.result(60).version == 1
        assert target.call("holds").result() == [2.0, 2.0]


def test_sync_beside_a_send(groups, tmp_path, eventually):
    """A sync that another thread has begun before the end of a send brings no rank back to the version before it."""
    source, target = groups
    with Link(source, target, source="weights", target="weights") as link, ThreadPoolExecutor() as threads:
        link.send(0, timeout=60)
        source.call("fill", 2.0).result()
        with held_send(source, link, 1, tmp_path, eventually) as send:
            sync = threads.submit(link.sync, timeout=60)
            time.sleep(0.2)  # Long enough for it to begin; the result is right in any case.
        assert send.result(60).version == 1
        assert sync.result(60) is None
        assert link.versions() == {0: 1, 1: 1}
        assert target.call("holds").result() == [2.0, 2.0]


def test_guard(groups):
    """Calls of ranks that do not hold the last version are refused, with what they hold, until they are brought up."""
    source, target = groups
    with Link(source, target, source="weights", target="weights") as link:
        with pytest.raises(AttributeError, match="no public method 'hold'"):
            link.guard("hold")
        link.guard("holds")
        with pytest.raises(StaleWeightsError, match="Send a version first") as stale:
            target.call("holds")
        assert (stale.value.needed, stale.value.held) == (None, {0: None, 1: None})
        source.call("fill", 1.0).result()
        link.send(1, timeout=60)
        assert target.call("holds").result() == [1.0, 1.0]
        kill(target, 1)
        target.restart_failed_workers()
        with pytest.raises(StaleWeightsError, match="`sync\\(\\)`") as stale:
            target.call("holds")
        assert (stale.value.method, stale.value.needed, stale.value.held) == ("holds", 1, {1: None})
        assert target.at(worker=0).call("holds", collect=()).result() == 1.0
        target.call("fill", 5.0).result()  # it needs no weights
        link.sync(timeout=60)
        assert target.call("holds").result()[1] == 1.0
        end = link.guard()
        kill(target, 0)
        target.restart_failed_workers()
        with pytest.raises(StaleWeightsError):
            target.call("fill", 5.0)
        end()
        target.call("fill", 5.0).result()
    target.call("holds").result()


def test_a_commit_waits_for_a_call_that_is_being_sent(groups):
    """No call comes before a commit on one rank and after it on another one (seam: a check that waits)."""
    source, target = groups
    asked, going, goes = [], threading.Event(), threading.Event()

    def wait(method, ranks):
        asked.append(method)
        if len(asked) == 2:  # the second time when it is sent
            going.set()
            goes.wait(60)

    with Link(source, target, source="weights", target="weights") as link, ThreadPoolExecutor() as threads:
        link.guard()
        source.call("fill", 1.0).result()
        link.send(1, timeout=60)
        source.call("fill", 2.0).result()
        end = Site(target).check_calls(wait)
        call = threads.submit(lambda: target.call("holds").result())
        assert going.wait(60)
        send = threads.submit(link.send, 2, 60)
        assert not concurrent.futures.wait([send], 1).done
        assert link.versions() == {0: 1, 1: 1}
        end()
        goes.set()
        assert call.result(60) == [1.0, 1.0]
        send.result(60)
        assert target.call("holds").result() == [2.0, 2.0]
