# SPDX-License-Identifier: Apache-2.0
"""The start of a group: refused arguments, the wait for the workers, and what a failure leaves."""

import importlib
import os
import re
import signal
import threading
import time
from typing import ClassVar

import pytest
import ray

from fairlead_placement import RayVirtualCluster, ResourceInsufficientError
from fairlead_placement.testing import assert_no_leaks
from fairlead_sharding import NamedSharding
from fairlead_workergroup import (
    RayWorkerBuilder,
    RayWorkerGroup,
    Timeouts,
    WorkerFailureError,
    WorkerStartError,
    current_worker,
    report_progress,
)
from fairlead_workergroup.testing import kill

from ..faults import act_while_a_start_awaits


class Slow:
    """A constructor that takes its time, or fails, on some ranks."""

    def __init__(self, seconds=0.0, ranks=(), fail="", payload=None, folder=None, **more):
        rank = int(os.environ["RANK"])
        self.payload, self.more = payload, more
        if rank in ranks:
            if folder is not None:
                os.mkdir(f"{folder}/{rank}")
            time.sleep(seconds)
            if fail == "raise":
                raise FileNotFoundError(f"no checkpoint for {rank}")
        self.finished = time.time()

    def when(self):
        return self.finished

    def arguments(self):
        return self.payload, self.more

    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()


def answers(group, method, *args):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, *args))


def test_log(cluster, caplog):
    """A line of the log says how long the start took, which ends when the last constructor has ended."""
    caplog.set_level("INFO", "fairlead_workergroup")
    before = time.monotonic()
    with RayWorkerGroup(cluster, RayWorkerBuilder(Slow, seconds=1.0, ranks=(1,)), workers_per_node=2) as group:
        took, made = time.monotonic() - before, time.time()
        # The group's constructor returns when the last `__init__` has returned.
        assert max(answers(group, "when")) < made
        (seconds,) = re.findall(r"Started 2 worker\(s\) of 'Slow' in (\d+\.\d) s\.", caplog.text)
        assert 1.0 <= float(seconds) <= took + 0.1


class TestSignature:
    def test_default_prefix(self, cluster, caplog):
        """A group without `name_prefix` has its class's name in names, repr, attribute and log."""
        caplog.set_level("INFO", "fairlead_workergroup")
        with RayWorkerGroup(cluster, Slow, [1]) as group:
            assert group.name_prefix == "Slow"
            assert group.worker_metadata[0]["name"] == "Slow-0-0"
            assert repr(group) == "RayWorkerGroup('Slow', {'worker': 1}, 1 worker)"
            assert repr(group.at(worker=0)) == "GroupView('Slow', {'worker': 1}, ranks [0])"
            kill(group, 0)
            with pytest.raises(WorkerFailureError):
                group.call("when").result()
            assert group.restart_failed_workers() == [0]
        assert "Restarted rank(s) 0 of 'Slow'." in caplog.messages


class TestWaiting:
    @pytest.mark.smoke
    def test_first_failure(self, cluster):
        """The first constructor that raises ends the start; the error has rank, node, cause and other ranks."""
        axes = NamedSharding.from_shape(dp=2, tp=2)
        builder = RayWorkerBuilder(Slow, ranks=(3,), fail="raise", seconds=0.3)
        with pytest.raises(WorkerStartError) as caught, assert_no_leaks():
            RayWorkerGroup(cluster, builder, workers_per_node=4, sharding_annotations=axes)
        error = caught.value
        assert (error.rank, error.coords) == (3, {"dp": 1, "tp": 1})
        assert error.node_id == cluster.slots()[3].node_id
        assert "its constructor raised FileNotFoundError: no checkpoint for 3" in str(error)
        assert "in __init__" in error.remote_traceback
        assert error.others.startswith("of the others, ")
        with RayWorkerGroup(cluster, Slow, workers_per_node=4) as group:  # the slots are free again
            assert group.world_size == 4

    def test_deadline(self, cluster, clock, monkeypatch, tmp_path):
        """After `Timeouts.start_s` the error says where the slow ranks stand, and all workers are ended."""
        builder = RayWorkerBuilder(Slow, seconds=600, ranks=(0, 2), folder=str(tmp_path))

        def let_time_pass():
            if len(os.listdir(tmp_path)) == 2:
                clock.skip(300)

        act_while_a_start_awaits(monkeypatch, [0, 2], let_time_pass)
        where = r"(?s:.*), pid [1-9]\d*: at .*test_start.py:\d+ in __init__"
        with pytest.raises(
            WorkerStartError,
            match=rf"2 of 3 workers had not finished .* after 300 s(?s:.*)rank 0 {where}(?s:.*)rank 2 {where}",
        ):
            RayWorkerGroup(cluster, builder, workers_per_node=3, timeouts=Timeouts(start_s=300))

    def test_interrupt(self, cluster):
        """Ctrl-C during the start of a group leaves nothing behind."""
        timer = threading.Timer(1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt), assert_no_leaks():
            RayWorkerGroup(cluster, RayWorkerBuilder(Slow, seconds=60, ranks=(1,)), workers_per_node=2)
        timer.join()
        with RayWorkerGroup(cluster, Slow, workers_per_node=2) as group:
            assert group.world_size == 2


class TestArguments:
    def test_constructor_arguments(self, cluster, puts):
        """Large arguments are stored once for all workers, references are resolved, small arguments are sent."""
        payload, ref = b"x" * 1_000_000, ray.put("value")
        puts.clear()
        builder = RayWorkerBuilder(Slow, payload=payload, again=payload, ref=ref, small=3)
        with RayWorkerGroup(cluster, builder, workers_per_node=2) as group:
            assert len(puts) == 1
            assert answers(group, "arguments")[1] == (payload, {"again": payload, "ref": "value", "small": 3})

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (
                {"sharding_annotations": NamedSharding.from_shape(dp=4)},
                ValueError,
                r"has 4 rank.* the group has 8 worker",
            ),
            ({"sharding_annotations": NamedSharding.from_shape(dp=8, start=1)}, ValueError, "the ranks 0 to 7"),
            ({"sharding_annotations": [[0, 1]]}, TypeError, "must be a NamedSharding, got list"),
            ({"env_vars": {"MINE": 0}}, TypeError, "env_vars must map names to strings"),
            ({"async_communication": "atuo"}, ValueError, "must be True, False or .auto., got .atuo."),
            ({"workers_per_node": 9}, ValueError, "asks for 9 worker"),
        ],
    )
    def test_bad_arguments(self, cluster, arguments, error, message):
        """Bad arguments are refused before anything is launched: no actor was created, and the slots are free."""
        made = len(ray._private.state.actors())
        with pytest.raises(error, match=message):
            RayWorkerGroup(cluster, Slow, **arguments)
        assert len(ray._private.state.actors()) == made

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nowhere.to.Be", r"cannot import the module 'nowhere'\. Check the name"),
            ("collections.ordereddict", r"module 'collections' has no 'ordereddict'\. Did you mean 'OrderedDict'\?\n"),
            ("os.path.join", "a worker must be a class or its full name, got .*>\n"),
        ],
    )
    def test_unknown_class_name(self, cluster, name, message):
        """A name that does not exist in the workers' Python raises one clear error, with the remote traceback."""
        with pytest.raises(WorkerStartError, match=message) as caught:
            RayWorkerGroup(cluster, name)
        assert "describe" in caught.value.remote_traceback

    @pytest.mark.parametrize("by_name", [False, True])
    def test_module_of_the_driver_only(self, cluster, tmp_path, monkeypatch, by_name):
        """A class from a folder that only the driver imports from: the remedy in the error works as it is written."""
        (tmp_path / f"own_models_{by_name}.py").write_text("class Model:\n    def answer(self):\n        return 42\n")
        monkeypatch.syspath_prepend(tmp_path)
        model = importlib.import_module(f"own_models_{by_name}").Model
        worker = f"{model.__module__}.Model" if by_name else model
        with pytest.raises(WorkerStartError, match=f"cannot import the module {model.__module__!r}") as caught:
            RayWorkerGroup(cluster, worker, workers_per_node=1)
        option = re.search(r"env_vars=(\{.*?\})", str(caught.value))
        assert option is not None
        with RayWorkerGroup(cluster, worker, workers_per_node=1, env_vars=eval(option[1])) as group:
            assert answers(group, "answer") == [42]


class TestClasses:
    def test_local_class(self, cluster):
        """A class that workers cannot import is shipped by value, with the values it closes over."""
        answer = 42

        class Local:
            def answer(self):
                return answer

        with RayWorkerGroup(cluster, Local, workers_per_node=1) as group:
            assert answers(group, "answer") == [42]

    def test_several_threads(self, cluster):
        """Options that run methods on several threads are refused from every source before a worker starts."""

        class ByAttribute:
            _default_options: ClassVar = {"max_concurrency": 2}

        class ByConfiguration:
            @staticmethod
            def configure_worker():
                return {"max_concurrency": 2}, {}, {}

        before = len(ray._private.state.state.actor_table(None))
        for cls in (ray.remote(max_concurrency=2)(Slow), ByAttribute, ByConfiguration):
            with pytest.raises(ValueError, match=r"max_concurrency=2 would run .* async_communication=True"):
                RayWorkerGroup(cluster, cls)
        slot = cluster.slots()[0]
        with pytest.raises(ValueError, match="async_communication=True"):
            RayWorkerBuilder(Slow)(slot.placement_group, slot.bundle_index, 0, max_concurrency=2)
        assert len(ray._private.state.state.actor_table(None)) == before


class TestFacts:
    def test_current_worker(self, cluster):
        """Code in a worker asks for its rank and its mesh, and reports progress."""

        class Curious:
            def current(self):
                report_progress(step=1, message="asked")
                return current_worker()

        axes = NamedSharding.from_shape(dp=1, tp=2)
        with RayWorkerGroup(cluster, Curious, workers_per_node=2, sharding_annotations=axes) as group:
            current = group.call("current").result()[1]
        assert (current.rank, current.coords, current.sharding, current.incarnation) == (1, {"dp": 0, "tp": 1}, axes, 0)
        assert (current.world_size, current.communication_backend) == (2, "gloo")


class TestManyGroups:
    @pytest.mark.smoke
    def test_only_workers_and_one_agent(self, cluster):
        """8 workers are 8 actors, and one agent for the node."""
        with RayWorkerGroup(cluster, Slow):
            names = [row["ActorClassName"] for row in ray._private.state.actors().values() if row["State"] != "DEAD"]
            assert sorted(names) == ["NodeAgent"] + ["Slow"] * 8

    def test_no_room_for_a_group(self, cluster):
        """A slot without room refuses a second group at once; the error names the first group and the remedy."""
        with (
            RayWorkerGroup(cluster, Slow, workers_per_node=1, name_prefix="policy"),
            pytest.raises(
                ResourceInsufficientError, match=r"'Slow' cannot run .*'policy' is there.*enable_colocation=True"
            ),
        ):
            RayWorkerGroup(cluster, Slow, workers_per_node=2)
        with RayWorkerGroup(cluster, Slow, workers_per_node=1):
            pass

    @pytest.mark.smoke
    def test_colocated(self, local_ray):
        """Two groups share the slots of a cluster that was reserved for two, also on parts of a GPU."""
        with (
            RayVirtualCluster([2], enable_colocation=True) as cluster,
            RayWorkerGroup(cluster, Slow, name_prefix="policy") as policy,
            RayWorkerGroup(cluster, Slow, name_prefix="generation") as generation,
        ):
            seen = [ray.get([w.where.remote() for w in group.workers]) for group in (policy, generation)]
            assert len({pid for group in seen for pid, _ in group}) == 4
            with pytest.raises(ResourceInsufficientError, match=r"room for 2 .*'policy', 'generation' are there"):
                RayWorkerGroup(cluster, Slow)

    def test_group_made_from_slots(self, cluster):
        """A group runs on any sequence of slots; two groups run on disjoint slots."""
        slots = cluster.slots()
        with RayWorkerGroup(slots[:1], Slow) as some, RayWorkerGroup(slots[6:], Slow) as others:
            assert [worker["bundle_index"] for worker in some.worker_metadata] == [0]
            assert [worker["bundle_index"] for worker in others.worker_metadata] == [6, 7]
            assert [worker["global_rank"] for worker in others.worker_metadata] == [0, 1]
        assert (some.workers, some.worker_metadata) == ([], [])
