# SPDX-License-Identifier: Apache-2.0
"""Jobs in which some process stands still for a good reason: the verdict must not blame it."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parent))
from seen import (
    ALL_REDUCE,
    BARRIER,
    GET,
    IDLE,
    JOB,
    JOIN,
    LOOP,
    NODE,
    NOW,
    QUEUE,
    actor,
    actor_id,
    environ,
    look,
    process,
    ranks_of,
    ref,
    thread,
)

from fairlead_inspect import diagnose, exit_status
from fairlead_inspect._node.references import calibrate, read_references
from fairlead_inspect.model import Call, Child, Death, Frame, Job

MOVES = {"before": QUEUE, "ticks": 80, "switches": 3, "age": 0.0}
BELOW = (Frame("/py/lib/python3.11/threading.py", "Thread._bootstrap", 1),)


def blamed(snapshot):
    return [
        (one.kind, one.ranks or tuple(of.class_name for of in one.actors)) for one in diagnose(snapshot) if one.blames
    ]


def change(snapshot, pid, **changes):
    return replace(
        snapshot, processes=tuple(replace(one, **changes) if one.pid == pid else one for one in snapshot.processes)
    )


def driver_of(*refs, stack=GET, **how):
    return process(811, stack, refs=refs, driver=True, title="python", **how)


def beside(one, stack, **how):
    """Return a process with one more thread: one that runs a call, or with a `name` one of the job's own."""
    name = how.pop("name", "")
    new = replace(thread(one.pid + 9000, stack, **how), name=name)
    if name:
        new = replace(new, stack=(*stack, *BELOW), before=new.before and (*stack, *BELOW))
    return replace(one, threads=(*one.threads, new))


@pytest.mark.parametrize("states", [("", ""), ("S", ""), ("", "S"), ("S", "T"), ("t", "S")])
def test_not_stopped_in_both_looks(states):
    """A thread that began or ended between the looks, or stopped for a moment, is not a stopped process."""
    (one,) = process(1001, LOOP).threads
    counted = None if "" in states else 0
    snapshot = change(
        ranks_of([LOOP] * 3), 1001, threads=(replace(one, states=states, ticks=counted, switches=counted),)
    )
    assert "stopped" not in [kind for kind, _ in blamed(snapshot)]
    if "" not in states:
        assert "stopped" not in [kind for kind, _ in blamed(change(snapshot, 1001, states=states))]


def test_stopped_now_and_then():
    """A process that a limiter stops and continues uses the CPU between the looks."""
    snapshot = ranks_of([ALL_REDUCE, LOOP, ALL_REDUCE], how={1: {**MOVES, "state": "T", "ticks": 30}})
    assert blamed(snapshot) == []


def test_stopped_child():
    """A stopped child explains a wait only if its parent stands at the end of it and does not move."""
    paused = (Child(7, "paused", ("T", "T")),)
    hangs = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    assert blamed(change(hangs, 1002, children=paused)) == [("stopped", (2,))]
    assert blamed(change(hangs, 1000, children=paused)) == [("late", (2,))]
    assert blamed(change(ranks_of([LOOP] * 2, how={0: MOVES, 1: MOVES}), 1000, children=paused)) == []


def test_left_without_one():
    """Actors of one class that go on without one that was ended, or died long ago, do not wait for it."""

    def of(stacks, death, **how):
        dead = actor(7, state="DEAD", pid=0, death=death, created=100.0)
        actors = [actor(number) for number in range(len(stacks))]
        return look([*actors, dead], [process(1000 + number, stack, **how) for number, stack in enumerate(stacks)])

    ended, crashed = Death("ray.kill", True, NOW - 4000), Death("killed", False, NOW - 4000)
    just = Death("killed", False, NOW - 110)
    for death in (ended, crashed):
        assert blamed(of([ALL_REDUCE] * 3, death)) == []
        assert blamed(of([ALL_REDUCE, QUEUE, ALL_REDUCE], death)) == [("late", ("Worker",))]
    # Of a worker set with a known size, those that wait for it to join cannot go on without it.
    for stack, expected in ((ALL_REDUCE, []), (JOIN, [("dead", (2,))])):
        workers = ranks_of([stack] * 4, how={number: {"age": 0.1} for number in range(4)})
        actors = [replace(one, state="DEAD", death=ended, pid=0) if one.pid == 1002 else one for one in workers.actors]
        left = tuple(one for one in workers.processes if one.pid != 1002)
        assert blamed(replace(workers, actors=tuple(actors), processes=left)) == expected
    assert blamed(of([ALL_REDUCE] * 3, just, age=1.0)) == []
    assert blamed(of([ALL_REDUCE] * 3, just)) == [("dead", ("Worker",))]


def test_rank_of_the_driver():
    """A rank that no actor has is not missing if the driver has it."""
    workers = [process(1000 + number, JOIN, env=environ(number + 1, 4)) for number in range(3)]
    actors = [actor(number) for number in range(3)]
    assert blamed(look(actors, [*workers, driver_of(stack=LOOP, env=environ(0, 4), **MOVES)])) == []
    assert blamed(look(actors, [*workers, driver_of(stack=LOOP, **MOVES)])) == [("missing", (0,))]


@pytest.mark.parametrize(
    ("asks", "how"),
    [
        (("Stage", "Stage", "Other"), {}),
        (("Stage", "Stage", "Other"), {"env": True}),
        (("Stage", "Stage", "Stage"), {"env": True}),
    ],
)
def test_no_deadlock_with_a_collective(asks, how):
    """Who asks one that is in a collective with a third for a moment does not wait for itself."""
    actors = [actor(number, name) for number, name in enumerate(asks)]
    stacks = [(ALL_REDUCE, ()), (GET, [ref(actor_id(0))]), (LOOP if asks[2] == "Other" else ALL_REDUCE, ())]
    processes = [
        process(1000 + number, stack, refs=refs, env=environ(number, 3) if how else None, age=0.2)
        for number, (stack, refs) in enumerate(stacks)
    ]
    assert blamed(look(actors, processes)) == []


def test_threads_that_wait():
    """What one call of an actor waits for is not known to hold up another one."""
    a, b = actor(0, "A"), actor(1, "B")
    for stack, how in ((QUEUE, {"age": 9.0}), (LOOP, MOVES)):
        both = beside(process(1000, GET, refs=[ref(b.actor_id)]), stack, **how)
        snapshot = look([a, b], [driver_of(ref(a.actor_id)), both, process(1001, QUEUE)])
        assert blamed(snapshot) == []
        asks = change(snapshot, 1001, threads=process(1001, GET, refs=[ref(a.actor_id, 2)]).threads)
        assert blamed(asks) == []
    # The driver computes, and a thread of it waits for messages.
    works = driver_of(ref(a.actor_id), stack=LOOP, **MOVES)
    assert blamed(look([a], [beside(works, GET, name="log"), process(1000, QUEUE)])) == []
    # One call polls, and another one waits.
    polls = beside(process(1000, QUEUE), LOOP, before=LOOP, ticks=1, switches=5, age=0.1)
    assert blamed(look([a], [driver_of(ref(a.actor_id)), polls])) == []


def test_thread_of_a_rank():
    """A rank that waits for a thread of its own is judged by what that does."""
    hangs = ranks_of([QUEUE, ALL_REDUCE, ALL_REDUCE])
    (rank,) = [one for one in hangs.processes if one.pid == 1000]
    assert blamed(change(hangs, 1000, threads=beside(rank, QUEUE, name="x").threads)) == [("late", (0,))]
    downloads = {"before": LOOP, "ticks": 1, "switches": 40, "age": 0.01}
    saves = {"states": ("D", "D"), "age": 3.0}
    for stack, how in ((BARRIER, {}), (GET, {}), (LOOP, downloads), (LOOP, saves)):
        assert blamed(change(hangs, 1000, threads=beside(rank, stack, name="x", **how).threads)) == []
    assert blamed(change(hangs, 1000, children=(Child(7, "curl", ("S", "S"), 4),))) == []
    # It runs no call, but a thread does its work.
    idle = ranks_of([IDLE, ALL_REDUCE, ALL_REDUCE])
    assert blamed(idle) == [("late", (0,))]
    (rank,) = [one for one in idle.processes if one.pid == 1000]
    assert blamed(change(idle, 1000, threads=beside(rank, LOOP, name="x").threads)) == []


def test_coroutine():
    """A method that runs a loop of coroutines may await another actor."""
    a, file = actor(0, "A"), "/py/lib/python3.11/asyncio/base_events.py"
    select = Frame("/py/lib/python3.11/selectors.py", "EpollSelector.select", 468)
    loop = (select, *(Frame(file, f"BaseEventLoop.{name}", 1) for name in ("_run_once", "run_forever")), *LOOP)
    snapshot = look([a], [driver_of(ref(a.actor_id)), process(1000, loop)])
    assert blamed(snapshot) == []
    blocks = (*QUEUE, *loop[1:])
    assert blamed(change(snapshot, 1000, threads=process(1000, blocks).threads)) == [("late", ("A",))]


@pytest.mark.parametrize("timeout", [None, "None", "5400.0", "0.5", "0", "<object>"])
def test_timeout_of_a_wait(timeout):
    """Who waits with a short timeout polls, which is one wait if what it waits for does not move."""
    (id_, _), a = ref(actor_id(0)), actor(0, "A")
    objects = [ray.ObjectRef(bytes.fromhex(id_)), object()]
    held = [{"name": "timeout", "repr": timeout}] if timeout else []
    frame = {"filename": GET[0].file, "name": "wait", "locals": [*held, {"name": "ray_waitables", "addr": id(objects)}]}
    (found,), unread = read_references(os.getpid(), [frame], calibrate(objects[0]))
    assert (found, unread) == ((id_, True, timeout in ("0.5", "0")), 1)
    assert blamed(look([a], [driver_of(found[:2], polls=found[2]), process(1000, QUEUE)])) == [("late", ("A",))]


def test_alone_in_a_collective():
    """If most members of a worker set are elsewhere, the others may be alone in a collective by mistake."""
    for stack in (QUEUE, IDLE):
        assert blamed(ranks_of([BARRIER, stack, stack, stack])) == []
        assert blamed(ranks_of([BARRIER, BARRIER, BARRIER, stack])) == [("late", (3,))]


def test_worker_set_that_may_be_none():
    """A chain through actors of one class, of which one is in a collective, does not lead to the others."""
    stages, other = [actor(number, "Stage") for number in range(2)], actor(2, "Other")
    processes = [process(1000, ALL_REDUCE), process(1001, QUEUE), process(1002, LOOP, **MOVES)]
    assert blamed(look([*stages, other], [driver_of(ref(actor_id(0))), *processes])) == []


def test_young_disk():
    """A wait for the disk may be long, such as that of a checkpoint."""
    for age, expected in ((3.0, []), (70.0, [("disk", ("A",))])):
        saves = process(1000, LOOP, states=("D", "D"), age=age)
        assert blamed(look([actor(0, "A")], [driver_of(ref(actor_id(0))), saves])) == expected


def test_idle_for_a_reason():
    """A rank that was not called is not late if its caller, or its call, waits for something else."""
    loader, hangs = actor(9, "Loader"), process(1009, QUEUE)

    def of(snapshot):
        return blamed(replace(snapshot, actors=(*snapshot.actors, loader), processes=(*snapshot.processes, hangs)))

    idle = ranks_of([ALL_REDUCE, IDLE, ALL_REDUCE])
    states = {actor_id(1): "PENDING_ARGS_AVAIL"}
    calls = tuple(replace(one, state=states.get(one.actor_id, one.state)) for one in idle.calls)
    assert of(replace(idle, calls=calls)) == []
    before = replace(idle, calls=tuple(one for one in idle.calls if one.actor_id != actor_id(1)))
    assert of(change(before, 811, threads=process(811, GET, refs=[ref(loader.actor_id)], driver=True).threads)) == [
        ("late", ("Loader",))
    ]


def tasks_of(running, pending, age=90.0, job=JOB):
    """Return a driver that waits for tasks, of which some run, and the tasks."""
    ids = [f"{number:016x}{'f' * 24}{job}" for number in range(1, running + pending + 1)]
    calls = [
        Call(one, "f", "", "RUNNING", NOW - 10, 1000 + at, NODE)
        if at < running
        else Call(one, "f", "", "PENDING_NODE_ASSIGNMENT", NOW - age)
        for at, one in enumerate(ids)
    ]
    return driver_of(*((one + "01000000", False) for one in ids)), tuple(calls)


def test_tasks_in_turn():
    """Tasks that wait until others of their job are done are not what the job waits for."""
    driver, calls = tasks_of(2, 9)
    workers = [process(1000 + number, QUEUE, age=9.0, title="ray::f") for number in range(2)]
    found = diagnose(look([], [driver, *workers], calls=calls))
    assert [one.blames for one in found] == [False] * len(found)
    assert exit_status(found) == 0
    driver, calls = tasks_of(0, 9)
    assert blamed(look([], [driver], calls=calls)) == [("pending", ())]
    waits = look([actor(0)], [driver, process(1000, LOOP, **MOVES)], calls=calls)
    assert blamed(waits) == []


def test_task_of_another_job():
    """A task that is stopped is a fault of its own job only."""
    _, calls = tasks_of(1, 0, job="02000000")
    stopped = process(1000, LOOP, state="T", title="ray::f")
    jobs = (Job(JOB, "a.py", 811, NODE), Job("02000000", "b.py", 812, NODE))
    found = diagnose(look([], [stopped], calls=calls, jobs=jobs))
    assert [(one.kind, one.job_id) for one in found] == [("stopped", "02000000")]
