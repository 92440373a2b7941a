# SPDX-License-Identifier: Apache-2.0
"""A process that is killed at any step to the disk: the next one skips nothing and trains nothing twice."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import scripted
from invariants import check

from fairlead_rollouts import Ledger
from fairlead_rollouts._snapshot import read_snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_killed(folder, number, saver):
    """Run the script in a child that is killed at its n-th step to the disk, and return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            scripted.kill_at(number)
            ledger = Ledger(scripted.CONFIG, scripted.source(), **scripted.options(folder, saver))
            scripted.run(folder, ledger, 0, saver)
            os._exit(0)
        except BaseException:  # noqa: BLE001  the child must not return into pytest
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the script failed"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def resume(folder, saver):
    """Restore the last checkpoint, check the ledger, and train to the end."""
    checkpoints = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    options = scripted.options(folder, saver)
    if file := options["file"]:
        assert not file.exists() or read_snapshot(file).group_size == 2, "the file is not whole"
    step = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    if checkpoints:
        shutil.copy(checkpoints[-1] / "trained", folder / "trained")
        directory = None if saver == "file" else checkpoints[-1]
        # Without a file the snapshot may list a payload that has been released since.
        exists = None if saver != "directory" else lambda ref: Path(ref.value).exists()
        ledger = Ledger.restore(
            scripted.CONFIG, scripted.source(), step=step, version=step, directory=directory, exists=exists, **options
        )
    else:
        if file := options["file"]:
            file.unlink(missing_ok=True)
        ledger = Ledger(scripted.CONFIG, scripted.source(), **options)
    check(ledger)
    for record in ledger._book.records.values():
        for sample in record.samples.values():
            assert Path(sample.ref.value).exists(), f"{sample} is listed, but its payload has been released"
    trained = scripted.run(folder, ledger, step, saver)
    check(ledger)
    ledger.close()
    prompt_ids = [int(prompt_id) for line in trained for prompt_id in line.split()]
    dropped = ledger.statistics().dropped
    assert len(set(prompt_ids)) == len(prompt_ids), "a prompt was trained twice"
    states = {prompt_id: ledger.state(prompt_id) for prompt_id in range(len(prompt_ids) + dropped)}
    assert [prompt_id for prompt_id, state in states.items() if state == "applied"] == sorted(prompt_ids), states
    assert list(states.values()).count("dropped") == dropped == 1, "a prompt was skipped"


@pytest.mark.parametrize(("saver", "least"), [("directory", 15), ("file", 40), ("both", 40)])
def test_killed_at_every_step_to_the_disk(tmp_path, saver, least):
    """The kills are before and after every fsync and rename, until one run survives."""
    kills, folder = 0, tmp_path / "0"
    folder.mkdir()
    while run_killed(folder, kills + 1, saver):
        resume(folder, saver)
        shutil.rmtree(folder)
        kills += 1
        folder = tmp_path / str(kills)
        folder.mkdir()
    assert kills > least
