# SPDX-License-Identifier: Apache-2.0
"""The verdict about pretended jobs: whom it blames, and that it blames no one else."""

import re
import sys
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
    NODE,
    NOW,
    QUEUE,
    SITE,
    actor,
    actor_id,
    as_json,
    environ,
    look,
    process,
    ranks_of,
    ref,
    run,
    task,
    thread,
)

from fairlead_inspect import diagnose, exit_status
from fairlead_inspect.model import Actor, Call, Child, Death, Frame, Node, Reservation


def blamed(snapshot, **options):
    return [
        (one.kind, one.ranks or one.ordinals, one.confidence) for one in diagnose(snapshot, **options) if one.blames
    ]


def kinds(snapshot):
    return [one.kind for one in diagnose(snapshot)]


def test_late_rank():
    """The only rank that is not in the collective, and does not move, is late, with all that a reader needs."""
    (found,) = diagnose(ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE, ALL_REDUCE]))
    assert (found.kind, found.ranks, found.confidence, found.blames) == ("late", (2,), "certain", True)
    assert (found.pid, found.node, found.worker_set, found.since_s) == (1002, "10.0.0.1", "Worker", 100.0)
    assert [(frame.function, frame.line) for frame in found.where] == [
        ("Queue.get", 171),
        ("next_batch", 33),
        ("train", 100),
    ]
    assert (found.waiting.count, found.waiting.ranks, found.waiting.since_s) == (3, (0, 1, 3), 100.0)
    assert found.chain == ("driver", "Worker rank 2")
    assert exit_status([found]) == 1


TRAIN_V2 = SITE + "ray/train/v2/_internal/"
THREAD = (
    Frame("/py/lib/python3.11/threading.py", "Thread.run", 982),
    Frame("/py/lib/python3.11/threading.py", "Thread._bootstrap_inner", 1045),
    Frame("/py/lib/python3.11/threading.py", "Thread._bootstrap", 1002),
)
RUNNER = TRAIN_V2 + "execution/worker_group/thread_runner.py"
# As seen of Ray 2.60: the worker runs no method, and the user's function is on a thread of its own.
IN_TRAIN_FUNCTION = (
    Frame(TRAIN_V2 + "util.py", "construct_train_func.<locals>.train_fn", 89),
    Frame(TRAIN_V2 + "execution/worker_group/worker.py", "RayTrainWorker.run_train_fn.<locals>.train_fn", 152),
    Frame(RUNNER, "ThreadRunner.run.<locals>._run_target", 37),
    *THREAD,
)
MONITOR = (Frame(RUNNER, "ThreadRunner._monitor_target", 72), *THREAD)


def in_ray_train(one, stack):
    """Return the process of a worker of Ray Train whose training function stands at a stack."""
    (main,) = process(one.pid, IDLE).threads
    threads = [main, *(replace(main, tid=one.pid + tid, stack=on) for tid, on in ((1, MONITOR), (2, stack)))]
    threads[2] = replace(threads[2], last_ran_s=100.0)
    return replace(one, title="ray::RayTrainWorker", threads=tuple(threads))


def test_ray_train():
    """The workers of Ray Train are judged by the thread that runs the user's function."""
    stacks = [ALL_REDUCE, ALL_REDUCE, QUEUE, ALL_REDUCE]
    snapshot = ranks_of([IDLE] * 4)
    workers = [
        in_ray_train(one, (*stacks[one.pid - 1000], *IN_TRAIN_FUNCTION)) if one.pid >= 1000 else one
        for one in snapshot.processes
    ]
    (found,) = diagnose(replace(snapshot, processes=tuple(workers)))
    assert (found.kind, found.ranks, found.confidence, found.blames) == ("late", (2,), "certain", True)
    assert [frame.function for frame in found.where] == ["Queue.get", "next_batch", "train"]
    assert (found.waiting.ranks, found.since_s) == ((0, 1, 3), 100.0)


def test_not_late_yet():
    """Before the limit, and while the rank moves, nothing is blamed and the status is 0.

    A rank that stood for long before the others came is no all-clear, nor one whose child works for as long.
    """
    hung = [ALL_REDUCE, QUEUE, ALL_REDUCE]
    short = ranks_of(hung, how={number: {"age": 5.0} for number in range(3)})
    one_late = ranks_of(hung, how={0: {"age": 5.0}}, driver_waits=False)
    moves = ranks_of(hung, how={1: {"before": LOOP, "ticks": 9, "switches": 3, "age": 0.0}})
    snapshot = ranks_of(hung)
    compiles = [
        replace(one, children=(Child(7, "cc1plus", ("R", "R"), 90),)) if one.pid == 1001 else one
        for one in snapshot.processes
    ]
    for one in (short, moves):
        assert kinds(one) == ["working"]
        assert exit_status(diagnose(one)) == 0
    for one in (one_late, replace(snapshot, processes=tuple(compiles))):
        assert (kinds(one), exit_status(diagnose(one))) == (["undecided"], 4)
    assert blamed(short, after_s=1.0) == [("late", (1,), "certain")]


def test_too_early():
    """What has stood for some seconds gets no all-clear before `--after`: the verdict says when to ask again."""
    short = {number: {"age": 20.0} for number in range(3)}
    driver = process(811, QUEUE, driver=True, title="python", age=20.0)
    waits = {
        "Worker": ranks_of([ALL_REDUCE, QUEUE, ALL_REDUCE], how=short),
        "3 processes": ranks_of([ALL_REDUCE] * 3, how=short, driver_waits=False),
        "the driver": look([], [driver]),
    }
    for name, snapshot in waits.items():
        status, printed = run(snapshot, "why")
        assert (status, printed.count("TOO EARLY")) == (0, 1), printed
        said = " ".join(printed.split())
        assert re.search(f"TOO EARLY .*{name}.*, for 20 s of 1m 0s: .*next run `why` again in 40 s", said), printed
        assert "WORKS" not in printed
        assert "Nothing hangs" not in printed
    moves = ranks_of([ALL_REDUCE, QUEUE], how={1: {"before": LOOP, "ticks": 9, "switches": 3, "age": 0.0}})
    assert "WORKS" in run(moves, "why")[1]
    young = look([], [process(811, QUEUE, driver=True, title="python", age=5.0)])
    assert "Nothing hangs" in run(young, "why")[1]


def test_no_job_at_all():
    """A driver that is still in `init_ray` has no job: a cluster without a job is no all-clear."""
    nothing = replace(look([], []), jobs=())
    status, printed = run(nothing, "why")
    assert (status, as_json(nothing)["status"]) == (4, 4)
    assert "No job runs on this cluster" in printed
    assert exit_status(diagnose(nothing)) == 4


def test_unknown_last_run():
    """A rank that does not move is no all-clear where the kernel does not say when it ran: its call says since when."""
    hung = [ALL_REDUCE, QUEUE, ALL_REDUCE]
    unknown = ranks_of(hung, how={1: {"age": None}})
    assert blamed(unknown) == [("late", (1,), "likely")]
    (found,) = diagnose(unknown)
    assert (found.since_source, found.since_s) == ("start of its call", 200.0)
    assert kinds(replace(unknown, calls=())) == ["undecided"]


@pytest.mark.parametrize("states", [("S", "S"), ("D", "D")])
def test_unknown_last_run_outside_of_a_collective(states):
    """Without a collective a worker may rest just in the moment of the look, so that it is a suspect."""
    calls = (Call(task(actor_id(0)), "train", actor_id(0), "RUNNING", NOW - 200),)
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True, title="python")
    worker = process(1000, QUEUE, states=states, state=states[0], age=None)
    (found,) = diagnose(look([actor(0)], [driver, worker], calls=calls))
    assert (found.kind, found.blames, [one.pid for one in found.suspects]) == ("undecided", False, [1000])
    assert (found.suspects[0].text, exit_status([found])) == ("does not move, and it is not known since when", 4)


def test_spinning_rank():
    """A rank that spins outside of the collective may be stuck or work, so that it is a suspect and not blamed."""
    spins = {"ticks": 90, "switches": 40, "before": LOOP, "states": ("R", "R"), "age": 0.0}
    (found,) = diagnose(ranks_of([ALL_REDUCE, ALL_REDUCE, LOOP], how={2: spins}))
    assert (found.kind, found.blames, [one.name for one in found.suspects]) == ("undecided", False, ["Worker rank 2"])
    assert found.subject == "Worker rank 2"
    assert exit_status([found]) == 4


def test_polling_rank():
    """A rank that wakes up now and then at one line has waited since its call began; one that sleeps so may be well."""
    polls = {"ticks": 1, "switches": 2, "before": LOOP, "age": 0.0}
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, LOOP], how={2: polls})
    (found,) = diagnose(snapshot)
    assert (found.kind, found.ranks, found.blames, found.since_s) == ("late", (2,), True, 200.0)
    assert (found.confidence, found.rank_confidence) == ("likely", "certain")
    sleeps = [
        replace(one, threads=(replace(one.threads[0], waits_on="time.sleep"),)) if one.pid == 1002 else one
        for one in snapshot.processes
    ]
    (found,) = diagnose(replace(snapshot, processes=tuple(sleeps)))
    assert (found.kind, found.blames, found.suspects[0].pid) == ("undecided", False, 1002)
    assert "it stands in time.sleep" in found.suspects[0].text


def test_disk():
    """A rank that waits for the disk and has not run between the looks is likely to be the cause; a slow one is not."""
    stuck = {"states": ("D", "D"), "age": 70.0}
    assert blamed(ranks_of([ALL_REDUCE, ALL_REDUCE, LOOP], how={2: stuck})) == [("disk", (2,), "likely")]
    slow = {**stuck, "ticks": 1, "switches": 50, "before": LOOP, "age": 0.0}
    assert blamed(ranks_of([ALL_REDUCE, ALL_REDUCE, LOOP], how={2: slow})) == []


@pytest.mark.parametrize("states", [("R", "R"), ("R", "S"), ("S", "R")])
def test_busy_machine(states):
    """A thread that waits for a processor has not run, and is not blamed for it."""
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE], how={2: {"states": states}})
    assert blamed(snapshot) == []
    assert exit_status(diagnose(snapshot)) == 4


def test_torn_stack_proves_nothing():
    """A stack that does not reach its base does not show that a thread moves, and does not blame either."""
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, LOOP], how={2: {"ticks": 90, "switches": 4, "before": QUEUE}})
    torn = [
        replace(one, threads=(replace(one.threads[0], before=(LOOP[0],)),)) if one.pid == 1002 else one
        for one in snapshot.processes
    ]
    assert blamed(replace(snapshot, processes=tuple(torn))) == []


def test_same_collective_and_different_ones():
    """If all ranks are in a collective, none is blamed; different ones are a mismatch."""
    assert kinds(ranks_of([ALL_REDUCE] * 4)) == ["together"]
    assert kinds(ranks_of([ALL_REDUCE, BARRIER, ALL_REDUCE, ALL_REDUCE])) == ["mismatch"]
    for stacks in ([ALL_REDUCE] * 4, [ALL_REDUCE, BARRIER, ALL_REDUCE]):
        assert exit_status(diagnose(ranks_of(stacks))) == 4
        assert exit_status(diagnose(ranks_of(stacks, how={0: {"age": 1.0}}))) == 0


def test_two_sinks():
    """Two ranks at one place are both likely; two at different places may wait for each other, so none is blamed."""
    assert blamed(ranks_of([ALL_REDUCE, QUEUE, QUEUE, ALL_REDUCE])) == [("late", (1, 2), "likely")]
    assert blamed(ranks_of([ALL_REDUCE, QUEUE, LOOP])) == []
    assert exit_status(diagnose(ranks_of([ALL_REDUCE, QUEUE, LOOP]))) == 4


def test_native_wait():
    """A rank inside of a library that waits for devices and other ranks is not blamed."""
    backward = (Frame("/v/lib/python3.11/site-packages/torch/autograd/graph.py", "_engine_run", 1), *QUEUE[2:])
    assert blamed(ranks_of([ALL_REDUCE, backward, ALL_REDUCE])) == []
    assert blamed(ranks_of([ALL_REDUCE, QUEUE[2:], ALL_REDUCE], how={1: {"inside": True}})) == []


def test_unknown_reference():
    """A rank that waits in `ray.get` for an object of an unknown origin is not blamed."""
    assert blamed(ranks_of([ALL_REDUCE, GET, ALL_REDUCE])) == []
    assert blamed(ranks_of([ALL_REDUCE, GET, ALL_REDUCE], how={1: {"ticks": 1, "switches": 2, "before": GET}})) == []


def test_idle_rank():
    """A rank that runs nothing is blamed only if its caller waits for the others."""
    assert blamed(ranks_of([ALL_REDUCE, IDLE, ALL_REDUCE])) == [("late", (1,), "likely")]
    assert blamed(ranks_of([ALL_REDUCE, IDLE, ALL_REDUCE], driver_waits=False)) == []
    assert blamed(ranks_of([IDLE, IDLE, IDLE])) == []


def test_stopped():
    """A stopped rank explains who waits for it; a stopped driver explains only idle workers."""
    assert blamed(ranks_of([ALL_REDUCE, QUEUE, ALL_REDUCE], how={1: {"state": "T"}})) == [("stopped", (1,), "certain")]

    def stop_driver(snapshot):
        stopped = [replace(one, states=("T", "T")) if one.pid == 811 else one for one in snapshot.processes]
        return replace(snapshot, processes=tuple(stopped))

    assert blamed(stop_driver(ranks_of([ALL_REDUCE, QUEUE, ALL_REDUCE]))) == [("late", (1,), "certain")]
    assert blamed(stop_driver(ranks_of([IDLE, IDLE]))) == [("stopped", (), "certain")]
    assert blamed(stop_driver(ranks_of([ALL_REDUCE, IDLE, ALL_REDUCE]))) == []
    snapshot = ranks_of([ALL_REDUCE, QUEUE, ALL_REDUCE])
    engine = [
        replace(one, children=(Child(7, "engine", ("T", "T")),)) if one.pid == 1001 else one
        for one in snapshot.processes
    ]
    assert [one[0] for one in blamed(replace(snapshot, processes=tuple(engine)))] == ["stopped"]


def test_dead():
    """A member that died, and that the others wait for, is the cause; its rank is the only one that is left."""
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, ALL_REDUCE, ALL_REDUCE])
    death = Death("killed by signal 9", False, NOW - 50)
    lost = replace(snapshot.actors[2], state="DEAD", death=death, pid=0)
    alive = tuple(one for one in snapshot.processes if one.pid != 1002)
    actors = tuple(lost if one.actor_id == lost.actor_id else one for one in snapshot.actors)
    dead = replace(snapshot, actors=actors, processes=alive)
    assert blamed(dead) == [("dead", (2,), "certain")]
    # It was replaced: the new one has been created after the death.
    new = actor(9, created=NOW - 10)
    replaced = replace(dead, actors=(*actors, new), processes=(*alive, process(1009, QUEUE, env=environ(2, 4))))
    assert blamed(replaced) == [("late", (2,), "certain")]
    # The job ends: it kills its actors one after the other, and the last ones have waited for a moment.
    ended = replace(lost, death=Death("ray.kill", True, NOW - 1))
    moment = ranks_of([ALL_REDUCE] * 4, how={number: {"age": 1.0} for number in range(4)})
    actors = tuple(ended if one.actor_id == lost.actor_id else one for one in snapshot.actors)
    assert (
        blamed(replace(moment, actors=actors, processes=tuple(one for one in moment.processes if one.pid != 1002)))
        == []
    )


PLACEMENT = (
    Frame(SITE + "ray/util/placement_group.py", "_call_placement_group_ready", 113),
    Frame(SITE + "ray/util/placement_group.py", "PlacementGroup.wait", 73),
    Frame("/w/main.py", "main", 7),
)
# Of `ray.get(group.ready())`: no task makes the object, as its number says.
PROMISE = f"00{'f' * 38}{JOB}01e1f505", False
BIG = Reservation("ab" * 18, JOB, "big", "", "INFEASIBLE", "2 x 8 GPU", NOW - 90)


@pytest.mark.parametrize(("stack", "references"), [(PLACEMENT, ()), (GET, [PROMISE])])
@pytest.mark.parametrize("age", [90.0, 5.0])
def test_pending_placement_group(stack, references, age):
    """A placement group that is not placed, and that the driver waits for, is to blame once it has waited for long."""
    driver = process(811, stack, refs=references, driver=True, title="python")
    (found,) = diagnose(look([], [driver], reservations=(replace(BIG, requested=NOW - age),)))
    assert (found.kind, found.subject, found.blames) == ("pending", "placement group big (2 x 8 GPU)", age == 90)
    assert (found.since_s, found.moves, found.waiting.count) == (age, age != 90, 1)
    assert found.text == "is not placed: no node can hold it, even when it is idle (INFEASIBLE)"
    assert found.confidence == ("certain" if stack is PLACEMENT else "likely")


def test_placement_group_of_another():
    """Only who waits for a placement group explains it: other waits, other jobs and other makers do not."""
    driver = process(811, GET, refs=[PROMISE], driver=True, title="python")
    (found,) = diagnose(look([], [driver], reservations=(replace(BIG, job_id="02000000"),)))
    assert (found.kind, found.subject, found.blames) == ("undecided", "driver", False)
    working = process(811, LOOP, driver=True, title="python")
    assert "pending" not in kinds(look([], [working], reservations=(BIG,)))
    both = (BIG, replace(BIG, name="small", creator="c" * 32))
    assert [one.subject for one in diagnose(look([], [driver], reservations=both))] == [
        "placement group big (2 x 8 GPU)"
    ]


@pytest.mark.parametrize(
    ("reservations", "said"), [((BIG,), "big (2 x 8 GPU), which is not placed: no node"), ((), "abababab")]
)
def test_actor_of_a_placement_group(reservations, said):
    """A pending actor requests parts of its placement group, whose state explains it."""
    held = {f"CPU_group_0_{BIG.group_id}": 1.0, f"CPU_group_{BIG.group_id}": 1.0, f"bundle_group_{BIG.group_id}": 0.001}
    pending = actor(0, "Big", state="PENDING_CREATION", pid=0, resources=held)
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True, title="python")
    (found,) = diagnose(look([pending], [driver], reservations=reservations))
    assert found.text.startswith("has not started: it requests 1 CPU of placement group ")
    assert said in found.text
    assert "_group_" not in found.text


def test_wait_for_one_that_waits_for_a_placement_group():
    """Who waits for an actor that waits for a placement group is explained, and the actor is not blamed."""
    maker = process(1000, GET, refs=[PROMISE])
    driver = process(811, GET, refs=[ref(actor_id(0))], driver=True, title="python")
    (found,) = diagnose(look([actor(0)], [maker, driver], reservations=(replace(BIG, creator=actor_id(0)),)))
    assert (found.subject, found.waiting.count, found.actors) == ("placement group big (2 x 8 GPU)", 1, ())


def test_pending_and_missing():
    """An actor that does not start is named if a wait leads to it; so are ranks that do not join."""
    waiting = actor(5, "Big", state="PENDING_CREATION", pid=0, resources={"GPU": 8.0}, created=NOW - 300)
    driver = process(811, GET, refs=[ref(waiting.actor_id)], driver=True)
    (found,) = diagnose(look([waiting], [driver]))
    assert (found.kind, found.blames, found.actors[0].class_name) == ("pending", True, "Big")
    assert "8 GPU" in found.text
    assert diagnose(look([waiting], [])) == ()
    join = ranks_of([JOIN] * 3)
    fewer = [
        replace(one, environ=environ(int(one.environ["RANK"]), 4)) if one.environ else one for one in join.processes
    ]
    assert blamed(replace(join, processes=tuple(fewer))) == [("missing", (3,), "likely")]


def test_chain_and_deadlock():
    """A chain of `ray.get` leads to its end; a cycle is a deadlock."""
    a, b, c = (actor(number, name) for number, name in enumerate(("A", "B", "C")))
    driver = process(811, GET, refs=[ref(a.actor_id)], driver=True)
    chain = [process(1000, GET, refs=[ref(b.actor_id)]), process(1001, GET, refs=[ref(c.actor_id)])]
    (found,) = diagnose(look([a, b, c], [driver, *chain, process(1002, QUEUE)]))
    assert (found.kind, found.confidence, found.chain) == ("late", "likely", ("driver", "A", "B", "C"))
    assert [one.class_name for one in found.actors] == ["C"]
    cycle = process(1002, GET, refs=[ref(a.actor_id)])
    (found,) = diagnose(look([a, b, c], [driver, *chain, cycle]))
    assert (found.kind, {one.class_name for one in found.actors}, found.blames) == ("deadlock", {"A", "B", "C"}, True)


def test_deadlock_of_threads():
    """If a thread of one that waits does something else, it may be no deadlock; the driver is no suspect."""
    a, b = actor(0, "A"), actor(1, "B")
    driver = process(811, GET, refs=[ref(a.actor_id)], driver=True)
    pair = [process(1000, GET, refs=[ref(b.actor_id)]), process(1001, GET, refs=[ref(a.actor_id)])]
    pair = [replace(one, threads=(*one.threads, replace(thread(one.pid, LOOP), tid=9))) for one in pair]
    calls = tuple(Call(task(one.actor_id), "x", one.actor_id, "RUNNING", NOW - 99) for one in (a, b))
    found = diagnose(look([a, b], [driver, *pair], calls=calls))
    assert ("deadlock", "guess") in [(one.kind, one.confidence) for one in found]
    assert 811 not in [suspect.pid for one in found for suspect in one.suspects]


def test_get_of_many():
    """Of several that a driver waits for, the ends must agree; a task that has finished is not waited for."""
    a, b = actor(0, "A"), actor(1, "B")
    at = {1000: QUEUE, 1001: LOOP}
    driver = process(811, GET, refs=[ref(a.actor_id), ref(b.actor_id)], driver=True)
    calls = tuple(Call(task(one.actor_id), "x", one.actor_id, "RUNNING", NOW - 99) for one in (a, b))
    snapshot = look([a, b], [driver, *(process(pid, stack) for pid, stack in at.items())], calls=calls)
    assert blamed(snapshot) == []
    assert blamed(replace(snapshot, finished={task(b.actor_id): NOW}, calls=calls[:1])) == [("late", (), "likely")]
    # Without task events it is not known which of them is over.
    assert blamed(replace(snapshot, calls=())) == []
    fewer = replace(
        snapshot, calls=(), processes=(process(811, GET, refs=[ref(a.actor_id)], driver=True), *snapshot.processes[1:])
    )
    assert blamed(fewer) == [("late", (), "likely")]


def test_opaque_and_unread():
    """A process that cannot be read, or runs coroutines, is never blamed."""
    snapshot = ranks_of([ALL_REDUCE, QUEUE, ALL_REDUCE])
    for change in ({"threads": (), "note": "Permission denied"}, {"threads": (), "title": "ray::Worker.serve"}):
        changed = [replace(one, **change) if one.pid == 1001 else one for one in snapshot.processes]
        (found,) = diagnose(replace(snapshot, processes=tuple(changed)))
        assert (found.kind, found.ranks) == ("undecided", (1,))
    silent = replace(
        snapshot,
        processes=tuple(one for one in snapshot.processes if one.pid != 1001),
        nodes=(Node(NODE, "10.0.0.1"), Node("n2", "10.0.0.2", answer="silent", note="no answer within 4 s")),
        actors=tuple(replace(one, node_id="n2") if one.pid == 1001 else one for one in snapshot.actors),
    )
    (found,) = [one for one in diagnose(silent) if one.kind == "node-silent"]
    assert found.text == "is on node 10.0.0.2, which did not answer: no answer within 4 s"
    assert blamed(silent) == []
    lost = replace(silent, nodes=(silent.nodes[0], replace(silent.nodes[1], answer="lost", alive=False)))
    assert blamed(lost) == [("node-lost", (1,), "certain")]


LATE = {"threads": (), "note": "py-spy was not done in time (...)"}


@pytest.mark.parametrize(
    ("pids", "said"), [({811, 1000}, "2 processes, the driver among them"), ({811}, "1 process, the driver")]
)
def test_processes_that_cannot_be_read(pids, said):
    """If it is not known what processes wait for, and nothing is to blame, the verdict is open: it is not "well"."""
    processes = [process(1000, IDLE), process(811, LOOP, driver=True), process(1001, IDLE)]
    changed = tuple(replace(one, **LATE) if one.pid in pids else one for one in processes)
    (found,) = diagnose(look([actor(0, "A"), actor(1, "B")], changed))
    assert (found.kind, found.blames, found.moves, found.subject) == ("undecided", False, False, said)
    assert "cannot be read" in found.text
    assert exit_status([found]) == 4


def test_objects_that_cannot_be_read():
    """A driver that waits for objects whose ids cannot be read is a suspect."""
    driver = process(811, GET, driver=True)
    (found,) = diagnose(look([actor(0, "A")], [driver, process(1000, IDLE)]))
    assert (found.kind, found.blames, found.subject, exit_status([found])) == ("undecided", False, "driver", 4)


@pytest.mark.parametrize("finished", [{}, {"f" * 16 + "a" * 24 + JOB: NOW - 70}])
def test_objects_that_lead_to_no_process(finished):
    """A driver in `ray.get` is no all-clear if the task of its object is over, or not listed, and nothing moves."""
    lost = "f" * 16 + "a" * 24 + JOB + "01000000", False
    driver = process(811, GET, refs=[lost], driver=True, switches=1, before=GET, age=0.5)
    calls = (Call(task(actor_id(0)), "f", actor_id(0), "RUNNING", NOW - 5),)
    hangs = look([actor(0)], [driver, process(1000, IDLE)], finished=finished)
    (found,) = diagnose(hangs)
    assert (found.kind, found.subject, exit_status([found])) == ("undecided", "1 process, the driver", 4)
    assert "lead to no process" in found.text
    moves = process(1000, LOOP, before=QUEUE, ticks=9, switches=3, age=0.0)
    waits = process(811, GET, refs=[PROMISE], driver=True, switches=1, before=GET, age=0.5)
    for goes_on in (
        replace(hangs, actors=(replace(hangs.actors[0], created=NOW - 5),)),
        replace(hangs, finished={**finished, task(actor_id(0)): NOW - 5}),
        replace(hangs, calls=calls),
        replace(hangs, processes=(driver, moves)),
        replace(hangs, processes=(waits, hangs.processes[1]), reservations=(replace(BIG, requested=NOW - 5),)),
    ):
        assert exit_status(diagnose(goes_on)) == 0


def test_unread_bystanders():
    """What is to blame is named, whatever else could not be read; an unread process alone is no all-clear."""
    snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    other = actor(7, "Other")
    more = replace(snapshot, actors=(*snapshot.actors, other))
    more = replace(more, processes=(*snapshot.processes, replace(process(1007, QUEUE), **LATE)))
    assert kinds(more) == ["late"]
    alone = look([other], [replace(process(1007, QUEUE), **LATE), process(811, LOOP, driver=True)])
    assert {*kinds(alone)} == {"undecided"}


def test_silent_node_of_nobody():
    """A node that did not answer leaves the verdict open, even if no known wait leads there: it may hold the driver."""
    silent = Node("n2", "10.0.0.2", answer="silent", note="no answer within 4 s")
    far = replace(look([actor(0)], [process(1000, QUEUE)]).jobs[0], node_id="n2")
    snapshot = look([actor(0)], [process(1000, QUEUE)], nodes=(Node(NODE, "10.0.0.1"), silent), jobs=(far,))
    (found,) = [one for one in diagnose(snapshot) if one.kind == "node-silent"]
    assert (found.blames, exit_status([found])) == (False, 4)
    assert "10.0.0.2" in found.text


def test_class_without_ranks():
    """Actors of one class without ranks are numbered; only one of them, that all others wait for, is blamed."""

    def of(stacks):
        snapshot = ranks_of(stacks, driver_waits=False)
        return replace(snapshot, processes=tuple(replace(one, environ={}) for one in snapshot.processes))

    (found,) = [one for one in diagnose(of([ALL_REDUCE, ALL_REDUCE, QUEUE])) if one.blames]
    assert (found.ranks, found.ordinals, found.confidence) == ((), (2,), "likely")
    assert blamed(of([ALL_REDUCE, QUEUE])) == []
    assert blamed(of([ALL_REDUCE, QUEUE, QUEUE])) == []


def test_spares():
    """Without ranks, an actor that runs another method than those that wait, or none, may be a spare."""

    def of(spare, title="ray::Worker.train"):
        snapshot = ranks_of([ALL_REDUCE, ALL_REDUCE, spare], driver_waits=False)
        changed = (
            replace(one, environ={}, title=title if one.pid == 1002 else one.title) for one in snapshot.processes
        )
        return replace(snapshot, processes=tuple(changed))

    assert blamed(of(QUEUE)) == [("late", (2,), "likely")]
    assert blamed(of(QUEUE, "ray::Worker.stand_by")) == []
    assert blamed(of(IDLE)) == []


def test_actors_that_start_again():
    """An actor that Ray starts again, or whose arguments are not there, is not blamed, nor one that died just now."""
    for state in ("RESTARTING", "DEPENDENCIES_UNREADY"):
        again = actor(5, state=state, pid=0)
        assert blamed(look([again], [process(811, GET, refs=[ref(again.actor_id)], driver=True)])) == []
    for age, expected in ((1.0, []), (9.0, [("dead", (), "likely")])):
        dead = actor(5, state="DEAD", pid=0, death=Death("killed", False, NOW - age))
        assert blamed(look([dead], [process(811, GET, refs=[ref(dead.actor_id)], driver=True)])) == expected


def test_no_job():
    """An empty cluster is well; actors whose calls do not move are no all-clear, even if no one waits for them."""
    assert diagnose(look([], [])) == ()
    (found,) = diagnose(ranks_of([QUEUE, LOOP], driver_waits=False))
    assert (found.kind, found.blames, exit_status([found])) == ("undecided", False, 4)
    assert {one.pid for one in found.suspects} == {1000, 1001}


MOTIONS = st.sampled_from(["collective", "queue", "loop", "idle", "moves", "stopped", "unread"])


def _snapshot(doing):
    stacks = {"collective": ALL_REDUCE, "queue": QUEUE, "loop": LOOP, "idle": IDLE, "moves": QUEUE, "stopped": QUEUE}
    how = {
        number: {"before": LOOP, "ticks": 30, "switches": 2, "age": 0.0} if one == "moves" else {"state": "T"}
        for number, one in enumerate(doing)
        if one in ("moves", "stopped")
    }
    snapshot = ranks_of([stacks.get(one, QUEUE) for one in doing], how=how)
    unread = {1000 + number for number, one in enumerate(doing) if one == "unread"}
    changed = [replace(one, threads=(), note="gone") if one.pid in unread else one for one in snapshot.processes]
    return replace(snapshot, processes=tuple(changed))


@settings(max_examples=200, deadline=None)
@given(st.lists(MOTIONS, min_size=2, max_size=7))
def test_never_blames_who_moves(doing):
    """Only ranks that are stopped, or hang outside of the collective, are blamed, and the numbers do not matter."""
    found = diagnose(_snapshot(doing))
    for one in found:
        if one.blames:
            assert {doing[rank] for rank in one.ranks} <= {"queue", "loop", "idle", "stopped"}
    turned = diagnose(_snapshot(doing[::-1]))
    mirror = {(one.kind, tuple(sorted(len(doing) - 1 - rank for rank in one.ranks))) for one in turned}
    assert {(one.kind, one.ranks) for one in found} == mirror


def test_large_job():
    """2,000 processes in 4 worker sets are judged quickly, with few edges."""
    actors, processes = [], []
    for number in range(2000):
        workers, rank = divmod(number, 500)
        actors.append(Actor(actor_id(number), f"W{workers}", JOB, node_id=NODE, pid=1000 + number, owner="driver"))
        stack = QUEUE if (workers, rank) == (2, 7) else ALL_REDUCE
        processes.append(process(1000 + number, stack, env=environ(rank, 500, workers)))
    calls = tuple(Call(task(one.actor_id), "W.train", one.actor_id, "RUNNING", NOW - 500) for one in actors)
    driver = process(811, GET, refs=[ref(one.actor_id) for one in actors], driver=True)
    snapshot = look(actors, [*processes, driver], calls=calls)
    began = time.process_time()
    found = diagnose(snapshot)
    assert time.process_time() - began < 3  # 0.1 s on a machine that does nothing else
    assert [(one.worker_set, one.ranks) for one in found if one.blames] == [("W2", (7,))]


def test_chain_of_waits():
    """The chain goes through the processes that wait, even if the driver has created the one at their end itself."""
    controller, trainer = actor(0, "Controller"), actor(1, "Trainer")
    waits = process(1000, GET, refs=[ref(trainer.actor_id)], title="ray::Controller.run")
    calls = tuple(
        Call(task(one.actor_id), f"{one.class_name}.run", one.actor_id, "RUNNING", NOW - 200)
        for one in (controller, trainer)
    )
    driver = process(811, QUEUE, driver=True, title="python")
    seen = look([controller, trainer], [waits, process(1001, QUEUE, title="ray::Trainer.run"), driver], calls=calls)
    (found,) = diagnose(seen)
    assert found.blames
    assert found.chain == ("driver", "Controller", "Trainer")
