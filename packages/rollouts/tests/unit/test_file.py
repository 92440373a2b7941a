# SPDX-License-Identifier: Apache-2.0
"""The file of a ledger beside the checkpoints: what it keeps, when it is written, and who may use it."""

import os
import threading
import time

import pytest
from invariants import check

from fairlead_rollouts import Ledger, LedgerConfig, Ref, SnapshotError
from fairlead_rollouts._file import SnapshotFile
from fairlead_rollouts._snapshot import read_snapshot

CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=2)
PROMPTS = [f"prompt {number}" for number in range(20)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def ledger(path, finish, releases):
    """Return a ledger after step 1, with a claim for step 2, a finished group, and one in generation."""
    ledger = Ledger(CONFIG, PROMPTS, file=path, on_release=releases)
    finish(ledger, ledger.lease(5))
    ledger.lease(1)
    ledger.claim(1, 2)
    ledger.claim(2, 2)
    ledger.advance(1, trained=1)
    yield ledger
    ledger.close()


def crash(ledger):
    """End the writing as a crash does: without the last changes."""
    ledger._file.changed = False
    ledger.close()


def restore(path, **options):
    options = {"step": 1, "version": 1, "file": path, **options}
    ledger = Ledger.restore(CONFIG, PROMPTS, **options)
    check(ledger)
    return ledger


def states(ledger, count):
    return [ledger.state(prompt_id) for prompt_id in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_alone(ledger, path, releases):
    """Without a place in the checkpoint, the file has the state after each step since the last commit."""
    ledger.flush()
    crash(ledger)
    later = restore(path, on_release=releases)
    assert states(later, 7) == [*["applied"] * 2, *["finished"] * 3, "pending", "unseen"]
    assert set(releases.reasons().values()) == {"applied"}, "payloads that the checkpoint covers are released"
    later.close()
    later = restore(path, step=1)
    later.close()
    with pytest.raises(SnapshotError, match=r"its step is 1, not 2\. Pass step=1"):
        restore(path, step=2)


def test_samples_of_lost_versions(ledger, path, finish, releases):
    """Versions after the checkpoint will be other weights, so their samples are released and generated again."""
    ledger.advance(2)
    finish(ledger, ledger.lease(1))
    finish(ledger, ledger.lease(1), newest_version=1, oldest_version=1)
    ledger.flush()
    crash(ledger)
    releases.clear()
    later = restore(path, on_release=releases)
    assert [later.state(6), later.state(7)] == ["pending", "finished"]
    lost = {value for value, reason in releases.reasons().items() if reason == "lost"}
    assert lost == {"6-0 of 1", "6-1 of 1"}
    later.close()


def test_what_finished_since_the_checkpoint(ledger, path, tmp_path, finish):
    """The file is used if it continues the checkpoint, also for drops, and the source continues where it was."""
    finish(ledger, ledger.lease(1))
    ledger.drop([4], "before")
    ledger.prepare(1, tmp_path)
    ledger.commit(1)
    [lease] = ledger.lease(1)
    finish(ledger, [lease])
    ledger.drop([6], "after")
    ledger.flush()
    crash(ledger)
    later = restore(path, directory=tmp_path)
    assert states(later, 9) == [
        *["applied"] * 2, *["finished"] * 2, "dropped", "pending", "pending", "finished", "unseen",
    ]  # fmt: skip
    later.close()


def test_a_branch_that_was_left(ledger, path, tmp_path):
    """A file that does not continue the checkpoint is set aside, and a damaged one too."""
    ledger.prepare(1, tmp_path)
    crash(ledger)
    first, second, other = restore(path, directory=tmp_path), tmp_path / "second", tmp_path / "other"
    first.advance(2, trained=2)
    second.mkdir()
    first.prepare(2, second)
    crash(first)
    crash(restore(other, directory=tmp_path))
    with pytest.warns(UserWarning, match=r"was renamed to 'other.aside': it does not continue this ledger"):
        restore(other, directory=second, step=2, version=2).close()
    path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="renamed"):
        restore(path, directory=second, step=2, version=2).close()
    with pytest.warns(UserWarning, match="renamed"):
        Ledger(CONFIG, PROMPTS, file=path).close()
    with pytest.raises(SnapshotError, match="No such file"):
        restore(tmp_path / "no file")
    with pytest.raises(ValueError, match="needs the directory of the checkpoint, or the file"):
        restore(None)


def test_payloads_are_released_after_the_file(path, finish, releases, monkeypatch):
    """A durable payload is released only when no file lists it any more; another one is released immediately."""
    monkeypatch.setattr(SnapshotFile, "_run", lambda file: None)
    ledger = Ledger(CONFIG, PROMPTS, file=path, on_release=releases)
    first, second = ledger.lease(2)
    finish(ledger, [first])
    ledger.finish_many([(second, sample, Ref(f"in memory {sample}")) for sample in second.samples])
    ledger.flush()
    ledger.drop([0, 1], "no_signal")
    assert list(releases.reasons()) == ["in memory 0", "in memory 1"]
    assert len(read_snapshot(path).groups[0][4]) == 2
    ledger.flush()
    assert len(releases) == 4
    ledger.close()


def test_it_is_written_in_the_background(path):
    """A sample of a group that is not finished is in the file without another call, and nothing is written twice."""
    ledger = Ledger(CONFIG, PROMPTS, file=path)
    ledger.finish(ledger.lease(1)[0], 0, Ref("tokens", durable=True))
    wait_until(lambda: any(group[4] for group in read_snapshot(path).groups))
    ledger.flush()
    written = ledger._file.written
    ledger.advance(1)
    wait_until(lambda: ledger._file.written > written)
    time.sleep(1.5)
    assert ledger._file.written == written + 1, "nothing has changed since"
    ledger.close()


def test_a_full_disk(ledger, path, monkeypatch, caplog):
    """An error in the background is logged and the write is tried again; `flush` and `prepare` raise it."""
    fsync = os.fsync

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    ledger.flush()
    content = path.read_bytes()
    monkeypatch.setattr("os.fsync", refuse)
    ledger.advance(2)
    wait_until(lambda: "No space left on device" in caplog.text)
    for write in (ledger.flush, lambda: ledger.prepare(1, path.parent)):
        with pytest.raises(SnapshotError, match="it cannot be written: No space left"):
            write()
    assert path.read_bytes() == content
    assert {file.name for file in path.parent.iterdir()} == {"ledger", "ledger.lock"}
    monkeypatch.setattr("os.fsync", fsync)
    wait_until(lambda: read_snapshot(path).version == 2)


def test_one_process_uses_a_file(ledger, path, run_python):
    """Another ledger is refused immediately, and the error names the process that has the lock."""
    with pytest.raises(SnapshotError, match=f"it is in use by process {os.getpid()} on "):
        restore(path)
    script = f"""
        from fairlead_rollouts import Ledger, LedgerConfig, SnapshotError
        try:
            Ledger(LedgerConfig(group_size=1, groups_per_version=1, max_staleness=0), ["a"], file={str(path)!r})
        except SnapshotError as error:
            print(error.found)
    """
    assert f"process {os.getpid()} on " in run_python(script)
    open(path).close()  # which would end a lock of the file itself
    assert f"process {os.getpid()} on " in run_python(script)
    ledger.close()
    restore(path).close()
    with pytest.raises(SnapshotError, match="it is closed in this process"):
        ledger.flush()
    with pytest.raises(SnapshotError, match="it cannot be opened: No such file"):
        Ledger(CONFIG, PROMPTS, file=path.parent / "missing" / "ledger")


FORK = """
import os, sys, time
from fairlead_rollouts import Ledger, LedgerConfig, Ref, SnapshotError

config = LedgerConfig(group_size=1, groups_per_version=8, max_staleness=0)
ledger, closed = (Ledger(config, range(8), file=name) for name in ("ledger", "closed"))
number = closed._file._descriptor
closed.close()
assert os.open("ledger", os.O_RDONLY) == number
ledger.finish(ledger.lease(1)[0], 0, Ref("0", durable=True))
if not os.fork():
    os.fstat(number)  # now of another file, which stays open
    try:
        ledger.flush()
    except SnapshotError as error:
        print(error.found, flush=True)
    ledger.close()
    time.sleep(1)
    sys.exit()
ledger.flush()
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_file_alone(path, run_python):
    """It cannot write the file, and its life does not keep the lock."""
    assert "it is closed in this process" in run_python(FORK)
    assert len(read_snapshot(path).groups[0][4]) == 1


def test_threads(path):
    """Any thread may call a ledger: nothing is lost or doubled."""
    config = LedgerConfig(group_size=2, groups_per_version=50, max_staleness=1)
    ledger = Ledger(config, range(400), file=path)
    trained, errors = [], []

    def generate():
        try:
            while not ledger.exhausted:
                for lease in ledger.lease(3):
                    for sample in lease.samples:
                        assert ledger.finish(lease, sample, Ref(f"{lease.token:x}-{sample}", durable=True))
        except Exception as error:  # noqa: BLE001  the test raises it
            errors.append(error)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, 9):
        claim = None
        wait_until(lambda: hasattr(ledger.claim(step, 50), "groups") or errors)  # noqa: B023
        claim = ledger.claim(step, 50)
        trained += [group.prompt_id for group in claim.groups]
        ledger.advance(step, trained=step)
        ledger.prepare(step, path.parent)
        ledger.commit(step)
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(trained) == list(range(400))
    check(ledger)
    ledger.close()
