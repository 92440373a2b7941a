# SPDX-License-Identifier: Apache-2.0
"""Snapshots of pretended clusters, and what the commands print about them."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from fairlead_inspect import _command
from fairlead_inspect.model import Actor, Call, Frame, Job, Node, Process, Reference, Snapshot, Thread

NOW, NODE, JOB = 10_000.0, "n1", "01000000"
SITE = "/v/lib/python3.11/site-packages/"
RAY = (
    Frame(SITE + "ray/_private/function_manager.py", "X.<locals>.actor_method_executor", 740),
    Frame(SITE + "ray/_private/worker.py", "Worker.main_loop", 1069),
    Frame(SITE + "ray/_private/workers/default_worker.py", "<module>", 323),
)
ALL_REDUCE = (
    Frame(SITE + "torch/distributed/distributed_c10d.py", "all_reduce", 3000),
    Frame(SITE + "torch/distributed/c10d_logger.py", "wrapper", 81),
    Frame("/w/step.py", "train", 118),
)
BARRIER = (Frame(SITE + "torch/distributed/distributed_c10d.py", "barrier", 4000), Frame("/w/step.py", "train", 120))
JOIN = (Frame(SITE + "torch/distributed/rendezvous.py", "_env_rendezvous_handler", 1), Frame("/w/step.py", "setup", 9))
QUEUE = (
    Frame("/py/lib/python3.11/threading.py", "Condition.wait", 327),
    Frame("/py/lib/python3.11/queue.py", "Queue.get", 171),
    Frame("/w/data.py", "next_batch", 33),
    Frame("/w/step.py", "train", 100),
)
LOOP = (Frame("/w/data.py", "spin", 40), Frame("/w/step.py", "train", 101))
GET = (Frame(SITE + "ray/_private/worker.py", "get", 3009), Frame("/w/main.py", "main", 5))
IDLE = None


def thread(pid, stack, *, age=100.0, ticks=0, switches=0, before=None, states=("S", "S"), driver=False, inside=False):
    base = (Frame("/w/main.py", "<module>", 1),) if driver else RAY
    earlier = None if before is None else (*before, *base)
    return Thread(pid, "MainThread", (*stack, *base), earlier, states, ticks, switches, age, inside)


def process(pid, stack, *, refs=(), env=None, state="S", driver=False, title="ray::Worker.train", polls=False, **how):
    if stack is IDLE:
        threads = (Thread(pid, "MainThread", RAY[1:], None, ("S", "S"), 0, 0, 1.0),)
        title = "ray::Worker"
    else:
        one = thread(pid, stack, driver=driver, states=how.pop("states", (state, state)), **how)
        threads = (replace(one, references=tuple(Reference(ref, any_, polls) for ref, any_ in refs)),)
    return Process(
        NODE,
        pid,
        title,
        (state, state),
        threads[0].ticks,
        1.0,
        threads,
        env or {},
    )


def task(actor_id, number=1):
    return f"{number:016x}{actor_id}"


def ref(actor_id, number=1, *, any_=False):
    return f"{task(actor_id, number)}00000001", any_


def actor(number, class_name="Worker", **given):
    return Actor(
        **{
            "actor_id": actor_id(number),
            "class_name": class_name,
            "job_id": JOB,
            "node_id": NODE,
            "pid": 1000 + number,
            "worker_id": f"w{number}",
            "owner": "driver",
            "created": 100.0 + number,
            **given,
        }
    )


def actor_id(number):
    return f"{number:024x}{JOB}"


def environ(rank, size, port=1):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "h", "MASTER_PORT": str(port)}


def label_of(rank, size, *, group="policy", waiting=False, step=None, **coords):
    """Return what a Fairlead group says of one of its members."""
    return {
        "rank": rank,
        "group": group,
        "world_size": size,
        "coords": coords,
        "waiting": waiting,
        "step": step,
    }


def ranks_of(stacks, *, driver_waits=True, how=None, **given):
    """Return a job whose actors stand at some stacks, with ranks in their environment."""
    size = len(stacks)
    actors = [actor(number) for number in range(size)]
    processes = [
        process(1000 + number, stack, env=environ(number, size), **(how or {}).get(number, {}))
        for number, stack in enumerate(stacks)
    ]
    refs = [ref(one.actor_id) for one in actors] if driver_waits else []
    driver = process(811, GET if refs else QUEUE, refs=refs, driver=True, title="python")
    calls = tuple(Call(task(one.actor_id), "Worker.train", one.actor_id, "RUNNING", NOW - 200) for one in actors)
    return look(actors, [*processes, driver], calls=calls, **given)


def look(actors, processes, **given):
    return Snapshot(
        **{
            "looked_at": NOW,
            "jobs": (Job(JOB, "train.py", 811, NODE, "driver"),),
            "actors": tuple(actors),
            "processes": tuple(processes),
            "nodes": (Node(NODE, "10.0.0.1"),),
            **given,
        }
    )


def run(snapshot, *arguments):
    """Run a command on this machine, where it looks at a snapshot, or at one after the other: status and output."""
    looks, printed = snapshot if isinstance(snapshot, Iterator) else itertools.repeat(snapshot), io.StringIO()
    look_here = mock.patch.object(_command, "look_here", side_effect=looks)
    with look_here, contextlib.redirect_stdout(printed), mock.patch.dict(os.environ, COLUMNS="200"):
        status = _command.main([*arguments, "--here"])
    return status, printed.getvalue()


def as_json(snapshot, command="why"):
    """Return what a command prints as JSON."""
    return json.loads(run(snapshot, command, "--json")[1])


def worker_sets(snapshot):
    return [one for job in as_json(snapshot)["jobs"] for one in job["worker_sets"]]
