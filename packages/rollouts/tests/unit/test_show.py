# SPDX-License-Identifier: Apache-2.0
"""A ledger shown to people, and on the command line."""

import os
import subprocess
import sys
import threading

import pytest

from fairlead_rollouts import IndexStream, Journal, Ledger, LedgerConfig

CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=1)
TEXT = """\
Ledger at version 1, room() is 1
groups
  pending           0
  leased            2 ████████████████████████████████████████
  finished            1 ████████████████████
  claimed           0
  trained           2 ████████████████████████████████████████
  applied           0
  dropped           0
claimed groups by staleness
  0                 2 ████████████████████████████████████████
"""


@pytest.fixture
def ledger(finish):
    """Five groups: two are trained, one is finished, and two are in generation."""
    ledger = Ledger(CONFIG, IndexStream(100, seed=0))
    first = ledger.lease(4)
    finish(ledger, first[1:])
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    ledger.lease(1)
    return ledger


def test_show(ledger, capsys):
    """`show` prints the states, the staleness and the three oldest groups that are not trained."""
    ledger.show()
    printed = capsys.readouterr().out
    assert "finished" in printed
    assert "Ordinal 0 is leased" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("Ordinal")] == ["0", "3", "4"]


def test_show_without_rich(ledger, capsys, monkeypatch):
    """Without rich the same is plain text."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    ledger.show()
    printed = capsys.readouterr().out
    assert printed.startswith(TEXT)
    assert printed.splitlines()[-3] == ledger.explain(0)
    assert "████ \n" not in printed


def test_show_of_a_new_ledger(capsys):
    """An empty ledger can be shown."""
    ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=2, max_staleness=0), ["a"])
    ledger.show()
    assert "version 0, room() is 2" in capsys.readouterr().out


def test_statistics_from_another_thread(make_ledger, finish):
    """An exporter reads the statistics while the ledger changes."""
    ledger, errors, done = make_ledger(prompts=list(range(4000))), [], threading.Event()

    def read():
        while not done.is_set():
            try:
                ledger.statistics()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 500):
        finish(ledger, ledger.lease(4))
        ledger.drop([group.prompt_id for group in ledger.claim(step, 2).groups], f"reason {step}")
        ledger.advance(step, trained=step)
    done.set()
    thread.join()
    assert errors == []


def run_command(*arguments, status=0):
    """Run the command line, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "fairlead_rollouts", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done
    return done.stdout or done.stderr


def test_command_show(tmp_path, ledger):
    """`show` prints the snapshot of a checkpoint, by its folder or its path."""
    path = ledger.prepare(1, tmp_path)
    printed = run_command("show", tmp_path)
    assert "Snapshot of step 1 at version 1" in printed
    assert "The next prompt is 5. Every prompt below 0 is applied or dropped." in printed
    assert run_command("show", path) == printed


def test_command_journal(tmp_path, finish):
    """`show` prints a journal that a killed process left, and leaves the file as it is."""
    script = """if True:
        import os, sys
        from fairlead_rollouts import Journal, Ledger, LedgerConfig, Ref
        ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=4, max_staleness=0), ["a", "b"],
                        journal=Journal(sys.argv[1], keep_steps=1))
        for lease in ledger.lease(2):
            ledger.finish(lease, 0, Ref("store", durable=True))
        ledger.flush()
        os._exit(0)
    """
    path = tmp_path / "journal"
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
    before = sorted((one.name, one.read_bytes()) for one in tmp_path.iterdir() if not one.name.endswith("-shm"))
    printed = run_command("show", path)
    assert "Journal of ledger" in printed
    assert "It holds snapshots of these steps: 0." in printed
    assert [line.split()[:2] for line in printed.splitlines() if "█" in line] == [["open", "2"], ["0", "2"]]
    after = sorted((one.name, one.read_bytes()) for one in tmp_path.iterdir() if not one.name.endswith("-shm"))
    assert after == before


@pytest.mark.parametrize("content", [None, b"", b"something else" * 50, bytes(1024)])
def test_command_refuses(tmp_path, content):
    """A file that is missing, or that is neither a snapshot nor a journal, is named."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in run_command("show", path, status=1)


def test_command_refuses_a_journal_in_use(tmp_path):
    """A journal that another process uses is not read."""
    with Journal(tmp_path / "journal"):
        assert "locked" in run_command("show", tmp_path / "journal", status=1)
    assert os.listdir(tmp_path)
