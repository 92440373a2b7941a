# SPDX-License-Identifier: Apache-2.0
"""Processes that wait inside of Fairlead: for resources, for ports, and for workers that start."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, GET, NOW, SITE, actor, look, process, ref, run

from fairlead_inspect import diagnose, exit_status
from fairlead_inspect._node.pyspy import dump, find_pyspy
from fairlead_inspect._node.requests import FUNCTIONS
from fairlead_inspect.model import Frame, Request
from fairlead_placement._nodes.ports import lease_ports
from fairlead_placement._reserve.wait import reserve
from fairlead_workergroup._membership.provision import wait_started

SLEEP = "time.sleep"


def waiting(function, *, since_s=75.0, limit_s=180.0, driver=True, number=0, wants="8 x 1 CPU", lacks=""):
    """Return a process that waits in a function of Fairlead, and wakes up now and then."""
    stack = (Frame(SITE + "fairlead_placement/wait.py", function, 90), Frame("/w/main.py", "main", 12))
    before = (Frame(SITE + "fairlead_placement/head.py", "ask_head", 9), *stack)  # its polls look like progress
    seen = process(811 if driver else 1000 + number, stack, driver=driver, ticks=4, switches=4, before=before)
    request = Request(function, wants, lacks, since_s, limit_s)
    threads = [replace(thread, request=request, waits_on=SLEEP) for thread in seen.threads]
    return replace(seen, threads=tuple(threads), title="python" if driver else seen.title)


def test_reservation_is_named():
    """A driver that waits for resources is no all-clear: the verdict says who waits for what, and since when."""
    snapshot = look([], [waiting("reserve", lacks="what it needs is not free")])
    status, printed = run(snapshot, "why")
    assert status == 1
    said = " ".join(printed.split())
    assert "HANGS the driver on 10.0.0.1, pid 811, for 1m 15s of 3m 0s: waits in reserve for 8 x 1 CPU, and" in said
    assert "what it needs is not free" in said
    assert "main.py:12 main" in printed
    assert "Nothing hangs" not in printed


@pytest.mark.parametrize("function", ["reserve", "lease_ports"])
def test_young_wait_is_undecided(function):
    """Whoever has begun to wait a moment ago blames nobody, and gets no all-clear."""
    found = diagnose(look([], [waiting(function, since_s=3.0)]))
    assert [(one.blames, one.since_s, one.limit_s) for one in found] == [(False, 3.0, 180.0)]
    assert exit_status(found) == 4


def test_others_may_free_what_is_missing():
    """A reservation is not blamed while other processes of the job work."""
    busy = process(1001, (Frame("/w/a.py", "step", 2),), ticks=90, switches=9, before=(Frame("/w/a.py", "step", 9),))
    found = diagnose(look([actor(1)], [waiting("reserve"), busy]))
    assert [(one.kind, one.blames) for one in found] == [("pending", False)]
    assert exit_status(found) == 4


def test_controller_that_waits():
    """An actor that waits for resources is named, and not the driver that waits for it."""
    driver = process(811, GET, refs=[ref(actor(1).actor_id)], driver=True, title="python")
    found = diagnose(look([actor(1, "Controller")], [driver, waiting("reserve", driver=False, number=1)]))
    assert [(one.kind, one.blames, [of.class_name for of in one.actors]) for one in found] == [
        ("pending", True, ["Controller"])
    ]


def test_start_of_workers():
    """A driver that waits for workers to start names those that Ray has not started."""
    pending = [actor(number, state="PENDING_CREATION", pid=0, created=NOW - 90) for number in (1, 2)]
    driver = waiting("wait_started", wants="trainer", limit_s=None, since_s=90.0)
    found = diagnose(look(pending, [driver]))
    assert [one.kind for one in found] == ["pending", "pending"]
    assert exit_status(found) == 4
    soon = diagnose(look([actor(1)], [waiting("wait_started", wants="trainer", limit_s=None, since_s=2.0)]))
    assert [(one.kind, one.moves) for one in soon] == [("working", True)]
    late = diagnose(look([], [driver]))
    assert [one.kind for one in late] == ["undecided"]
    assert exit_status(late) == 4


def test_limit_is_shown():
    """What is not late yet shows since when, and after how many seconds it will be."""
    stacks = [ALL_REDUCE, (Frame("/w/data.py", "read", 4),)]
    actors = [actor(number) for number in range(2)]
    env = [{"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"} for number in range(2)]
    seen = [process(1000 + number, stack, env=env[number], age=12.0) for number, stack in enumerate(stacks)]
    status, printed = run(look(actors, seen), "why")
    assert status == 0
    assert "TOO EARLY" in printed
    assert "for 12 s of 1m 0s: others wait for it" in printed


@pytest.mark.parametrize("function", [reserve, lease_ports, wait_started])
def test_variables_are_those_of_the_functions(function):
    """The variables that are read from outside are those of the functions that wait."""
    code = function.__code__
    (names,) = [names for place, names in FUNCTIONS.items() if place.endswith(" " + code.co_name)]
    assert code.co_filename.endswith(next(place for place in FUNCTIONS if FUNCTIONS[place] is names).split()[0])
    assert {*filter(None, names)} <= {*code.co_varnames, *code.co_cellvars}


PROGRAM = """
import time
def reserve(request):
    wants, lacks, limit = "8 x 1 CPU for trainer", "what it needs is not free", 180.0
    began, secret = time.monotonic() - 20, "hunter2"
    print(flush=True)
    while True:
        time.sleep(0.01)
reserve(None)
"""


def test_request_is_read_from_memory(tmp_path):
    """What a thread waits for is read from the variables of the function, and no other value is."""
    program = tmp_path / "fairlead_placement" / "_reserve" / "wait.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as started:
        try:
            started.stdout.readline()
            threads, note = dump(started.pid, find_pyspy(), -1, time.monotonic() + 60)
        finally:
            started.kill()
    assert not note
    function, wants, lacks, since_s, limit_s = threads[0]["request"]
    assert (function, lacks, limit_s) == ("reserve", "what it needs is not free", 180.0)
    assert wants == "8 x 1 CPU for trainer"
    assert 20 <= since_s < 80
    assert "hunter2" not in repr(threads)
