# SPDX-License-Identifier: Apache-2.0
"""What people and programs read of any job: no secrets, and nothing that acts on a terminal."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from seen import ALL_REDUCE, LOOP, QUEUE, fleet_of

from fairlead_inspect import _command, diagnose, fold_stacks
from fairlead_inspect._show import (
    PTRACE,
    clean,
    draw_findings,
    draw_processes,
    draw_stacks,
    list_processes,
    to_json,
)
from fairlead_inspect.model import Node

EVIL = "w\x1b[31m\x1b]0;x\x07<script>"


def drawn(renderable):
    file = io.StringIO()
    Console(file=file, width=160).print(renderable)
    return file.getvalue()


@pytest.fixture
def snapshot():
    """A job whose rank 2 hangs, with secrets and escape codes in its texts."""
    hung = fleet_of([ALL_REDUCE, ALL_REDUCE, QUEUE])
    job = replace(hung.jobs[0], entrypoint=f"train.py --api-key hunter2 https://me:hunter2@h token='hunter2' {EVIL}")
    actors = tuple(replace(one, name=f"{EVIL}-x{number}") for number, one in enumerate(hung.actors))
    processes = tuple(replace(one, note="PASSWORD=hunter2") if one.pid == 811 else one for one in hung.processes)
    return replace(hung, jobs=(job,), actors=actors, processes=processes)


def test_text(snapshot):
    """The verdict has what a reader needs, and no secret or escape code."""
    shown = drawn(draw_findings(snapshot, diagnose(snapshot), verbose=True))
    assert "HANGS" in shown
    assert (
        "rank 2 of Worker on 10.0.0.1, pid 1002, for 1m 40s: does not move (late; rank: certain, blame: certain)"
        in shown
    )
    assert "data.py:33 next_batch  ->  Condition.wait (threading.py:327)" in shown
    assert "2 wait (ranks 0-1) at step.py:118 train  ->  all_reduce" in shown
    assert "driver  ->  Worker rank 2" in shown
    for text in (shown, drawn(draw_processes(list_processes(snapshot))), drawn(draw_stacks(fold_stacks(snapshot)))):
        assert "hunter2" not in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_gaps():
    """The verdict says what was not read, why not, and what to do about it."""
    seen = fleet_of([ALL_REDUCE, QUEUE])
    (first, *others) = seen.processes
    refused = replace(first, threads=(), note="Permission denied (os error 13)")
    silent = Node("silent", "10.0.0.9", True, "silent", "no answer within 5.0 s")
    looked = replace(seen, processes=(refused, *others), nodes=(seen.nodes[0], silent), notes=("10.0.0.1: no x",))
    shown = " ".join(drawn(draw_findings(looked, ())).split())
    assert "Node 10.0.0.9: no answer within 5.0 s" in shown
    assert f"No stacks of 1 process on 1 node: Permission denied (os error 13). {PTRACE}" in shown
    assert "10.0.0.1: no x" in shown


def test_json(snapshot):
    """JSON has the same, and is free of secrets."""
    fields = json.loads(json.dumps(to_json(snapshot, diagnose(snapshot))))
    assert "hunter2" not in json.dumps(fields)
    assert "\\u001b" not in json.dumps(fields)
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
    assert "line 0 " not in drawn(draw_stacks(folded))
    assert "all_reduce" in drawn(draw_stacks(folded))


@pytest.mark.parametrize(
    "text",
    [
        *("password: x1y2", "SECRET=x1y2", "'token': 'x1y2'", "--hf-token x1y2", "a://u:x1y2@h", "a://u:b/x1y2@h"),
        *("AWS_ACCESS_KEY_ID=x1y2", "--token a,x1y2", "--password 'a x1y2'", "Authorization: Bearer x1y2", "pwd=x1y2"),
        *("a://h/?X-Amz-Signature=x1y2", "a://h/?sig=x1y2", "--auth 'x1y2"),
    ],
)
def test_redaction(text):
    """What looks like a secret is redacted."""
    assert "x1y2" not in clean(text)
    for plain in ("KeyError: 'x'", "tokenizer.py:33 encode  ->  get_key (design.py:3)"):
        assert clean(plain) == plain


@pytest.mark.parametrize("name", ["missing/x.html", "", "file/x.html"])
def test_report_that_cannot_be_written(name, tmp_path, monkeypatch, capsys):
    """A path that cannot be written is refused before the look, with what was asked, found and what to do."""
    (tmp_path / "file").touch()
    path = f"{tmp_path}/{name}"
    monkeypatch.setattr(_command, "look_here", lambda **_: pytest.fail("it looked"))
    for command in (["why", "--here", "--report", path], ["timeline", "-o", path]):
        with pytest.raises(SystemExit) as ended:
            _command.main(command)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"cannot write {path!r}: " in said
        assert "; create the folder" in said or "; name a file in it" in said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


def test_report_whose_folder_goes(snapshot, tmp_path, monkeypatch, capsys):
    """If the report cannot be written after the look, the verdict is printed, and the error has no traceback."""
    folder = tmp_path / "reports"
    folder.mkdir()

    def look(**_):
        folder.rmdir()
        return snapshot

    monkeypatch.setattr(_command, "look_here", look)
    assert _command.main(["why", "--here", "--report", str(folder / "x.html")]) == 3
    printed = capsys.readouterr()
    assert "HANGS" in printed.out
    assert printed.err.startswith("Cannot write the report: ")


def test_statuses(snapshot, monkeypatch, capsys):
    """The exit status follows the verdict; `--watch` looks until something hangs; other commands end with 0."""
    well = fleet_of([ALL_REDUCE, QUEUE], how={number: {"age": 1.0} for number in range(2)})
    looks = iter([well, well, snapshot])
    monkeypatch.setattr(_command, "look_here", lambda **_: next(looks, snapshot))
    monkeypatch.setattr(_command.time, "sleep", lambda _: None)
    assert _command.main(["why", "--here", "--watch", "1"]) == 1
    assert capsys.readouterr().out.count("HANGS") == 1
    assert _command.main(["why", "--here", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] is True
    for command in (["ps"], ["stacks"]):
        assert _command.main([*command, "--here"]) == 0
        assert _command.main([*command, "--here", "--json"]) == 0
    looks = iter([fleet_of([ALL_REDUCE] * 2), well])
    assert [_command.main(["why", "--here"]) for _ in range(2)] == [4, 0]


def test_watch(monkeypatch, capsys):
    """`--watch` prints when it looked, and ends with 4 once it has listed the same suspects three times in a row."""
    spins = {"ticks": 100, "switches": 3, "before": LOOP, "states": ("R", "R")}
    one, two = (fleet_of([LOOP] * size, how=dict.fromkeys(range(size), spins)) for size in (1, 2))
    together = fleet_of([ALL_REDUCE] * 2)
    well = fleet_of([ALL_REDUCE, QUEUE], how={number: {"age": 1.0} for number in range(2)})
    monkeypatch.setattr(_command.time, "sleep", lambda _: None)
    for looks in ([one, one, two, well, two, two, two], [well, well, well, together, together, together]):
        left = iter(looks)
        monkeypatch.setattr(_command, "look_here", lambda left=left, **_: next(left))
        assert _command.main(["why", "--here", "--watch", "1"]) == 4
        assert next(left, None) is None
        lines = capsys.readouterr().out.splitlines()
        assert lines.count("1970-01-01 02:46:40 UTC") == len(looks)
    monkeypatch.setattr(_command, "look_here", lambda **_: one)
    assert _command.main(["why", "--here"]) == 4
    assert " UTC" not in capsys.readouterr().out
