# SPDX-License-Identifier: Apache-2.0
"""What is said about groups that were looked at from outside: the diagnosis, folded stacks and tables. Pure."""

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from fairlead_inspect import _group_commands as command
from fairlead_inspect import _tables
from fairlead_inspect._command import main
from fairlead_inspect._diagnosis import diagnose
from fairlead_inspect._groups import SeenGroup, SeenWorker
from fairlead_inspect._stacks import fold_stacks
from fairlead_inspect._tables import draw_findings, draw_groups, draw_stacks, draw_status
from fairlead_sharding import NamedSharding
from fairlead_workergroup.spi import RegisteredGroup

HOST = '  File "/x/fairlead_workergroup/_remote/host.py", line 200 in delegate\n'
WAITING = (
    "Current thread 0x{id} (most recent call first):\n"
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2 in all_reduce\n'
    '  File "/home/train.py", line 15 in train\n' + HOST
)
COMPUTING = 'Current thread 0x{id} (most recent call first):\n  File "/home/train.py", line 14 in train\n' + HOST
# A barrier that nobody knows.
OWN_WAIT = 'Current thread 0x{id} (most recent call first):\n  File "/home/own.py", line 3 in barrier\n' + HOST
MESH = NamedSharding.from_shape(dp=2, tp=2)


def busy(rank, stacks, *, seconds=60.0, mesh=MESH, calls=5, method="train"):
    return SeenWorker(
        rank,
        mesh.get_worker_coords(rank),
        "ab" * 28,
        "10.0.0.1",
        100 + rank,
        state="busy",
        method=method,
        running_s=seconds,
        since_progress_s=seconds,
        calls=calls,
        stacks=stacks.format(id=f"{rank:016x}"),
        memory_bytes=2**20,
    )


def idle(rank, *, calls=4, mesh=MESH):
    return replace(busy(rank, "", mesh=mesh, calls=calls), state="idle", method=None, running_s=0.0)


def group(workers, mesh=MESH, driver="runs"):
    facts = {"job_id": "01000000", "worker_id": "w", "node_id": "n", "host": "head", "pid": 7, "started": 1}
    found = RegisteredGroup(
        "0123456789", "policy", "Trainer", mesh.shape, mesh.to_dict(), 0.0, "ns", 1, facts, members=()
    )
    return SeenGroup(found, tuple(workers), driver, 75.0)


def findings(workers, **changes):
    return diagnose(group(workers, **changes), stuck_after_s=10.0)


def test_late_in_the_same_method():
    """The rank that has not reached the collective is late, with its place, and those that wait for it."""
    (found,) = findings([busy(0, WAITING), busy(1, WAITING), busy(2, COMPUTING), busy(3, WAITING)])
    assert (found.kind, found.ranks, found.coords, found.method) == ("late", (2,), {"dp": 1, "tp": 0}, "train")
    assert (found.where, found.since_s, found.waiting) == ("/home/train.py:14 in train", 60.0, (0, 1, 3))
    assert found.text == (
        "Rank 2 (dp=1, tp=0) on node abababab (10.0.0.1), pid 102 is in 'train' at train.py:14 in train for 60 s, "
        "without progress for 60 s. 3 workers (ranks 0-1, 3) wait for it along dp, tp in 'train' at train.py:15 in "
        "train (all_reduce)."
    )


def test_axis():
    """When only the peers along one axis wait, that axis is named."""
    (found,) = findings([busy(0, WAITING), busy(1, COMPUTING), idle(2), idle(3)])
    assert (found.ranks, found.axes, found.waiting) == ((1,), ("tp",), (0,))


def test_most_are_late():
    """Those in a collective wait, also when they are few: the others are late, with what they have in common."""
    (found,) = findings([busy(0, WAITING), busy(1, WAITING), busy(2, COMPUTING), busy(3, COMPUTING)])
    assert (found.kind, found.ranks, found.coords, found.axes) == ("late", (2, 3), {"dp": 1}, ("dp",))


def test_not_called():
    """Workers that wait for one that was not called, because the driver is stopped, are explained by both."""
    late, driver = findings([busy(0, WAITING), busy(1, WAITING), busy(2, WAITING), idle(3)], driver="stopped")
    assert (late.kind, late.ranks) == ("late", (3,))
    assert "is idle: not called, or done" in late.text
    assert driver.text.startswith("The driver (pid 7 on head) is stopped (SIGSTOP)")


def test_unknown_wait():
    """Without a collective that is known, most workers at one line wait for the one that is elsewhere."""
    (found,) = findings([busy(0, OWN_WAIT), busy(1, OWN_WAIT), busy(2, OWN_WAIT), busy(3, COMPUTING)])
    assert (found.kind, found.ranks) == ("late", (3,))


def test_counts_of_processes():
    """Workers that wait in the same call are not late, whatever number their processes give the call."""
    workers = [busy(0, WAITING, calls=9), busy(1, WAITING, calls=1), busy(2, WAITING, calls=5)]
    (found,) = findings([*workers, busy(3, WAITING)])
    assert (found.kind, found.ranks, found.wrong) == ("stuck", (0, 1, 2, 3), True)
    assert found.text.endswith(", and no worker is elsewhere.")
    (found,) = findings([*workers, busy(3, COMPUTING)])
    assert (found.kind, found.ranks, found.waiting) == ("late", (3,), (0, 1, 2))


def test_last_to_wait():
    """A worker that has just begun to wait in the call is not late; one that computes in it is."""
    arrived = replace(busy(2, "", seconds=3.0), waiting=True)
    (found,) = findings([busy(0, WAITING), busy(1, WAITING), arrived, busy(3, COMPUTING, seconds=3.0)])
    assert (found.kind, found.ranks, found.waiting) == ("late", (3,), (0, 1, 2))


def test_chosen_ranks(monkeypatch):
    """A selection chooses the findings that are shown; the other workers are looked at too."""
    monkeypatch.setattr(command, "look_at_groups", lambda groups, **_: [seen])
    seen = group([busy(0, WAITING), busy(1, WAITING), busy(2, WAITING), busy(3, COMPUTING)])
    for chosen in ([0, 1], [3]):  # they wait for it; it is late
        shown, (found,) = command.examine(seen, 10.0, chosen)
        assert [one.rank for one in shown.workers] == chosen
        assert (found.kind, found.ranks, found.waiting) == ("late", (3,), (0, 1, 2))
    dead = replace(idle(1), state="dead")
    seen = group([busy(0, WAITING), dead, busy(2, WAITING), busy(3, WAITING)])
    assert [(one.kind, one.ranks) for one in command.examine(seen, 10.0, [0])[1]] == [
        ("dead", (1,)),
        ("stuck", (0, 2, 3)),
    ]
    seen = group([busy(0, WAITING), busy(1, COMPUTING), idle(2), idle(3)])
    assert command.examine(seen, 10.0, [2, 3])[1] == []


def test_polling_worker(monkeypatch):
    """A worker that polls in another line of its barrier is looked at again; one that stays where it is, is late."""
    polling = OWN_WAIT.replace("line 3", "line 4")
    asked = []

    def look(groups, *, ranks, **_):
        asked.append(set(ranks))
        return [group([busy(rank, COMPUTING if rank == 3 else OWN_WAIT, mesh=wide) for rank in ranks], mesh=wide)]

    monkeypatch.setattr(command, "look_at_groups", look)
    wide = NamedSharding.from_shape(dp=4, tp=2)
    stacks = [OWN_WAIT, polling, OWN_WAIT, COMPUTING, OWN_WAIT, OWN_WAIT, OWN_WAIT, OWN_WAIT]
    seen = group([busy(rank, there, mesh=wide) for rank, there in enumerate(stacks)], mesh=wide)
    assert [one.ranks for one in diagnose(seen, stuck_after_s=10.0)] == [(1,), (3,)]
    again = command.look_again(seen, 10.0)
    assert asked == [{1, 3}, {3}]
    (found,) = diagnose(again, stuck_after_s=10.0)
    assert (found.kind, found.ranks, found.waiting) == ("late", (3,), (0, 1, 2, 4, 5, 6, 7))


@pytest.mark.parametrize(
    "workers",
    [
        [idle(rank) for rank in range(4)],
        [busy(rank, COMPUTING, seconds=3.0) for rank in range(4)],
        [busy(0, COMPUTING), idle(1), idle(2), idle(3)],
        [busy(rank, COMPUTING.replace("14", str(rank))) for rank in range(4)],
    ],
    ids=["idle", "just started", "one that is called alone", "everywhere"],
)
def test_healthy(workers):
    """Nothing is wrong with workers that are idle, make progress, or compute at different lines."""
    assert findings(workers) == []


def test_dead():
    """Those that wait for a dead rank are explained by it."""
    dead = replace(idle(1), state="dead", note="Killed by SIGKILL.")
    found, waiting = findings([busy(0, WAITING), dead, busy(2, WAITING), busy(3, WAITING)])
    assert (found.kind, found.ranks, found.wrong) == ("dead", (1,), True)
    assert found.text.endswith("is dead. Killed by SIGKILL.")
    assert (waiting.kind, waiting.ranks, waiting.wrong) == ("stuck", (0, 2, 3), False)
    assert waiting.text.endswith("for 60 s, for rank(s) 1.")


def test_stopped():
    """A process that is stopped is named, with how it is continued."""
    stopped = replace(busy(1, ""), stopped=True)
    found, _ = findings([busy(0, WAITING), stopped, busy(2, WAITING), busy(3, WAITING)])
    assert (found.kind, found.ranks) == ("stopped", (1,))
    assert "`kill -CONT 101`" in found.text


def test_silent_node():
    """A worker whose node did not answer is reported, not guessed about."""
    silent = replace(idle(3), state="unknown", note="No answer.")
    (found,) = findings([idle(0), idle(1), idle(2), silent])
    assert (found.kind, found.ranks) == ("unknown", (3,))


def test_orphaned():
    """A group whose driver has died is shown as orphaned until its agents end, and `why` says so."""
    seen = group([idle(rank) for rank in range(4)], driver="gone")
    (found,) = diagnose(seen, stuck_after_s=10.0)
    assert (found.kind, found.wrong) == ("driver", True)
    assert found.text.startswith("The driver (pid 7 on head) has ended.")
    assert "orphaned: its driver is gone" in drawn(draw_groups([seen]), 200)


def test_stuck_without_a_place():
    """A worker without progress for minutes is stuck, also when nobody waits for it."""
    (found,) = findings([busy(0, COMPUTING, seconds=400.0), idle(1), idle(2), idle(3)])
    assert (found.kind, found.ranks) == ("stuck", (0,))


def test_fold():
    """Equal stacks are shown once with their ranks; threads have different ids and are equal all the same."""
    folded = fold_stacks([*(busy(rank, WAITING) for rank in (0, 1, 3)), busy(2, COMPUTING)])
    assert [one.ranks for one in folded] == [(0, 1, 3), (2,)]
    assert folded[1].stacks == 'train (most recent call first):\n  File "/home/train.py", line 14 in train'
    folded = fold_stacks([busy(0, WAITING), busy(1, WAITING), idle(2)], threads=True)
    assert [one.ranks for one in folded] == [(0, 1), (2,)]
    assert "host.py" in folded[0].stacks


def drawn(renderable, width):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@pytest.mark.parametrize("width", [80, 200])
def test_many_rows_fold(width):
    """Of 128 workers, those that do the same share a line, and nothing is cut off at 80 columns."""
    mesh = NamedSharding.from_shape(dp=16, tp=8)
    workers = [busy(rank, WAITING, mesh=mesh) for rank in range(127)] + [busy(127, COMPUTING, mesh=mesh, method="save")]
    seen = group(workers, mesh=mesh)
    shown = drawn(draw_status(seen), width)
    assert len(shown.splitlines()) < 20
    assert "0-126" in shown
    assert "save" in shown
    assert len(drawn(draw_status(seen, every=True), 200).splitlines()) > 128
    found = diagnose(seen, stuck_after_s=10.0)
    assert "LATE  Rank 127" in drawn(draw_findings(seen, found), width)
    assert "ranks 0-126" in drawn(draw_stacks(fold_stacks(workers)), width)
    assert "policy" in drawn(draw_groups([seen]), width)
    json.dumps([asdict(one) for one in found])


def test_weights_in_the_table(monkeypatch):
    """A group whose tensors a link brings shows the version of each rank and its age; other groups have no column."""
    seen = group([busy(0, WAITING), busy(1, WAITING), busy(2, WAITING)])
    assert "weights" not in drawn(draw_status(seen), 160)
    ages = {0: (12, 61.0), 1: (12, 95.0), 2: (None, 0.0)}
    workers = [replace(one, weights=ages[one.rank][0], weights_age_s=ages[one.rank][1]) for one in seen.workers]
    assert "12, 1m 1s" in drawn(draw_status(group(workers)), 160)
    monkeypatch.setattr(_tables, "MOST_ROWS", 1)
    folded = drawn(draw_status(group(workers)), 240)
    assert "0-1" in folded
    assert "12, 1m 1s - 1m 35s" in folded


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["status", "--at", "dp"], ["why", "--after", "x"], ["groups", "--at"]],
)
def test_usage(arguments, capsys):
    """Wrong arguments end with status 2, before anything is attached to."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "groups", "status", "stacks", "why"])
def test_help(command, capsys):
    """Help names the exit statuses."""
    with pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0
    assert "exit status:" in capsys.readouterr().out
