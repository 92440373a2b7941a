# SPDX-License-Identifier: Apache-2.0
"""Faults of earlier verdicts about real jobs, as pretended snapshots: false all-clears, wrong blames, wrong names."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from seen import (
    ALL_REDUCE,
    BARRIER,
    GET,
    IDLE,
    JOB,
    JOIN,
    LOOP,
    NOW,
    QUEUE,
    RAY,
    SITE,
    actor,
    actor_id,
    environ,
    look,
    process,
    ranks_of,
    ref,
    run,
    task,
)

from fairlead_inspect import diagnose, exit_status
from fairlead_inspect._node.look import look as look_at_node
from fairlead_inspect.model import Call, Child, Death, Frame, Node, Thread

BACKWARD = (Frame(SITE + "torch/autograd/graph.py", "_engine_run_backward", 1), Frame("/w/step.py", "train", 43))
REPORT = (
    GET[0],
    Frame(SITE + "ray/train/v2/_internal/execution/context.py", "TrainContext._sync_checkpoint_dir_name", 254),
    Frame("/w/step.py", "train", 44),
)
CHANNEL = (Frame(SITE + "ray/experimental/channel/shared_memory_channel.py", "Channel.read", 400),)
EVENT, TIMER = "an event", "an event or a timer"
# An event loop without a frame of a coroutine.
EVENTS = (Frame("/py/lib/python3.11/asyncio/base_events.py", "BaseEventLoop._run_once", 1884),)
SPINS = {"ticks": 100, "switches": 5, "states": ("R", "R"), "age": 0.0}


def spinning(stacks, *, inside=(), others=()):
    """Return ranks that spin where NCCL waits, except for those of `others`."""
    how = {rank: {**SPINS, "before": stack, "inside": rank in inside} for rank, stack in enumerate(stacks)}
    return ranks_of(stacks, how={rank: one for rank, one in how.items() if rank not in others})


def verdict(snapshot):
    found = diagnose(snapshot)
    return exit_status(found), [(one.kind, one.ranks) for one in found if one.blames], found


def suspects(found):
    return [one.pid for finding in found for one in finding.suspects]


def test_ranks_that_spin():
    """Ranks that wait for a late one under NCCL use a core each: the one that stands elsewhere is to blame."""
    assert verdict(spinning([BARRIER, BARRIER, BARRIER, QUEUE], others=[3]))[:2] == (1, [("late", (3,))])
    item = (Frame("/w/step.py", "train", 42),)
    assert verdict(spinning([item, item, item, QUEUE], inside=(0, 1, 2), others=[3]))[:2] == (1, [("late", (3,))])
    assert verdict(spinning([BACKWARD, BACKWARD, BACKWARD, QUEUE], others=[3]))[:2] == (1, [("late", (3,))])


def polling(*, age, moves):
    """Return a job of which ranks 0 to 2 poll an actor, and rank 3 reads from a socket since `age` seconds."""
    nap, read = (Frame("/w/step.py", "meet", 20),), (Frame("/w/loader.py", "read", 44),)
    polls = {"ticks": 1, "switches": 100, "before": (Frame("/w/step.py", "meet", 18),) if moves else nap, "age": 0.01}
    how = {**dict.fromkeys(range(3), polls), 3: {"age": age}}
    return ranks_of([nap, nap, nap, read], how=how)


def test_a_rank_that_stands_among_ranks_that_poll():
    """The rank that does not move comes first; the age of one that polls is that of its call, which is said."""
    status, blamed, (found,) = verdict(polling(age=100.0, moves=False))
    assert (status, blamed, suspects([found])[0]) == (4, [], 1003)
    printed = run(polling(age=100.0, moves=False), "why")[1]
    assert "Worker rank 3 on 10.0.0.1, pid 1003, for 1m 40s" in printed
    assert "Worker rank 0 on 10.0.0.1, pid 1000, in its call for 3m 20s" in printed


def test_a_rank_that_stands_for_less_than_after():
    """If the others make progress, the rank that may be late soon is named, and since when."""
    status, blamed, found = verdict(polling(age=40.0, moves=True))
    assert (status, blamed) == (0, [])
    assert {(one.pid, one.limit_s, one.since_s) for one in found} == {(1000, None, None), (1003, 60.0, 40.0)}
    assert [one.pid for one in verdict(polling(age=4.0, moves=True))[2]] == [1000]


def test_a_rank_that_stands_beside_a_suspect():
    """If only one that polls is a suspect, because its call is older, the one that stands is named beside it."""
    status, blamed, found = verdict(polling(age=58.0, moves=False))
    assert (status, blamed) == (4, [])
    assert [(one.pid, one.since_s, one.limit_s) for one in found if one.kind == "working"] == [(1003, 58.0, 60.0)]


def test_a_poll_at_two_lines():
    """Who was seen at two lines of one function may poll for ever, and comes after the one that did not run at all."""
    job = polling(age=100.0, moves=True)
    status, blamed, found = verdict(replace(job, actors=job.actors[2:], calls=job.calls[2:]))
    assert (status, blamed, suspects(found)) == (4, [], [1003, 1002])
    (_, poll) = found[0].suspects
    assert poll.text == "has not left one function since its call began: endless or slow"


@pytest.mark.parametrize(("began", "status"), [(50.0, 0), (90.0, 4)])
def test_an_idle_actor_that_is_polled(began, status):
    """An actor that has just answered is no suspect, unless who polls it has done so for as long as `--after`."""
    calls = [Call(task(actor_id(at), at + 1), "f", actor_id(at), "RUNNING", NOW - (began, 2)[at]) for at in (0, 1)]
    polls = process(1000, GET, refs=[ref(actor_id(1), 2)], age=0.01)
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True)
    snapshot = look([actor(0), actor(1)], [driver, polls, process(1001, IDLE)], calls=tuple(calls))
    assert verdict(snapshot)[:2] == (status, [])
    # A driver that polls has no call, and may have done so for long.
    driver = process(811, GET, refs=[ref(actor_id(1), 2)], driver=True)
    assert verdict(look([actor(1)], [driver, process(1001, IDLE)], calls=tuple(calls[1:])))[:2] == (4, [])


def test_a_driver_that_polls():
    """Calls that have just begun prove nothing if the driver makes one after the other: a thread of the actor hangs."""
    idle = process(1000, IDLE)
    hangs = replace(process(1000, QUEUE, age=500.0).threads[0], tid=9, stack=QUEUE)
    worker = replace(idle, title="ray::Worker.done", threads=(*idle.threads, hangs))
    calls = (Call(task(actor_id(0), 2), "done", actor_id(0), "RUNNING", NOW - 0.05),)
    driver = process(811, GET, refs=[ref(actor_id(0), 2)], driver=True)
    assert verdict(look([actor(0)], [driver, worker], calls=calls))[:2] == (4, [])


def test_ranks_that_have_waited_for_an_unknown_time():
    """Ranks that spin in a collective, without a call that Ray lists, may have waited long for those elsewhere."""
    how = {number: {**SPINS, "before": stack} for number, stack in enumerate((BARRIER, BARRIER, LOOP))}
    job = ranks_of([BARRIER, BARRIER, LOOP, QUEUE], how={**how, 3: {"age": None}}, driver_waits=False)
    ranks = tuple(one for one in job.processes if one.pid != 811)
    assert verdict(replace(job, calls=(), partial=True, processes=ranks))[:2] == (4, [])


def test_the_one_that_stands_apart():
    """Among suspects, a place where one stands comes before a place where many do."""
    job = ranks_of([QUEUE] * 6 + [LOOP], how={6: {**SPINS, "before": LOOP}})
    assert suspects(verdict(job)[2])[0] == 1006


@pytest.mark.parametrize(("began", "status"), [(50.0, 0), (90.0, 4)])
def test_objects_that_cannot_be_read(began, status):
    """Who has just begun a call is no suspect because it waits for objects whose ids cannot be read."""
    calls = (Call(task(actor_id(0)), "f", actor_id(0), "RUNNING", NOW - began),)
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True)
    assert verdict(look([actor(0)], [driver, process(1000, GET, age=0.01)], calls=calls))[0] == status
    moves = process(1000, GET, age=0.01, before=QUEUE, ticks=3, switches=9)
    assert verdict(look([actor(0)], [driver, moves], calls=calls))[0] == 0


def test_a_call_that_computes():
    """One that computes is too early until its call is as old as `--after`, and then stands with its CPU."""
    spins = {"ticks": 57, "switches": 40, "before": LOOP, "states": ("R", "R"), "age": 0.0}
    job = ranks_of([LOOP], how={0: spins})
    young = replace(job, calls=tuple(replace(one, began=NOW - 53) for one in job.calls))
    status, _, (found,) = verdict(young)
    assert (status, found.since_s, found.remedy) == (0, 53.0, "run `why` again in 7 s")
    assert "its call has not moved, it uses 57 % of a core" in run(job, "why")[1]


@pytest.mark.parametrize(("ages", "status", "seen"), [((30.0, 20.0), 0, []), ((90.0, 80.0), 4, [1000, 1001])])
def test_two_at_different_lines(ages, status, seen):
    """Two that a driver waits for have stood at different lines: for less than `--after`, or for longer."""
    how = {number: {"age": age} for number, age in enumerate(ages)}
    read = (Frame("/w/loader.py", "read", 44),)
    assert verdict(ranks_of([QUEUE, read], how=how))[:2] == (status, [])
    assert suspects(verdict(ranks_of([QUEUE, read], how=how))[2]) == seen


def test_all_ranks_spin():
    """If all ranks spin in one collective, none is blamed, the status is 4, and the finding says what to read next."""
    status, blamed, (found,) = verdict(spinning([BARRIER] * 4))
    assert (status, blamed, found.kind) == (4, [], "together")
    assert "TORCH_FR_DUMP_TEMP_FILE" in found.remedy
    # Training goes on: they have been in this call for a moment only.
    moment = spinning([BARRIER] * 4)
    calls = tuple(replace(one, began=NOW - 3) for one in moment.calls)
    assert verdict(replace(moment, calls=calls))[:2] == (0, [])


def test_checkpoint_on_a_dead_disk():
    """A rank that writes its shard of a distributed checkpoint is in no collective, in spite of its folder's name."""
    folder = SITE + "torch/distributed/checkpoint/"
    write = (Frame(folder + "filesystem.py", "write_data", 600), Frame("/w/step.py", "checkpoint", 80))
    gather = (ALL_REDUCE[0], Frame(folder + "utils.py", "gather_object", 150), Frame("/w/step.py", "checkpoint", 80))
    snapshot = ranks_of([gather, gather, gather, write], how={3: {"states": ("D", "D"), "age": 300.0}})
    assert verdict(snapshot)[:2] == (1, [("disk", (3,))])


def test_one_machine_of_two():
    """Ranks that another machine may have are not called missing by a look at this one, which says what it lacks."""
    snapshot = ranks_of([JOIN] * 3, driver_waits=False)
    fewer = [
        replace(one, environ=environ(int(one.environ["RANK"]), 8)) if one.environ else one for one in snapshot.processes
    ]
    here = replace(snapshot, processes=tuple(fewer), partial=True)
    assert verdict(here)[1] == []
    assert verdict(replace(here, partial=False))[1] == [("missing", (3, 4, 5, 6, 7))]


def test_a_rank_that_serves():
    """A rank that waits for requests is not blamed for ranks that hang in a collective of their own."""
    receive = (Frame(SITE + "zmq/sugar/socket.py", "Socket.recv", 900), Frame("/w/generator.py", "serve", 33))
    status, blamed, found = verdict(ranks_of([ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, receive]))
    assert (status, blamed, suspects(found)) == (4, [], [1003])


def test_a_rank_that_waits_for_a_peer_outside():
    """A rank that reads from a network is named, and the blame is likely only: the peer may be at fault."""
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE[2:]])
    network = [
        replace(one, threads=(replace(one.threads[0], waits_on="10.0.0.9:443"),)) if one.pid == 1002 else one
        for one in snapshot.processes
    ]
    (found,) = diagnose(replace(snapshot, processes=tuple(network)))
    assert (found.ranks, found.rank_confidence, found.confidence) == ((2,), "certain", "likely")
    assert "it waits for 10.0.0.9:443" in found.text


def test_two_experiments():
    """Two groups whose actors are called exp-0-0 to exp-1-1 are two sets, which do not wait for each other."""
    actors = [actor(at, name=f"exp-{at // 2}-{at % 2}") for at in range(4)]
    processes = [process(1000 + at, ALL_REDUCE if at < 2 else QUEUE) for at in range(4)]
    assert verdict(look(actors, processes))[1] == []


@pytest.mark.parametrize("checkout", ["/home/me/torch/train.py", "/workspace/vllm/examples/rlhf.py"])
def test_checkout_with_the_name_of_a_library(checkout):
    """Code of the job in a folder called torch or vllm is code of the job."""
    own = (QUEUE[0], QUEUE[1], Frame(checkout, "next_batch", 5))
    assert verdict(ranks_of([ALL_REDUCE, ALL_REDUCE, own]))[:2] == (1, [("late", (2,))])


def test_compiled_graph():
    """An actor of a compiled graph that waits for its peers is not code of the job; the one that stands in it is."""
    channel = (
        Frame(SITE + "ray/experimental/channel/shared_memory_channel.py", "Channel.read", 400),
        Frame(SITE + "ray/dag/compiled_dag_node.py", "do_exec_tasks", 150),
    )
    snapshot = ranks_of([channel, channel, QUEUE], driver_waits=False)
    plain = tuple(replace(one, environ={}) for one in snapshot.processes if one.pid != 811)
    driver = process(811, (channel[0], Frame("/w/main.py", "main", 5)), driver=True)
    actors = tuple(replace(one, class_name=f"Stage{at}") for at, one in enumerate(snapshot.actors))
    status, _, (found,) = verdict(replace(snapshot, actors=actors, processes=(*plain, driver)))
    assert (status, found.kind, found.pid, found.confidence) == (1, "late", 1002, "likely")


@pytest.mark.parametrize(("launches", "status"), [(0, 1), (2, 0)])
def test_autoscaler(launches, status):
    """An actor that no node can hold is pending for ever, unless an autoscaler starts nodes."""
    waiting = actor(5, "Trainer", state="PENDING_CREATION", pid=0, resources={"GPU": 8.0}, created=NOW - 61)
    driver = process(811, GET, refs=[ref(waiting.actor_id)], driver=True)
    snapshot = look([waiting], [driver], nodes=(Node("n1", "10.0.0.1", resources={"CPU": 8.0}),), launches=launches)
    (found,) = diagnose(snapshot)
    assert (found.kind, exit_status([found])) == ("pending", status)
    assert "it requests 8 GPU; no node has any GPU" in found.text
    assert found.confidence == ("likely" if launches else "certain")


def test_runtime_environment():
    """A task whose runtime environment is installed, and for which there is room, is not called short of resources."""
    pending = Call(
        task("0" * 24 + JOB),
        "score",
        "",
        "PENDING_NODE_ASSIGNMENT",
        NOW - 75,
        environment=("pip",),
        resources={"CPU": 1.0},
    )
    driver = process(811, GET, refs=[(pending.task_id + "00000001", False)], driver=True)
    (found,) = diagnose(look([], [driver], calls=(pending,), nodes=(Node("n1", "h", resources={"CPU": 8.0}),)))
    assert (found.kind, found.blames, exit_status([found])) == ("pending", False, 4)
    assert "Ray may still be installing its runtime environment (pip)" in found.text


def test_arguments_of_a_task():
    """A task that waits for its arguments leads to the task that makes them."""
    calls = (
        Call(f"{1:048x}"[8:] + JOB, "reduce", "", "PENDING_ARGS_AVAIL", NOW - 100, parent="f" * 40 + JOB),
        Call(f"{2:048x}"[8:] + JOB, "load", "", "RUNNING", NOW - 100, 4242, "n1", parent="f" * 40 + JOB),
    )
    driver = process(811, GET, refs=[(calls[0].task_id + "00000001", False)], driver=True)
    (found,) = diagnose(look([], [driver, process(4242, QUEUE, title="ray::load")], calls=calls))
    assert (found.kind, found.task, found.pid, found.blames) == ("late", "load", 4242, True)
    assert found.chain == ("driver", "task reduce", "task load")


def test_driver_with_a_pool_of_threads():
    """A thread of a driver waits for an actor, while the main thread waits for the thread."""
    driver = process(811, QUEUE, driver=True)
    thread = replace(process(9811, GET, refs=[ref(actor_id(0))]).threads[0], tid=9811)
    snapshot = look([actor(0, "Sandbox")], [replace(driver, threads=(*driver.threads, thread)), process(1000, QUEUE)])
    (found,) = diagnose(snapshot)
    assert (found.kind, [one.class_name for one in found.actors], found.blames) == ("late", ["Sandbox"], True)


def test_two_tasks_at_fault():
    """A task that no node can hold does not explain another one, which has hung, and is waited for elsewhere."""
    pending = Call(f"{1:048x}"[8:] + JOB, "score", "", "PENDING_NODE_ASSIGNMENT", NOW - 100, resources={"GPU": 8.0})
    hung = Call(f"{2:048x}"[8:] + JOB, "load", "", "RUNNING", NOW - 100, 4242, "n1", parent="f" * 40 + JOB)
    driver = process(811, GET, refs=[(pending.task_id + "00000001", False)], driver=True)
    thread = replace(process(9811, GET, refs=[(hung.task_id + "00000001", False)]).threads[0], tid=9811)
    processes = [replace(driver, threads=(*driver.threads, thread)), process(4242, QUEUE, title="ray::load")]
    nodes = (Node("n1", "10.0.0.1", resources={"CPU": 8.0}),)
    found = diagnose(look([], processes, calls=(pending, hung), nodes=nodes))
    assert {(one.kind, one.task) for one in found if one.blames} == {("pending", "score"), ("late", "load")}


def test_equal_process_ids():
    """Processes of several pods with one process id are told apart by their nodes."""
    names, driver = ("n1", "n2", "n3"), process(811, GET, driver=True)
    calls = tuple(
        Call(f"{at:048x}"[8:] + JOB, "load", "", "RUNNING", NOW - 100, 7, name, "f" * 40 + JOB)
        for at, name in enumerate(names)
    )
    threads = [
        process(9000 + at, GET, refs=[(one.task_id + "00000001", False)]).threads[0] for at, one in enumerate(calls)
    ]
    loads = [replace(process(7, QUEUE, title="ray::load"), node_id=name) for name in names]
    loads[0] = replace(process(7, QUEUE, title="ray::load", state="T"), node_id="n1")
    nodes = tuple(Node(name, name) for name in names)
    found = diagnose(look([], [replace(driver, threads=(*driver.threads, *threads)), *loads], calls=calls, nodes=nodes))
    assert {(one.kind, one.node) for one in found if one.blames} == {("stopped", "n1"), ("late", "n2"), ("late", "n3")}


def test_killed_peer_of_an_asynchronous_barrier():
    """An actor that was killed is named, if its peers have stood in their calls since then, whatever they wait in."""
    barrier = actor(9, "Barrier")
    workers = [actor(at) for at in range(3)]
    dead = replace(workers[2], state="DEAD", pid=0, death=Death("killed by signal 9", False, NOW - 90))
    processes = [process(1000 + at, GET, refs=[ref(barrier.actor_id, at + 1)]) for at in range(2)]
    waits = replace(process(1009, IDLE), title="ray::Barrier.wait")
    driver = process(811, GET, refs=[ref(one.actor_id) for one in workers], driver=True)
    calls = [Call(task(one.actor_id), "step", one.actor_id, "RUNNING", NOW - 95, one.pid) for one in workers[:2]]
    calls += [Call(task(barrier.actor_id, at + 1), "wait", barrier.actor_id, "RUNNING", NOW - 94) for at in range(2)]
    status, _, found = verdict(look([*workers[:2], dead, barrier], [*processes, waits, driver], calls=tuple(calls)))
    assert (status, found[0].kind, found[0].actors[0].id) == (1, "dead", dead.actor_id)


def test_all_who_wait_are_counted():
    """Those that wait for one process are counted together, whether they wait directly or not."""
    a, b, c = (actor(number, name) for number, name in enumerate(("A", "B", "C")))
    chain = [process(1000, GET, refs=[ref(c.actor_id)]), process(1001, GET, refs=[ref(c.actor_id, 2)])]
    driver = process(811, GET, refs=[ref(a.actor_id), ref(b.actor_id)], driver=True)
    calls = tuple(Call(task(one.actor_id), "x", one.actor_id, "RUNNING", NOW - 99) for one in (a, b))
    calls += tuple(Call(task(c.actor_id, number), "x", c.actor_id, "RUNNING", NOW - 99) for number in (1, 2))
    (found,) = diagnose(look([a, b, c], [driver, *chain, process(1002, QUEUE)], calls=calls))
    assert ([one.class_name for one in found.actors], found.waiting.count) == (["C"], 2)


def test_child_that_holds_up_its_rank():
    """A rank that waits for its data loader is named with the child that stands."""
    loads = (QUEUE[0], Frame(SITE + "torch/utils/data/dataloader.py", "_try_get_data", 1), *QUEUE[2:])
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, loads])
    stack = (Frame("/w/data.py", "__getitem__", 16), Frame("/w/data.py", "<module>", 1))
    child = Child(7, "python", ("S", "S"), 0, stack, "a pipe")
    held = [replace(one, children=(child,)) if one.pid == 1002 else one for one in snapshot.processes]
    (found,) = diagnose(replace(snapshot, processes=tuple(held)))
    assert found.text.endswith("its child process 7 stands in data.py:16 __getitem__ and waits for a pipe")


def test_controllers_of_libraries_are_no_suspects():
    """A controller of Ray Train that polls in a call of its own is never named."""
    controller = actor(0, "TrainController", module="ray.train.v2._internal.execution.controller.controller")
    calls = (Call(task(controller.actor_id), "run", controller.actor_id, "RUNNING", NOW - 500),)
    driver = process(811, GET, refs=[ref(controller.actor_id)], driver=True)
    worker = actor(1, "RayTrainWorker", owner=controller.worker_id, module="ray.train.v2._internal")
    hung = process(1001, QUEUE)
    status, _, found = verdict(look([controller, worker], [driver, process(1000, LOOP), hung], calls=calls))
    assert (status, [one.class_name for one in found[0].actors]) == (1, ["RayTrainWorker"])
    assert 1000 not in suspects(found)


def test_call_of_itself():
    """An actor that waits for a call of itself, which cannot begin, is in a deadlock with itself."""
    own = (Call(task(actor_id(0), 2), "score", actor_id(0), "SUBMITTED_TO_WORKER", NOW - 90),)
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True)
    calls = (Call(task(actor_id(0)), "run", actor_id(0), "RUNNING", NOW - 90), *own)
    (found,) = diagnose(look([actor(0)], [driver, process(1000, GET, refs=[ref(actor_id(0), 2)])], calls=calls))
    assert (found.kind, found.blames, found.pid) == ("deadlock", True, 1000)
    assert found.text == "waits for a call of itself, which cannot begin before this one is over"


def test_deadlock_with_ranks_that_spin():
    """A rank that spins in a barrier, and one that waits for its next call, wait for each other."""
    calls = (Call(task(actor_id(0), 2), "x", actor_id(0), "SUBMITTED_TO_WORKER", NOW - 90),)
    how = {0: {**SPINS, "before": BARRIER}, 1: {"refs": [ref(actor_id(0), 2)]}}
    snapshot = ranks_of([BARRIER, GET], how=how)
    status, _, (found,) = verdict(replace(snapshot, calls=(*snapshot.calls, *calls)))
    assert (status, found.kind, found.blames) == (1, "deadlock", True)
    status, blamed, _ = verdict(replace(snapshot, calls=()))
    assert (status, blamed) == (4, [])


def test_queue_of_a_library():
    """Who waits for a queue of Ray that nobody fills is a suspect, and neither the queue nor the driver is."""
    queue = actor(0, "_QueueActor", module="ray.util.queue")
    calls = (Call(task(queue.actor_id), "put", queue.actor_id, "RUNNING", NOW - 90),)
    driver = process(811, GET, refs=[ref(actor_id(1))], driver=True)
    waits = process(1001, GET, refs=[ref(queue.actor_id)])
    serves = replace(process(1000, IDLE), title="ray::_QueueActor.put")
    status, blamed, found = verdict(look([queue, actor(1, "Producer")], [driver, waits, serves], calls=calls))
    assert (status, blamed, suspects(found)) == (4, [], [1001])


def train_job(stacks, *, resource="CPU", others=(), **how):
    """Return a job of Ray Train whose ranks stand at some stacks; those in its report wait for the barrier of all."""
    train, run = "ray.train.v2._internal.execution.", actor_id(9)
    controller = actor(9, "TrainController", module=train + "controller.controller")
    barrier = actor(8, "SynchronizationActor", module=train + "checkpoint.sync_actor", owner=controller.worker_id)
    ranks = [actor(at, "RayTrainWorker", module=train + "worker", owner="w9") for at in range(len(stacks))]
    refs = {at: [ref(barrier.actor_id, at + 1)] for at, stack in enumerate(stacks) if stack is REPORT}
    processes = [process(1000 + at, stack, refs=refs.get(at, ()), **how) for at, stack in enumerate(stacks)]
    processes += [process(811, GET, refs=[ref(run)], driver=True), *others]
    processes += [replace(process(pid, IDLE), title=f"ray::A.{name}") for pid, name in ((1008, "wait"), (1009, "run"))]
    calls = [Call(task(barrier.actor_id, at + 1), "wait", barrier.actor_id, "RUNNING", NOW - 90) for at in refs]
    calls.append(Call(task(run), "run", run, "RUNNING", NOW - 900))
    more = [actor(one.pid - 1000, "Engine") for one in others]
    return look(
        [*ranks, controller, barrier, *more],
        processes,
        calls=tuple(calls),
        nodes=(Node("n1", "h", resources={resource: 1.0}),),
    )


def test_rank_in_a_collective_that_others_have_left():
    """One rank computes gradients, and all others report, for which they need it: they wait for each other."""
    two = verdict(train_job([BACKWARD, REPORT]))
    assert (two[0], two[2][0].kind, [one.id for one in two[2][0].actors]) == (1, "deadlock", [actor_id(1), actor_id(0)])
    assert "#1 in ray.train.report, which needs all ranks, and RayTrainWorker #0 in _engine" in two[2][0].text
    assert verdict(train_job([REPORT, REPORT, ALL_REDUCE]))[2][0].pid == 1002
    # These may be right: of two in a collective, one may be late there; code and a device may be slow.
    engine = process(1005, ALL_REDUCE)
    for well in (
        train_job([BACKWARD, BACKWARD, REPORT]),
        train_job([QUEUE[2:], REPORT], ticks=1, before=QUEUE[2:], switches=4),
        train_job([BACKWARD, REPORT], resource="GPU"),
        train_job([BACKWARD, REPORT], age=5.0),
        train_job([ALL_REDUCE, REPORT], others=[engine]),
    ):
        assert [one for one in diagnose(well) if one.kind == "deadlock"] == []


def test_ranks_without_calls_in_one_collective():
    """Ranks of Ray Train, of whose calls Ray lists none, are no all-clear if all of them spin in one collective."""
    for how in ({**SPINS, "before": ALL_REDUCE}, {"ticks": 1, "switches": 3, "age": 0.1, "before": ALL_REDUCE}):
        status, _, (found,) = verdict(train_job([ALL_REDUCE] * 3, **how))
        assert (status, found.kind) == (4, "together")
    assert verdict(train_job([ALL_REDUCE] * 3, age=5.0))[0] == 0
    assert verdict(train_job([ALL_REDUCE] * 3, ticks=9, switches=3, age=0.0, before=BARRIER))[0] == 0


def test_forgotten_breakpoint():
    """Who waits at a breakpoint for a debugger that nobody attaches is named, and is no server."""
    listens = (
        Frame("/py/lib/python3.11/socket.py", "socket.accept", 294),
        Frame(SITE + "ray/util/rpdb.py", "_RemotePdb.listen", 126),
        Frame(SITE + "ray/util/rpdb.py", "set_trace", 305),
        Frame("/w/data.py", "check", 22),
    )
    (found,) = diagnose(ranks_of([ALL_REDUCE, ALL_REDUCE, listens]))
    assert (found.kind, found.ranks, found.blames) == ("late", (2,), True)
    assert "it stands at a breakpoint, to which no debugger is attached" in found.text


def coroutines(waits_on=EVENT, age=90.0, *, beside=(), driver=GET, jobs=1):
    """Return a job whose driver waits for two calls of an actor with an event loop."""
    service, calls = actor(0, "Lock"), [Call(task(actor_id(0), at), "acquire", actor_id(0), "RUNNING") for at in (1, 2)]
    loop = Thread(5, "AsyncIO Thread: default", RAY[:0], None, ("S", "S"), 0, 0, age, waits_on=waits_on)
    idle = process(1000, IDLE)
    served = replace(idle, title="ray::Lock.acquire", threads=(*idle.threads, loop, *beside))
    refs = [ref(actor_id(0), at) for at in (1, 2)] if driver is GET else []
    waits = process(811, driver, refs=refs, driver=True)
    peer = replace(served, pid=1001, title="ray::Lock")
    snapshot = look(
        [service, actor(1, "Lock")], [served, peer, waits], calls=tuple(replace(call, began=NOW - 90) for call in calls)
    )
    return replace(snapshot, jobs=(*snapshot.jobs, *[replace(snapshot.jobs[0], job_id="02000000")] * (jobs - 1)))


def test_a_call_in_a_coroutine():
    """It has no line, and so its method is named; a young one is too early."""
    shown = run(coroutines(TIMER), "why")[1]
    assert "Lock #0 on 10.0.0.1, pid 1000, in its call for 1m 30s: no stack (" in shown
    assert "of it may wait, in Lock.acquire)" in shown
    job = coroutines()
    young = replace(job, calls=tuple(replace(one, began=NOW - 15) for one in job.calls))
    assert verdict(young)[:2] == (0, [])


def test_coroutines_that_nothing_wakes_up():
    """An actor whose event loop rests without a timer is named if all wait for it; with one it may sleep on purpose."""
    status, blamed, found = verdict(coroutines())
    assert (status, [one for one, _ in blamed], found[0].pid) == (1, ["late"], 1000)
    other = process(7, QUEUE).threads[0]
    for well in (
        coroutines(TIMER),
        coroutines(age=5.0),
        coroutines(beside=(replace(other, tid=8, stack=QUEUE),)),
        coroutines(driver=QUEUE[2:]),
        coroutines(jobs=2),
    ):
        assert verdict(well)[:2] == (4, [])


@pytest.mark.parametrize(("waits_on", "status"), [(EVENT, 1), (TIMER, 4)])
def test_coroutines_that_await_each_other(waits_on, status):
    """Two actors whose calls have called each other hang, unless one of them may only sleep."""
    driver, (first, second) = process(811, EVENTS, driver=True), (actor(0, "A"), actor(1, "B"))
    loop = Thread(5, "AsyncIO Thread: default", (), None, ("S", "S"), 0, 0, 90.0, waits_on=waits_on)
    calls = [
        Call(task(actor_id(to), number), "f", actor_id(to), "RUNNING", NOW - 90, parent=parent)
        for to, number, parent in ((0, 1, "f" * 40 + JOB), (1, 2, task(actor_id(0), 1)), (0, 3, task(actor_id(1), 2)))
    ]
    idle = process(1000, IDLE)
    loops = [replace(idle, pid=1000 + at, title="ray::A.f", threads=(*idle.threads, loop)) for at in (0, 1)]
    assert verdict(look([first, second], [driver, *loops], calls=tuple(calls)))[0] == status


def test_timer_of_an_event_loop():
    """The kernel says whether an event loop wakes up by itself."""
    text = "import asyncio\nasync def wait(): await {}\nasyncio.run(wait())"
    for awaits, waits_on in (("asyncio.Event().wait()", EVENT), ("asyncio.sleep(60)", TIMER)):
        with subprocess.Popen([sys.executable, "-c", text.format(awaits)]) as child:
            deadline, seen = time.monotonic() + 60, ""
            while seen != waits_on and time.monotonic() < deadline:
                threads = look_at_node([child.pid], [], 0.1, 3.0)["processes"][0]["threads"]
                seen = threads[0]["waits_on"] if threads else ""
            child.kill()
        assert seen == waits_on


@pytest.mark.parametrize("stands", ["idle", "channel", "unknown", "gone"])
@pytest.mark.parametrize("waits", [GET, EVENTS])
def test_call_of_a_process_that_was_not_seen_to_move(stands, waits):
    """A driver whose waits cannot be read, and that has made a call that runs for long, is no all-clear."""
    callee = {
        "idle": [process(1000, IDLE)],
        "channel": [process(1000, CHANNEL, age=None)],
        "unknown": [process(1000, QUEUE, ticks=2, switches=3, age=0.1)],
        "gone": [],
    }[stands]
    driver = process(811, waits, driver=True)
    call = Call(task(actor_id(0)), "run", actor_id(0), "RUNNING", NOW - 90, parent="f" * 40 + JOB)
    snapshot = look([actor(0)], [driver, *callee], calls=(call,))
    status, blamed, found = verdict(snapshot)
    assert (status, blamed, suspects(found)) == (4, [], [1000])
    assert verdict(replace(snapshot, calls=(replace(call, began=NOW - 5),)))[0] == 0


STACKS = (QUEUE, ALL_REDUCE, BARRIER, BACKWARD, REPORT, JOIN, CHANNEL, *((GET, peer) for peer in range(3)))
STANDS = ({}, {"age": None}, SPINS, {"ticks": 1, "switches": 3, "age": 0.1})


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(STACKS), st.sampled_from(STANDS), st.sampled_from("AB")), min_size=1, max_size=4
    ),
    st.sampled_from(["get", "wait", "events"]),
    st.booleans(),
    st.booleans(),
)
def test_never_an_all_clear_for_actors_that_stand(actors, driver_waits, has_ranks, lists_calls):
    """If every actor stands, whatever it stands in, and for whatever the driver waits, the status is not 0."""
    processes, size = [], len(actors)
    for number, (stack, how, _) in enumerate(actors):
        get = stack[0] is GET
        frames = GET if get else stack
        more = {"refs": [ref(actor_id(stack[1] % size), 9)]} if get else {}
        env = environ(number, size) if has_ranks else None
        processes.append(process(1000 + number, frames, env=env, **more, **({"before": frames, **how} if how else {})))
    refs = [ref(actor_id(number), any_=driver_waits == "wait") for number in range(size)]
    waits = process(811, EVENTS, driver=True)
    if driver_waits != "events":
        waits = process(811, GET, driver=True, refs=refs, switches=1, before=GET, age=0.5)
    listed = lists_calls or driver_waits == "events"
    calls = [Call(task(actor_id(to)), "f", actor_id(to), "RUNNING", NOW - 200) for to in range(size) if listed]
    own = [actor(number, name) for number, (_, _, name) in enumerate(actors)]
    assert verdict(look(own, [waits, *processes], calls=tuple(calls)))[0] != 0


def test_file_system_that_does_not_answer(tmp_path):
    """A source file that cannot be read holds up neither the look of a node nor its answer."""
    fifo = tmp_path / "train.py"
    os.mkfifo(fifo)
    text = f"exec(compile('import time\\ndef main():\\n  while True: time.sleep(60)\\nmain()', {str(fifo)!r}, 'exec'))"
    with subprocess.Popen([sys.executable, "-c", text]) as child:
        time.sleep(0.5)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(look_at_node([child.pid], [], 0.2, 3.0)), daemon=True)
        thread.start()
        thread.join(60)
        child.kill()
    (answer,) = answers
    assert len(answer["processes"]) == 1
    assert "file system" in answer["notes"][0]


def test_records_on_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    """Source lines are read even if the folder of the flight recorder's files does not answer."""
    hangs = threading.Event()
    monkeypatch.setattr("fairlead_inspect._node.look.read_dump", lambda *_: hangs.wait() and ([], ""))
    script = tmp_path / "train.py"
    script.write_text("import time\nclass Device: wait = staticmethod(time.sleep)\nDevice.wait(60)\n")
    with subprocess.Popen([sys.executable, str(script)]) as child:
        time.sleep(0.5)
        answer = look_at_node([child.pid], [], 0.2, 3.0)
        child.kill()
    hangs.set()
    assert answer["processes"][0]["threads"][0]["waits_inside"]
    assert "file system" in answer["notes"][0]
