# SPDX-License-Identifier: Apache-2.0
"""A process that is killed at any step to the disk: the next one skips nothing and trains nothing twice.

Each payload is a file, so what was released is gone. The saver is "directory" if the trainer's checkpoints have the
ledger's snapshot, "file" if the file of the ledger has the only one, and "both".
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
from invariants import check

from fairlead_rollouts import Claim, IndexStream, Ledger, LedgerConfig, Ref, sample_id
from fairlead_rollouts._snapshot import read_snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=2)
SOURCE = IndexStream(24, seed=3, epochs=1)
STEPS = 6


def kill_at(number):
    """Kill this process before or after its n-th fsync or rename: each counts twice."""
    left = [number]

    def wrap(function):
        def call(*args):
            for act in (None, function):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = act and act(*args)
            return result

        return call

    os.fsync, os.replace = wrap(os.fsync), wrap(os.replace)


def release(ref, reason):
    Path(ref.value).unlink()


def make_options(folder, saver):
    return {"on_release": release, "file": None if saver == "directory" else folder / "ledger"}


def run(folder, ledger, step, saver):
    """Train to the end, with a checkpoint after each second step, and record the steps of each checkpoint in it."""
    trained = (folder / "trained").read_text().splitlines()[:step] if step else []
    while step < STEPS:
        for lease in ledger.lease(6):
            for sample in lease.samples:
                if (lease.prompt_id, lease.attempt, sample) == (3, 1, 1):
                    ledger.fail(lease, [sample], reason="it broke")
                else:
                    path = folder / f"payload-{sample_id(lease.prompt_id, sample)}"
                    path.write_text("tokens")
                    ledger.finish(lease, sample, Ref(str(path), durable=True))
        claim = ledger.claim(step + 1, 2)
        assert isinstance(claim, Claim), claim
        for group in claim.groups:
            for sample in group.samples:
                assert Path(sample.ref.value).exists(), f"{sample} was released"
        if step == 4 and ledger.state(claim.groups[0].prompt_id) == "claimed":
            ledger.drop([claim.groups[0].prompt_id], "no_signal")
        step += 1
        trained.append(
            " ".join(str(group.prompt_id) for group in claim.groups if ledger.state(group.prompt_id) == "claimed")
        )
        ledger.advance(step, trained=step)
        if step % 2 == 0:
            unfinished, directory = folder / f".step-{step}", folder / f"step-{step}"
            unfinished.mkdir(exist_ok=True)
            if saver == "file":
                ledger.flush()
            else:
                ledger.prepare(step, unfinished)
            (unfinished / "trained").write_text("\n".join(trained) + "\n")
            if not directory.exists():
                unfinished.rename(directory)
            if saver == "file":
                ledger.prepare(step, folder)
            ledger.commit(step)
    return trained


def run_killed(folder, number, saver):
    """Run the script in a child that is killed at its n-th step to the disk, and return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(number)
            ledger = Ledger(CONFIG, SOURCE, **make_options(folder, saver))
            run(folder, ledger, 0, saver)
            os._exit(0)
        except BaseException:  # noqa: BLE001  the child must not return into pytest
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the script failed"
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def resume(folder, saver):
    """Restore the last checkpoint, check the ledger, and train to the end."""
    checkpoints = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    options = make_options(folder, saver)
    if file := options["file"]:
        assert not file.exists() or read_snapshot(file).group_size == 2, "the file is not whole"
    step = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    if checkpoints:
        shutil.copy(checkpoints[-1] / "trained", folder / "trained")
        directory = None if saver == "file" else checkpoints[-1]
        # Without a file the snapshot may list a payload that has been released since.
        exists = None if saver != "directory" else lambda ref: Path(ref.value).exists()
        ledger = Ledger.restore(CONFIG, SOURCE, step=step, version=step, directory=directory, exists=exists, **options)
    else:
        if file := options["file"]:
            file.unlink(missing_ok=True)
        ledger = Ledger(CONFIG, SOURCE, **options)
    check(ledger)
    for record in ledger._book.records.values():
        for sample in record.samples.values():
            assert Path(sample.ref.value).exists(), f"{sample} is listed, but its payload has been released"
    trained = run(folder, ledger, step, saver)
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
    for kills in range(1000):
        folder = tmp_path / str(kills)
        folder.mkdir()
        if not run_killed(folder, kills + 1, saver):
            break
        resume(folder, saver)
        shutil.rmtree(folder)
    assert kills > least
