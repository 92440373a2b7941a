# SPDX-License-Identifier: Apache-2.0
"""The numbers of collectives in dumps of torch's flight recorder, and the rank that the verdict blames.

The dumps are made by hand, with the fields that torch 2.13 writes (version 2.10 of the format). The planted hang
"skipped" in integration-tests/inspect reads dumps that torch has written.
"""

import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, QUEUE, SITE, ranks_of

from fairlead_inspect import diagnose
from fairlead_inspect._node.collectives import read_dump
from fairlead_inspect._node.look import look
from fairlead_inspect.model import Frame, Record

ENVIRON = {"RANK": "3", "WORLD_SIZE": "4"}
SYNC = (Frame(SITE + "torch/cuda/__init__.py", "synchronize", 900), Frame("/w/step.py", "log", 7))


def start_tick():
    """Return the tick at which this process began, as in /proc/PID/stat."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def entry(number, group=("0", "default_pg"), name="nccl:all_reduce", state="completed", at=0, **more):
    return {
        "record_id": number - 1,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "time_created_ns": int((time.time() - 600 + at) * 1e9),
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3245}],
        **more,
    }


def make_dump(*entries, **more):
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "1": {"name": "1", "desc": "tp", "ranks": "[2, 3]"},
    }
    return {"version": "2.10", "entries": [*entries], "pg_config": config, "pg_status": {}, **more}


@pytest.fixture
def read(tmp_path):
    """Write a dump, and read it as that of this process."""

    def read(content, age_s=0.0, **environ):
        path = tmp_path / "rank_3"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
        os.utime(path, (time.time() - age_s,) * 2)
        # A minute ago: files of these tests are up to a few seconds old, as this process may be.
        started = max(0, start_tick() - 60 * os.sysconf("SC_CLK_TCK"))
        return read_dump(os.getpid(), started, {**ENVIRON, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_", **environ})

    return read


def test_two_communicators(read):
    """Each communicator has its last collective begun and done; a send is open; what nobody began has the number 0."""
    send = entry(1, ("1", "tp"), "nccl:send 3->2", "started", is_p2p=True)
    dump = make_dump(entry(1), entry(2), entry(3, name="nccl:broadcast", state="started", at=10), send)
    rows, note = read(dump)
    first, second = (Record(*row) for row in rows)
    assert note == ""
    assert (first.group, first.size, first.begun, first.done) == ("0 default_pg 0,1,2,3", 4, 3, 2)
    assert (first.operation, first.sends, first.source) == ("broadcast", False, "flight recorder")
    assert (second.group, second.size, second.begun, second.sends) == ("1 tp 2,3", 2, 0, True)
    assert first.age_s < 5
    assert 585 < first.stood_s < 595


def test_full_buffer(read):
    """Once the oldest entries are gone, nothing is known of a communicator without any."""
    (row,), _ = read(make_dump(entry(2501, state="scheduled")))
    assert row[1:5] == ("0 default_pg 0,1,2,3", 4, 2501, 0)


def test_gloo(read):
    """Gloo leaves the states as they were: the status says what is over, and the default group has the world's size."""
    dump = make_dump(
        entry(1, state="scheduled", name="gloo:all_reduce"),
        entry(2, state="scheduled", name="gloo:barrier"),
        pg_config={"": {"name": "", "desc": "", "ranks": "[]"}},
        pg_status={"0": {"last_enqueued_collective": 2, "last_started_collective": -1, "last_completed_collective": 1}},
    )
    named = [row for row in read(dump)[0] if row[2]]
    assert [row[1:6] for row in named] == [("0 default_pg", 4, 2, 1, "barrier")]


class Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def test_hostile_files(read, monkeypatch, tmp_path):
    """A program, a torn file, other contents, a new version, a huge file and a pipe are refused, with the reason."""
    monkeypatch.setattr(os, "system", pytest.fail)
    whole = pickle.dumps(make_dump(entry(1)), protocol=2)
    attacks = [pickle.dumps(make_dump(Attack(), entry(1))), b"cbuiltins\neval\n(S'1'\ntR."]
    found = {what: read(one) for what, one in (("program", attacks[0]), ("eval", attacks[1]), ("torn", whole[:-50]))}
    found |= {"list": read(pickle.dumps([1])), "text": read(b"{}"), "empty": read(b"")}
    found["fields"] = read({"version": "2.10", "entries": [{"record_id": "x"}]})
    found["version"] = read(make_dump(version="3.0"))
    found["huge"] = read(b"x" * (64 * 2**20 + 1))
    (tmp_path / "rank_3").unlink()
    os.mkfifo(tmp_path / "rank_3")
    started = start_tick()
    environ = {**ENVIRON, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    found["pipe"] = read_dump(os.getpid(), started, environ)
    assert all(rows == [] and note for rows, note in found.values())
    assert "refers to" in found["program"][1]
    assert "larger than" in found["huge"][1]
    assert "version 3.0" in found["version"][1]
    assert "not a file" in found["pipe"][1]


def test_which_file(read, tmp_path):
    """The newest file of the two variables counts; one that is older than the process is of another process."""
    old = tmp_path / "old_3"
    old.write_bytes(pickle.dumps(make_dump(entry(7)), protocol=2))
    os.utime(old, (time.time() - 1,) * 2)
    rows, _ = read(make_dump(entry(9)), TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{tmp_path}/old_")
    assert rows[0][3] == 9 or rows[1][3] == 9
    rows, _ = read(make_dump(entry(9)), 0.5, TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/old_")
    assert max(row[3] for row in rows) == 7
    assert read(make_dump(entry(9)), 10**6) == ([], "")
    assert read_dump(os.getpid(), 0, {"RANK": "3"}) == ([], "")
    assert read_dump(os.getpid(), 0, {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}) == ([], "")


def test_look_reads_dumps(tmp_path, monkeypatch):
    """A look reads the dump of a process by the variables that it has now, and says why it cannot read another one."""
    (tmp_path / "rank_3").write_bytes(pickle.dumps(make_dump(entry(1)), protocol=2))
    for name, value in {**ENVIRON, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}.items():
        monkeypatch.setenv(name, value)
    answer = look([os.getpid()], [], 0.0, 60.0)
    (process,) = answer["processes"]
    assert sorted(row[3] for row in process["records"]) == [0, 1]
    (tmp_path / "rank_3").write_bytes(b"")
    assert any("rank_3 is no dump" in note for note in look([os.getpid()], [], 0.0, 60.0)["notes"])


# The verdict.


def record(begun, done, *, group="0 default_pg", size=4, operation="all_reduce", age_s=5.0, stood_s=90.0, sends=False):
    return Record("flight recorder", group, size, begun, done, operation, sends, age_s, stood_s)


def seen(records, stacks=None, **given):
    """Return ranks that have these records, all waiting for their devices unless stacks are given."""
    snapshot = ranks_of(stacks or [SYNC] * len(records), **given)
    processes = tuple(
        replace(one, records=tuple(records[one.pid - 1000])) if one.pid >= 1000 else one for one in snapshot.processes
    )
    return replace(snapshot, processes=processes)


def mismatches(snapshot):
    return [(one.ranks, one.blames, one.confidence) for one in diagnose(snapshot) if one.kind == "mismatch"]


def test_rank_behind():
    """The rank that has not begun the collective that all others wait in is blamed, with the number."""
    snapshot = seen([[record(5, 4)], [record(6, 4)], [record(4, 4)], [record(5, 4)]])
    (found,) = diagnose(snapshot)
    assert (found.kind, found.ranks, found.blames, found.confidence) == ("mismatch", (2,), True, "likely")
    assert "has not begun all_reduce 5" in found.text
    assert (found.waiting.count, found.waiting.ranks, found.since_s) == (3, (0, 1, 3), 95.0)
    assert [frame.function for frame in found.where] == ["synchronize", "log"]
    assert found.chain == ("driver", "Worker rank 2")


def test_no_vote():
    """Half of the ranks behind, most of them behind, and other operations with one number blame none."""
    assert mismatches(seen([[record(5, 4)], [record(4, 4)]] * 2)) == [((1, 3), False, "likely")]
    assert mismatches(seen([[record(5, 4)]] + [[record(4, 4)]] * 3)) == [((1, 2, 3), False, "likely")]
    other = [[record(5, 4)]] * 3 + [[record(5, 4, operation="barrier")]]
    assert mismatches(seen(other)) == [((3,), False, "likely")]
    assert "is in barrier as number 5" in diagnose(seen(other))[0].text


def test_chain_of_communicators():
    """Who is behind because it waits on another communicator is not blamed; who is behind there is."""
    tp = "1 tp"
    first = [[record(5, 4)], [record(5, 4)]]
    chain = [*first, [record(4, 4), record(9, 8, group=tp, size=2)], [record(4, 4), record(8, 8, group=tp, size=2)]]
    blamed = [record(4, 4), record(8, 8, group=tp, size=3)]
    assert mismatches(seen(chain)) == [((3,), True, "likely")]
    cycle = [*first, [record(5, 4), record(8, 8, group=tp, size=2)], [record(4, 4), record(9, 8, group=tp, size=2)]]
    assert [one[1] for one in mismatches(seen(cycle))] == [False]
    assert [one[1] for one in mismatches(seen([*first, [record(5, 4)], [replace(blamed[0], sends=True)]]))] == [False]
    # It stands in code for collectives that records nothing, such as a receive of gloo.
    stacks = [SYNC, SYNC, SYNC, ALL_REDUCE]
    behind = [*first, [record(5, 4)], [record(4, 4)]]
    assert mismatches(seen(behind)) == [((3,), True, "likely")]
    assert [one[1] for one in mismatches(seen(behind, stacks))] == [False]


@pytest.mark.parametrize(
    ("records", "how"),
    [
        ([[record(5, 4, stood_s=3.0)]] * 3 + [[record(4, 4)]], {}),  # it was dumped while the job made progress
        ([[record(5, 4, age_s=3600.0)]] * 3 + [[record(4, 4, age_s=3600.0)]], {}),  # the threads have run since
        ([[record(5, 4)], [record(5, 4)], [], [record(4, 4)]], {}),  # one is not known
        ([[record(5, 5)]] * 4, {}),  # nobody waits
        ([[record(5, 4)]] * 4, {}),  # all are in the same one
        ([[record(5, 4)]] * 3 + [[record(4, 4)]], {3: {"before": QUEUE, "ticks": 9, "switches": 3}}),  # it moves
    ],
)
def test_no_mismatch(records, how):
    """An old record, one of a job with progress, a missing one, equal numbers and a rank that moves say nothing."""
    assert mismatches(seen(records, how=how)) == []


def test_old_record_of_threads_that_rest():
    """A record counts for as long as the threads have not run since it was written."""
    records = [[record(5, 4, age_s=3600.0)]] * 3 + [[record(4, 4, age_s=3600.0)]]
    assert mismatches(seen(records, how={rank: {"age": 4000.0} for rank in range(4)})) == [((3,), True, "likely")]


def test_other_rules_come_first():
    """A rank that stands in its own code is late, and a stopped one is stopped: their numbers say nothing more."""
    records = [[record(5, 4)]] * 3 + [[record(4, 4)]]
    assert [one.kind for one in diagnose(seen(records, [ALL_REDUCE] * 3 + [QUEUE])) if one.blames] == ["late"]
    stopped = seen(records, how={3: {"state": "T"}})
    assert [one.kind for one in diagnose(stopped) if one.blames] == ["stopped"]
