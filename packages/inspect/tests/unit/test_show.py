# SPDX-License-Identifier: Apache-2.0
"""What people and programs read of any job: no secrets, and nothing that acts on a terminal."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, GET, JOB, LOOP, NODE, NOW, QUEUE, as_json, look, process, ranks_of, run

from fairlead_inspect import fold_stacks
from fairlead_inspect.model import Call, Job, Node

EVIL = "w\x1b[31m\x1b]0;x\x07<script>"


@pytest.fixture
def snapshot():
    """A job whose rank 2 hangs, with secrets and escape codes in its texts."""
    hung = ranks_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    job = replace(hung.jobs[0], entrypoint=f"train.py --api-key hunter2 https://me:hunter2@h token='hunter2' {EVIL}")
    actors = tuple(replace(one, name=f"{EVIL}-x{number}") for number, one in enumerate(hung.actors))
    processes = tuple(replace(one, note="PASSWORD=hunter2") if one.pid == 811 else one for one in hung.processes)
    return replace(hung, jobs=(job,), actors=actors, processes=processes)


def test_text(snapshot):
    """The verdict has what a reader needs, and no secret or escape code."""
    status, shown = run(snapshot, "why")
    assert status == 1
    assert "HANGS" in shown
    assert (
        "rank 2 of Worker on 10.0.0.1, pid 1002, for 1m 40s: does not move (late; rank: certain, blame: certain)"
        in shown
    )
    assert "data.py:33 next_batch  ->  Queue.get (queue.py:171)" in shown
    assert "2 wait (ranks 0-1) at step.py:118 train  ->  all_reduce" in shown
    assert "driver  ->  Worker rank 2" in shown
    for text in (shown, run(snapshot, "ps")[1], run(snapshot, "stacks")[1]):
        assert "hunter2" not in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_gaps():
    """The verdict says what was not read, why not, and what to do about it."""
    seen = ranks_of([ALL_REDUCE, QUEUE])
    (first, *others) = seen.processes
    refused = replace(first, threads=(), note="Permission denied (os error 13)")
    silent = Node("silent", "10.0.0.9", True, "silent", "no answer within 5.0 s")
    looked = replace(seen, processes=(refused, *others), nodes=(seen.nodes[0], silent), notes=("10.0.0.1: no x",))
    shown = " ".join(run(looked, "why")[1].split())
    assert "Node 10.0.0.9: no answer within 5.0 s" in shown
    assert (
        "No stacks of 1 process on 1 node: Permission denied (os error 13). Give the workers' containers the" in shown
    )
    assert "10.0.0.1: no x" in shown


def test_json(snapshot):
    """JSON has the same, and is free of secrets."""
    _, text = run(snapshot, "why", "--json")
    assert "hunter2" not in text
    assert "\\u001b" not in text
    fields = as_json(snapshot)
    (job,) = fields["jobs"]
    (found,) = job["findings"]
    assert (fields["schema"], fields["wrong"], fields["status"], fields["complete"]) == (2, True, 1, False)
    assert (found["kind"], found["ranks"], found["where"][1]["line"]) == ("late", [2], 33)
    assert (found["waiting"]["count"], found["actors"][0]["class"]) == (2, "Worker")
    assert [one["rank"] for one in job["worker_sets"][0]["members"]] == [0, 1, 2]


def test_stacks(snapshot):
    """Equal positions are shown once, those of fewest processes first."""
    folded = fold_stacks(snapshot)
    assert [one.ranks for one in folded] == [("",), ("2",), ("0", "1")]
    # Positions in packages are compared by function, and shown with their lines.
    shown = run(snapshot, "stacks")[1]
    assert "line 0 " not in shown
    assert "all_reduce" in shown


@pytest.mark.parametrize(
    "text",
    [
        *("password: x1y2", "SECRET=x1y2", "'token': 'x1y2'", "--hf-token x1y2", "a://u:x1y2@h", "a://u:b/x1y2@h"),
        *("AWS_ACCESS_KEY_ID=x1y2", "--token a,x1y2", "--password 'a x1y2'", "Authorization: Bearer x1y2", "pwd=x1y2"),
        *("a://h/?X-Amz-Signature=x1y2", "a://h/?sig=x1y2", "--auth 'x1y2"),
    ],
)
def test_redaction(text):
    """What looks like a secret is redacted, and nothing else."""
    job = Job(JOB, text, 811, NODE, "driver")
    assert "x1y2" not in run(look([], [], jobs=(job,)), "why")[1]
    for plain in ("KeyError: 'x'", "tokenizer.py:33 encode  ->  get_key (design.py:3)"):
        assert plain in run(look([], [], jobs=(replace(job, entrypoint=plain),)), "why")[1]


def test_report_that_cannot_be_written(snapshot, tmp_path, capsys):
    """If the report cannot be written, the verdict is printed, and the error says what to do, without a traceback."""
    status, shown = run(snapshot, "why", "--report", str(tmp_path / "missing" / "x.html"))
    assert (status, "HANGS" in shown) == (3, True)
    said = capsys.readouterr().err
    assert said.startswith("Cannot write the report: ")
    assert "Name another file with --report." in said


def test_statuses(snapshot):
    """The exit status follows the verdict; `--watch` looks until something hangs; other commands end with 0."""
    well = ranks_of([ALL_REDUCE, QUEUE], how={number: {"age": 1.0} for number in range(2)})
    status, shown = run(iter([well, well, snapshot]), "why", "--watch", "0")
    assert (status, shown.count("HANGS")) == (1, 1)
    assert as_json(snapshot)["wrong"] is True
    for command in ("ps", "stacks"):
        assert [run(snapshot, command)[0], run(snapshot, command, "--json")[0]] == [0, 0]
    assert [run(one, "why")[0] for one in (ranks_of([ALL_REDUCE] * 2), well)] == [4, 0]


def test_watch():
    """`--watch` prints when it looked, and ends with 4 once it has listed a suspect three times in a row."""
    spins = {"ticks": 100, "switches": 3, "before": LOOP, "states": ("R", "R")}
    one, two = (ranks_of([LOOP] * size, how=dict.fromkeys(range(size), spins)) for size in (1, 2))
    together = ranks_of([ALL_REDUCE] * 2)
    well = ranks_of([ALL_REDUCE, QUEUE], how={number: {"age": 1.0} for number in range(2)})
    for looks in ([one, one, well, two, one, two], [well, well, well, together, together, together]):
        left = iter(looks)
        status, shown = run(left, "why", "--watch", "0")
        assert (status, next(left, None)) == (4, None)
        assert shown.splitlines().count("1970-01-01 02:46:40 UTC") == len(looks)
    status, shown = run(one, "why")
    assert (status, " UTC" in shown) == (4, False)


def test_names_of_tasks():
    """A plain task, which is in no worker set, goes by the title of its process."""
    call = Call(f"{1:048x}"[:40] + JOB, "load", "", "RUNNING", NOW - 90, 4242, NODE)
    snapshot = look([], [process(811, GET, driver=True), process(4242, QUEUE, title="ray::load")], calls=(call,))
    assert "ray::load pid 4242: user" in run(snapshot, "stacks")[1]
    assert "\nray::load" in run(snapshot, "ps")[1]
