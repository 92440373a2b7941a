# SPDX-License-Identifier: Apache-2.0
"""What a probe reads of real processes of this machine, and that it changes nothing in them."""

import ast
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from fairlead_inspect._fanout import parse
from fairlead_inspect._node.environ import read_environ
from fairlead_inspect._node.look import look
from fairlead_inspect._node.processes import read_clock, read_last_run
from fairlead_inspect._node.pyspy import dump

SECRET = "a-secret-of-the-job"
PROGRAM = """
    import os, queue, subprocess, sys, time

    os.environ.update(RANK="3", WORLD_SIZE="8", MASTER_ADDR="10.0.0.1", TOKEN="a-secret-of-the-job")
    local = "a-secret-of-the-job"

    def hang(secret):
        if sys.argv[1] == "spin":
            while True:
                pass
        subprocess.Popen(["sleep", "60"])
        print("ready", flush=True)
        queue.Queue().get()

    if sys.argv[1] == "spin":
        print("ready", flush=True)
    hang(local)
"""


@pytest.fixture
def start(tmp_path):
    """Start a program that hangs, as a worker of Ray would be named."""
    script, started = tmp_path / "train.py", []
    script.write_text(textwrap.dedent(PROGRAM))

    def start(how="wait", by=()):
        command = [*by, sys.executable, str(script), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def see(pid, window_s=0.3):
    answer = look([pid], [], window_s, 60.0)
    assert SECRET not in repr(answer)
    (process,) = parse("n", answer)
    return process, answer["notes"]


@pytest.mark.parametrize("processor", sorted(os.sched_getaffinity(0))[:2])
def test_waiting_process(start, processor):
    """A process that waits: its stack, its variables of now, how long ago it ran, and its child.

    The processors of a machine have clocks of their own, which differ.
    """
    allowed, began = os.sched_getaffinity(0), time.monotonic()
    os.sched_setaffinity(0, {processor})
    try:
        pid = start()
    finally:
        os.sched_setaffinity(0, allowed)

    def is_still(thread):
        seen = thread.ticks, thread.switches, thread.states
        return seen == (0, 0, ("S", "S")) and thread.stack[0].function == "Condition.wait"

    def measure():
        """Look at the process, and return since when it stands by the clock of its processor, before and after."""
        ran, on = read_last_run(pid, pid) or (0.0, processor)
        before = read_clock(on)
        process, notes = see(pid)
        after = read_clock(on)
        return process, notes, (before - ran, after - ran) if read_last_run(pid, pid) == (ran, on) else None

    process, notes, since = measure()
    while not is_still(process.threads[0]) or since is None:
        assert time.monotonic() < began + 60, process
        process, notes, since = measure()  # it has not reached its queue, or was not scheduled
    assert notes == []
    assert process.environ == {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}
    (thread,) = process.threads
    assert [one.function for one in thread.stack if one.file.endswith("train.py")][:2] == ["hang", "<module>"]
    assert not thread.waits_inside
    # Not the 0.3 s between the looks: this clock stands still while the host runs something else.
    assert since[0] <= thread.last_ran_s <= since[1] < time.monotonic() - began
    assert [one.title for one in process.children] == ["sleep"]
    assert process.memory_bytes > 2**20


def test_spinning_process(start):
    """A process that uses a core stands at one line, and has run just now.

    Its stack is read while it runs, and is torn now and then.
    """
    pid, deadline = start("spin"), time.monotonic() + 60
    while True:
        process, _ = see(pid, 1.0)
        (thread,) = process.threads
        assert thread.ticks > 2
        assert thread.before is not None
        if thread.stack[0].function == thread.before[0].function == "hang":
            break
        assert time.monotonic() < deadline, process


def test_stopped_process(start):
    """A stopped process is read too, stays stopped, and has the same signals pending, blocked and caught as before."""

    names = ("SigPnd", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "TracerPid")

    def state():
        with open(f"/proc/{pid}/status") as file:
            return psutil.Process(pid).status(), [line for line in file if line.startswith(names)]

    pid = start()
    before = state()[1:]
    see(pid)
    assert state()[1:] == before
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    before = state()
    process, _ = see(pid)
    assert state() == before
    assert before[0] == psutil.STATUS_STOPPED
    assert process.states == ("T", "T")
    assert process.threads
    os.kill(pid, signal.SIGCONT)


def test_ended_process(start):
    """A process that has ended is left out."""
    assert look([2**22 + 1], [], 0.0, 60.0)["processes"] == []
    assert read_environ(2**22 + 1) == {}


def test_process_that_ends_while_it_is_read(start, monkeypatch):
    """The memory of a process that has just ended is empty, and is not read for ever."""
    pid, real, reads = start(), os.pread, itertools.count(1)

    def read(*arguments):
        if next(reads) == 3:  # the first variable, after the address of all and their addresses
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return real(*arguments)

    monkeypatch.setattr(os, "pread", read)
    assert read_environ(pid) == {}


def test_without_pyspy(start, monkeypatch):
    """Without py-spy, and without the right to read memory, the reason is given, and the rest is still there."""
    pid = start()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process, notes = see(pid)
    assert "pip install py-spy" in notes[0]
    assert "pip install py-spy" in process.note
    assert (process.threads, process.environ["RANK"]) == ((), "3")
    assert dump(pid, "/bin/false", -1, time.monotonic() + 60) == ([], "py-spy failed")
    real = open

    def refuse(path, *how, **more):
        if str(path).endswith("/mem"):
            raise PermissionError(path)
        return real(path, *how, **more)

    monkeypatch.setattr("builtins.open", refuse)
    assert read_environ(pid) == {}  # these were set after its start


def test_container(start, in_container):
    """The threads of a process in another pid namespace have counters and states of this one's."""
    outside = start(by=in_container())
    (pid,) = [child.pid for child in psutil.Process(outside).children()]
    (thread,) = see(pid)[0].threads
    assert (thread.tid, thread.ticks is None, all(thread.states)) == (pid, False, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_another_user(start):
    """Another user reads the state, title, counters and start, and learns why stacks and variables are missing."""
    pid, (read, write) = start(), os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(write, repr(look([pid], [], 0.2, 60.0)["processes"]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        (seen,) = ast.literal_eval(file.read())
    assert [seen[name] for name in ("threads", "environ", "file", "records")] == [[], {}, "", []]
    assert "ermission" in seen["note"]
    assert (len(seen["children"]), seen["memory_bytes"] > 2**20) == (1, True)


def test_clock():
    """The clock of each processor advances, and is that by which threads have run there; this thread stays free."""
    if read_last_run("self", os.getpid()) is None:
        pytest.skip("this kernel does not say when a thread ran last")
    allowed = os.sched_getaffinity(0)
    for processor in sorted(allowed)[:2]:
        first = read_clock(processor)
        time.sleep(0.05)
        assert read_clock(processor) > first
    ran, processor = read_last_run("self", os.getpid())
    assert 0 <= read_clock(processor) - ran < 60
    assert read_clock(100_000) is None
    assert os.sched_getaffinity(0) == allowed


def test_refused(tmp_path, monkeypatch):
    """The note is py-spy's reason, even where a variable asks programs in Rust for a backtrace behind it."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    program = tmp_path / "py-spy"
    reason, frame = '>&2 echo "    1: Permission denied (os error 13)"', '>&2 echo "  10: main"'
    program.write_text(f'#!/bin/sh\n{reason}\n[ "$RUST_BACKTRACE" = 0 ] || {frame}\nexit 1\n')
    program.chmod(0o755)
    note = "Permission denied (os error 13)"
    assert dump(os.getpid(), str(program), -1, time.monotonic() + 60) == ([], note)
