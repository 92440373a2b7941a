# SPDX-License-Identifier: Apache-2.0
"""A scripted run with checkpoints, in a process that is killed at its n-th step to the disk.

Each payload is a file, so what was released is gone. The saver is "directory" if the trainer's checkpoints have the
ledger's snapshot, "file" if the file of the ledger has the only one, and "both".
"""

import os
import signal
from pathlib import Path

from fairlead_rollouts import Claim, IndexStream, LedgerConfig, Ref, sample_id

CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=2)
STEPS = 6
PROMPTS = 24


def source():
    return IndexStream(PROMPTS, seed=3, epochs=1)


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


def write_payload(folder, prompt_id, sample):
    """Store a payload, which a reference names by its path."""
    path = folder / f"payload-{sample_id(prompt_id, sample)}"
    path.write_text("tokens")
    return Ref(str(path), durable=True)


def release(ref, reason):
    Path(ref.value).unlink()


def options(folder, saver):
    return {"on_release": release, "file": None if saver == "directory" else folder / "ledger"}


def run(folder, ledger, step, saver):
    """Train to the end, with a checkpoint after each second step, and record the steps of each checkpoint in it."""
    trained = (folder / "trained").read_text().splitlines() if (folder / "trained").exists() else []
    trained = trained[:step]
    while step < STEPS:
        for lease in ledger.lease(6):
            for sample in lease.samples:
                if (lease.prompt_id, lease.attempt, sample) == (3, 1, 1):
                    ledger.fail(lease, [sample], reason="it broke")
                else:
                    ledger.finish(lease, sample, write_payload(folder, lease.prompt_id, sample))
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
