# SPDX-License-Identifier: Apache-2.0
"""A process that is killed at any step to the disk: the next one skips nothing and trains nothing twice."""

import contextlib
import importlib.util
import os
import shutil
import signal
import sqlite3
import warnings
from pathlib import Path

import pytest
from fairlead_rollouts._store.schema import read_samples
from invariants import check

from fairlead_rollouts import Journal, Ledger

SPEC = importlib.util.spec_from_file_location("scripted", Path(__file__).parents[1] / "scripted.py")
scripted = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(scripted)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_killed(folder, number, saver="directory"):
    """Run the script in a child that is killed at its n-th step to the disk, and return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            scripted.sys.argv = ["scripted", str(folder), str(number), saver]
            scripted.main()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the child must not return into pytest
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the script failed"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def resume(folder, saver):
    """Restore the last checkpoint, check the ledger, and train to the end; return the trained prompt_ids."""
    checkpoints = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    with scripted.open_journal(folder, saver) as journal:
        options = {"journal": journal, **scripted.options(saver)}
        if checkpoints:
            step = int(checkpoints[-1].name.removeprefix("step-"))
            shutil.copy(checkpoints[-1] / "trained", folder / "trained")
            places = {"directory": checkpoints[-1] if saver == "directory" else None, "step": step, "version": step}
            ledger = Ledger.restore(scripted.CONFIG, scripted.source(), **places, **options)
        else:
            step = 0
            ledger = Ledger(scripted.CONFIG, scripted.source(), **options)
        check(ledger)
        for record in ledger._book.records.values():
            for sample in record.samples.values():
                assert Path(sample.ref.value).exists(), f"{sample} is listed, but its payload has been released"
        trained = scripted.run(folder, ledger, step, saver)
        check(ledger)
        prompt_ids = [int(prompt_id) for line in trained for prompt_id in line.split()]
        dropped = ledger.statistics().dropped
        assert len(set(prompt_ids)) == len(prompt_ids), "a prompt was trained twice"
        states = {prompt_id: ledger.state(prompt_id) for prompt_id in range(len(prompt_ids) + dropped)}
        assert [one for one, state in states.items() if state == "applied"] == sorted(prompt_ids), states
        assert list(states.values()).count("dropped") == dropped == 1, "a prompt was skipped"
    return prompt_ids


@pytest.mark.filterwarnings("ignore:The journal")
@pytest.mark.parametrize(("saver", "least"), [("directory", 50), ("journal", 20)])
def test_killed_at_every_step_to_the_disk(tmp_path, saver, least):
    """The kills are before and after every fsync, rename and commit, until one run survives."""
    kills = 0
    while run_killed(make(tmp_path / f"run-{kills}"), kills + 1, saver):
        resume(tmp_path / f"run-{kills}", saver)
        shutil.rmtree(tmp_path / f"run-{kills}")
        kills += 1
    assert kills > least


def make(folder):
    folder.mkdir()
    return folder


def test_journals_cut_at_every_page(tmp_path):
    """A journal or write-ahead log that was cut is used as far as it goes, or moved aside; samples are regenerated."""
    original = make(tmp_path / "original")
    assert run_killed(original, 51)
    pages = 0
    for name in ("journal", "journal-wal"):
        size = (original / name).stat().st_size
        for length in range(0, size, 4096):
            folder = tmp_path / f"cut-{pages}"
            shutil.copytree(original, folder)
            os.truncate(folder / name, length)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Journal(folder / "journal") as journal:
                    step = max(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
                    ledger = Ledger.restore(
                        scripted.CONFIG,
                        scripted.source(),
                        step=step,
                        version=step,
                        directory=folder / f"step-{step}",
                        journal=journal,
                    )
                    check(ledger)
                    assert ledger.statistics().applied + ledger.statistics().dropped == 2 * step
            pages += 1
    assert pages > 5


def test_another_process_holds_the_journal(tmp_path, run_python):
    """A second process is refused immediately, and the error names the first one."""
    script = f"""
        from fairlead_rollouts import Journal, JournalLockedError
        try:
            Journal({str(tmp_path / "journal")!r})
        except JournalLockedError as error:
            print(error.holder)
    """
    with Journal(tmp_path / "journal"):
        assert f"process {os.getpid()} on " in run_python(script)
    assert run_python(script) == ""


def test_a_damaged_journal_is_moved_aside(tmp_path):
    """A file that is no database is kept under another name, and the ledger begins an empty journal."""
    (tmp_path / "journal").write_bytes(b"nonsense" * 1000)
    with pytest.warns(UserWarning, match="moved to 'journal.aside-1': it is damaged"):
        journal = Journal(tmp_path / "journal")
    journal.close()
    assert (tmp_path / "journal.aside-1").read_bytes().startswith(b"nonsense")
    assert sqlite3.connect(tmp_path / "journal").execute("select count(*) from sample").fetchone() == (0,)


FORK = """
import os, sys
from fairlead_rollouts import Journal, JournalLockedError, Ledger, LedgerConfig, Ref

def seal(lease):
    ledger.finish(lease, 0, Ref(f"{lease.prompt_id}", durable=True))
    ledger.flush()

with Journal("journal") as journal:
    ledger = Ledger(LedgerConfig(group_size=1, groups_per_version=8, max_staleness=0), range(8), journal=journal)
    first, second, third = ledger.lease(3)
    seal(first)
    if not (child := os.fork()):
        try:
            seal(third)
        except JournalLockedError as error:
            print(error)
        sys.exit()  # out of the block, through the end of Python
    os.waitpid(child, 0)
    seal(second)
    os._exit(0)
"""


def test_a_forked_process_leaves_the_journal_alone(tmp_path, run_python):
    """What the process that opened the journal writes later survives a crash, however the forked process ends."""
    assert "is in use by process" in run_python(FORK)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal")) as database:
        assert [row[0] for row in read_samples(database)] == [0, 1]
