# SPDX-License-Identifier: Apache-2.0
"""Worker sets and ranks of pretended jobs, and positions of processes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, GET, IDLE, JOB, NOW, QUEUE, RAY, SITE, actor, as_json, environ, look, process, worker_sets

from fairlead_inspect.model import Death, Frame, Job, Process, Thread

# The variable that frameworks set.
LABEL = "FAIRLEAD_INSPECT_LABEL"


def sets_of(actors, envs=None):
    """Return (rule, confidence, ranks in the order of the actors) of each worker set of some actors."""
    processes = [process(1000 + number, QUEUE, env=env) for number, env in (envs or {}).items()]
    order = [actor.actor_id for actor in actors]
    rows = []
    for alike in worker_sets(look(actors, processes)):
        members = sorted(alike["members"], key=lambda member: order.index(member["key"]))
        rows.append((alike["source"], alike["confidence"], [member["rank"] for member in members]))
    return rows


def place(one, *, driver=False):
    """Return what a process does, and whether it moves."""
    jobs = (Job(JOB, "train.py", one.pid, one.node_id),) if driver else ()
    (row,) = as_json(look([], [one], jobs=jobs), "ps")["processes"]
    return row["does"], row["motion"]


def test_environment():
    """The environment gives ranks; the address tells sets of one class apart, and joins classes that share it."""
    actors = [actor(number, "A" if number < 3 else "B") for number in range(6)]
    envs = {0: environ(1, 2), 1: environ(0, 2), 2: environ(0, 3, 7), 3: environ(1, 3, 7), 4: environ(2, 3, 7)}
    assert sets_of(actors, envs) == [("environment", "certain", [1, 0]), ("environment", "certain", [0, 1, 2])]


def test_two_numbers():
    """Names with two numbers are those of two sets, as of two experiments of one driver."""
    found = sets_of([actor(at, name=f"exp-{at // 2}-{at % 2}") for at in range(4)])
    assert found == [("names", "likely", [0, 1])] * 2


def test_disputed():
    """Two members with one rank, or a rank beyond the world size, are disputed, and none of them is named."""
    actors = [actor(number) for number in range(2)]
    for envs in ({0: environ(1, 2), 1: environ(1, 2)}, {0: environ(0, 2), 1: environ(2, 2)}):
        assert sets_of(actors, envs) == [("environment", "guess", [None, None])]
        (disputed,) = worker_sets(look(actors, [process(1000 + at, QUEUE, env=env) for at, env in envs.items()]))
        assert disputed["disputed"]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["policy_w_1:0", "policy_w_0:1", "policy_w_0:0", "policy_w_1:1"], [2, 1, 0, 3]),  # verl: the last is local
        (["lm-grp0-0", "lm-grp0-1"], [0, 1]),
        (["trainer-3", "trainer-1"], [3, 1]),
        (["w.0", "w.1"], [0, 1]),
        (["w_0:0", "w_0:1", "w_1:0"], [None, None, None]),  # one is missing, so the numbers say nothing
    ],
)
def test_names(names, ranks):
    """Names of frameworks give ranks that are likely."""
    found = sets_of([actor(number, name=name) for number, name in enumerate(names)])
    assert found == [("names", "likely", ranks)]


def test_label():
    """A label in the environment is believed; a broken one is not."""
    labels = ['{"rank": 3, "group": "policy", "world_size": 8}', '{"rank": 4, "group": "policy", "world_size": 8}']
    actors = [actor(number) for number in range(2)]
    assert sets_of(actors, {at: {LABEL: text} for at, text in enumerate(labels)}) == [("label", "certain", [3, 4])]
    for broken in ("{", '{"rank": "3", "group": "x"}', '["x"]'):
        assert sets_of(actors, {0: {LABEL: broken}, 1: {LABEL: broken}}) == [("class", "guess", [None, None])]


def test_coordinates():
    """A label may have coordinates; what is no coordinate is left out."""
    texts = ['{"rank": 0, "group": "g", "coords": {"dp": 1, "tp": "x"}}', '{"rank": 1, "group": "g", "coords": 3}']
    actors = [actor(number) for number in range(2)]
    processes = [process(1000 + at, QUEUE, env={LABEL: text}) for at, text in enumerate(texts)]
    (labelled,) = worker_sets(look(actors, processes))
    assert [member["coords"] for member in labelled["members"]] == [{"dp": 1}, {}]


def test_class_and_singles():
    """Actors of one class and owner are a guess, numbered by creation; single actors are no worker set."""
    actors = [actor(0, created=5.0), actor(1, created=2.0), actor(2, "Other"), actor(3, owner="w2")]
    (alike,) = worker_sets(look(actors, []))
    members = [(member["key"], member["ordinal"]) for member in alike["members"]]
    assert members == [(actors[1].actor_id, 0), (actors[0].actor_id, 1)]


def test_former_attempts():
    """Members that died before the present ones were created belong to an earlier attempt."""
    old = [actor(number, name=f"w-{number}", state="DEAD", death=Death("x", False, 50.0)) for number in range(2)]
    new = [actor(number + 5, name=f"w-{number}", created=NOW - 10) for number in range(2)]
    assert sets_of([*old, *new]) == [("names", "likely", [0, 1])]
    lost = replace(new[1], state="DEAD", death=Death("x", False, NOW - 5))
    assert sets_of([*old, new[0], lost]) == [("names", "likely", [0, 1])]


@pytest.mark.parametrize(
    ("stack", "kind"), [(ALL_REDUCE, "collective"), (QUEUE, "user"), (GET, "ray-get"), (IDLE, "idle")]
)
def test_positions(stack, kind):
    """The innermost frames say what a process does."""
    does, motion = place(process(1, stack))
    assert (does, motion) == (kind, "unknown" if stack is IDLE else "still")


def test_other_positions():
    """A server, a coroutine, threads that differ, and code that a collective library calls."""
    accept = (Frame("/usr/lib/python3.11/socket.py", "socket.accept", 1), Frame("/w/serve.py", "run", 5))
    assert place(process(1, accept))[0] == "opaque"
    loop = Thread(2, "AsyncIO Thread: default", (Frame("/usr/lib/python3.11/selectors.py", "select", 1),))
    main = Thread(1, "MainThread", RAY[1:])
    assert place(Process("n", 1, "ray::A.serve", threads=(main, loop)))[0] == "opaque"
    assert place(Process("n", 1, "ray::A.serve", threads=(main,)))[0] == "opaque"
    # A method of an async actor that blocks its loop.
    blocked = replace(loop, stack=(*QUEUE, *loop.stack), ticks=0, switches=0)
    assert place(Process("n", 1, "ray::A.serve", threads=(main, blocked)))[0] == "user"
    one = process(1, QUEUE).threads[0]
    two = replace(one, tid=2, stack=(*ALL_REDUCE, *RAY))
    assert place(Process("n", 1, "ray::A.x", threads=(one, two)))[0] == "collective"
    moving = replace(one, tid=3, before=(*GET, *RAY), ticks=9, switches=9)
    assert place(Process("n", 1, "ray::A.x", threads=(one, two, moving)))[1] == "moving"
    # FSDP's forward calls the user's module: this is no collective.
    forward = (
        Frame("/w/model.py", "forward", 3),
        Frame(SITE + "torch/distributed/fsdp/fully_sharded.py", "forward", 9),
    )
    assert place(process(1, forward))[0] == "user"
    # Packages of the job are not libraries that wait.
    assert place(process(1, (Frame(SITE + "verl/workers/actor.py", "update", 3),)))[0] == "user"
    assert place(replace(process(1, QUEUE), title="python"), driver=True)[0] == "user"
    read = Process("n", 1, note="Permission denied", states=("T", "T"))
    assert place(read) == ("unread", "stopped")
