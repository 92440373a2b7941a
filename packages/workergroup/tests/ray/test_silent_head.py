# SPDX-License-Identifier: Apache-2.0
"""Ray's head (GCS) does not answer: every public method returns or raises in time, and the processes can be ended."""

import contextlib
import functools
import itertools
import os

import pytest
import ray

from fairlead_placement import HeadTimeoutError, RayVirtualCluster
from fairlead_workergroup import (
    Elastic,
    GroupHandle,
    GroupView,
    RayWorkerGroup,
    ResizeTimeoutError,
    Restart,
    Timeouts,
    WorkerFailureError,
    attach,
)
from fairlead_workergroup.testing import kill

from ..faults import (
    act_in_steps,
    find_running,
    head_is_silent,
    limit_requests_to_the_head,
    longest_shutdown,
)

# The limit of everything that has none of its own, and of everything that takes one.
LIMIT_S = 1.0
# The workers and the agents of their nodes answer, however slowly on a busy machine.
ANSWER_S = 60.0
# A value that is read without a request.
READ = object()


class Worker:
    def rank(self):
        return int(os.environ["RANK"])

    def echo(self, value):
        return value

    def pid(self):
        return os.getpid()


def run_classic(name, *args):
    return lambda group: group.get_all_worker_results(getattr(group, name)("echo", *args))


# How to use each public name of what makes calls, and what comes of it.
CALLS = {
    "at": (lambda group: group.at(worker=0).call("rank", timeout=ANSWER_S).result(), [0]),
    "call": (lambda group: group.call("rank", timeout=ANSWER_S).result(), [0, 1]),
    "map": (lambda group: sorted(group.map("echo", [1, 2, 3], timeout=ANSWER_S)), [1, 2, 3]),
    "sharding_annotations": READ,
    "with_options": (lambda group: group.with_options(timeout=ANSWER_S).call("rank").result(), [0, 1]),
}
VIEW = {
    **CALLS,
    "coords": READ,
    "explain": (lambda view: view.explain("rank"), READ),
    "ranks": READ,
    "workers": READ,
}
HANDLE = {
    **CALLS,
    "group_epoch": READ,
    "group_id": READ,
    "name": READ,
    "status": (lambda handle: [one.rank for one in handle.status()], [0, 1]),
}


def make_group_calls():
    states = ("idle", "busy")
    return {
        **CALLS,
        "detect_stuck_workers": (lambda group: group.detect_stuck_workers(), []),
        "dp_leader_worker_indices": READ,
        "dp_size": READ,
        "get_all_worker_results": (run_classic("run_all_workers_single_data", 1), [1, 1]),
        "get_dp_leader_worker_idx": (lambda group: group.get_dp_leader_worker_idx(1), 1),
        "get_resource_usage": (lambda group: [one.rank for one in group.get_resource_usage()], [0, 1]),
        # Other methods run at the same time.
        "get_worker_status": (lambda group: [one.state in states for one in group.get_worker_status()], [True, True]),
        "handle": (lambda group: group.handle().name, "calls"),
        "state": (lambda group: group.state().group_epoch, 0),
        "master_address": READ,
        "master_port": READ,
        "resize": (lambda group: group.resize(worker=3, timeout=LIMIT_S), (HeadTimeoutError, ResizeTimeoutError)),
        "restart": (lambda group: group.restart([0], timeout=LIMIT_S), (HeadTimeoutError, ResizeTimeoutError)),
        "restart_failed_workers": (lambda group: group.restart_failed_workers(), HeadTimeoutError),
        "run_all_workers_multiple_data": (run_classic("run_all_workers_multiple_data", [1, 2]), [1, 2]),
        "run_all_workers_sharded_data": (
            lambda group: group.run_all_workers_sharded_data(
                "echo", in_sharded_axes=["worker"], value=[1, 2]
            ).get_results(group),
            [1, 2],
        ),
        "run_all_workers_single_data": (run_classic("run_all_workers_single_data", 3), [3, 3]),
        "run_single_worker_single_data": (
            lambda group: ray.get(group.run_single_worker_single_data("rank", 1), timeout=60),
            1,
        ),
        "worker_metadata": READ,
        "workers": READ,
        "world_size": READ,
    }


# This ends a group, so that it has groups of its own.
ALONE = ("shutdown",)


def bind(uses, subject):
    """Return functions of no arguments, and what comes of them."""
    assert {name for name in dir(type(subject)) if not name.startswith("_")} == uses.keys()
    bound = {}
    for name, use in uses.items():
        function, expected = (lambda subject, name=name: getattr(subject, name), READ) if use is READ else use
        bound[f"{type(subject).__name__}.{name}"] = functools.partial(function, subject), expected
    return bound


def raises(expected):
    return isinstance(expected, (type, tuple))


def came_as(outcome, expected):
    if expected is READ:
        return not isinstance(outcome, BaseException)
    return isinstance(outcome, expected) if raises(expected) else outcome == expected


@contextlib.contextmanager
def impatience():
    """Give everything `LIMIT_S`. A head that answers may take longer on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        limit_requests_to_the_head(patch, LIMIT_S)
        yield


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
def test_every_public_method(monkeypatch, call_in_time, eventually, stop_process, caplog):
    """Every public method of a group, a view and a handle returns or raises in time.

    Calls work, because they go to the workers; so do looks at the workers of this machine.
    Changes raise an error with nothing changed. `shutdown` reports False, and the processes have ended.
    """
    head = ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
    with contextlib.ExitStack() as made:
        cluster = made.enter_context(RayVirtualCluster([8], use_gpus=False))
        slots = cluster.slots()

        def make(count, name, at):
            group = RayWorkerGroup(slots[at : at + count], Worker, name_prefix=name)
            made.callback(group.shutdown, force=True)
            return group

        group, alone, forced, cleaned = make(2, "calls", 0), *(make(1, f"alone{at}", at) for at in (3, 4, 5))
        handle, fresh = group.handle(), group.handle()
        handle.call("rank").result()
        pids = [pid for one in (alone, forced, cleaned) for pid in one.call("pid").result()]
        uses = {
            **bind({**make_group_calls(), **dict.fromkeys(ALONE, READ)}, group),
            **bind(HANDLE, handle),
            **bind(VIEW, group.at(worker=slice(0, 2))),
            "attach": (lambda: attach("calls"), HeadTimeoutError),
            "fresh handle": (lambda: fresh.call("rank"), HeadTimeoutError),
            "constructor": (
                lambda: RayWorkerGroup(slots[6:7], Worker, timeouts=Timeouts(start_s=LIMIT_S)),
                HeadTimeoutError,
            ),
        }
        assert isinstance(handle, GroupHandle)
        assert isinstance(group.at(worker=0), GroupView)
        with impatience(), stop_process(head):
            answered = {name for name, (_, expected) in uses.items() if not raises(expected)}
            functions = {name: function for name, (function, _) in uses.items()}
            outcomes = call_in_time({name: functions[name] for name in functions.keys() - answered}, LIMIT_S)
            outcomes |= call_in_time({name: functions[name] for name in answered}, ANSWER_S)
            assert {name: one for name, one in outcomes.items() if not came_as(one, uses[name][1])} == {}
            ends = call_in_time(
                {
                    "timeout": lambda: alone.shutdown(timeout=LIMIT_S),
                    "force": lambda: forced.shutdown(force=True, timeout=LIMIT_S),
                    "cleanup": lambda: cleaned.shutdown("pid", timeout=LIMIT_S),
                },
                longest_shutdown(LIMIT_S),
            )
            assert ends == {"timeout": False, "force": False, "cleanup": False}
            # A busy machine is late with its answer, and not with the signals.
            assert eventually(lambda: find_running(pids) == [])
            assert "1 worker(s) whose end Ray's head has not confirmed, because it does not answer" in caplog.text
            # What this process sees itself needs neither the head nor the raylet.
            states = call_in_time({"states": lambda: [one.state for one in group.get_worker_status()]}, ANSWER_S)
            assert states == {"states": ["idle"] * 2}
        monkeypatch.undo()
        assert eventually(lambda: not head_is_silent())
        assert group.state().group_epoch == 0
        assert group.resize(worker=3, slots=slots[2:3], timeout=60) == 1
        assert group.call("rank").result() == [0, 1, 2]


# The head's deadline in the next test, and the time that the slowest call may take on a busy machine.
DEADLINE_S, CALL_S = 120.0, 60.0


# What a change may take. On a busy machine, what is left of one without a head takes some seconds.
CHANGE_S = 20.0
CHANGES = {
    "restart": lambda group: group.restart_failed_workers(),
    "resize": lambda group: group.resize(worker=5 - group.world_size, timeout=CHANGE_S),
    "move": lambda group: group.restart([1], elsewhere=True, timeout=CHANGE_S),
}
# What comes of each change if the head stops answering as a step begins, and the ranks that are lost by it.
OUTCOMES = {
    "plan": dict.fromkeys(CHANGES, (HeadTimeoutError, [])),
    "quiesce": {
        "restart": (HeadTimeoutError, []),
        "resize": (int, []),
        "move": (HeadTimeoutError, []),
    },
    # The old processes end, and Ray starts no others.
    "end, construct": {
        "restart": (WorkerFailureError, []),
        "resize": (int, []),
        "move": (WorkerFailureError, [1]),
    },
    "deliver": {"restart": (list, []), "resize": (int, []), "move": (list, [])},
}


@pytest.mark.nightly
@pytest.mark.usefixtures("local_ray")
def test_every_step_of_a_change(monkeypatch, call_in_time, eventually, stop_process):
    """If the head stops answering in any step of a change, the change needs no head, or raises in time.

    A change that has raised has lost a rank only if it had ended its process. Once the head answers, the group can be
    repaired, used and shut down.
    """
    head = ray._private.worker._global_node.all_processes["gcs_server"][0].process.pid
    stopped = contextlib.ExitStack()
    with (
        RayVirtualCluster([4], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Worker, 2, restart=Restart(method="rank", max_restarts=100), elastic=Elastic(on_resize="rank")
        ) as group,
        stopped,
    ):
        for step, name in itertools.product(OUTCOMES, CHANGES):
            expected, lost = OUTCOMES[step][name]

            def stop_head(entered, step=step):
                if entered == step:
                    stopped.enter_context(stop_process(head))

            if name == "restart":
                kill(group, 1)
            with monkeypatch.context() as patch, impatience():
                act_in_steps(patch, stop_head)
                outcome = call_in_time({name: functools.partial(CHANGES[name], group)}, CHANGE_S)[name]
            stopped.close()
            assert isinstance(outcome, expected), (step, name, outcome)
            assert eventually(lambda: not head_is_silent())
            if name == "restart" and expected is not list:
                lost = [1]
            assert group.restart_failed_workers() == lost, (step, name)
            assert group.call("rank", timeout=ANSWER_S).result() == list(range(group.world_size))
        assert group.shutdown()
