# SPDX-License-Identifier: Apache-2.0
"""What survives the process: the snapshot of a checkpoint, and the file beside the checkpoints."""

import hashlib
import os
import threading
import time

import pytest
from invariants import check

from fairlead_rollouts import Ledger, LedgerConfig, Ref, SnapshotError
from fairlead_rollouts._snapshot import read_snapshot

CONFIG = LedgerConfig(group_size=2, groups_per_version=2, max_staleness=2)
PROMPTS = [f"prompt {number}" for number in range(20)]


class Loader:
    """A source with a state of its own, which is its position."""

    position = 0

    def get(self, prompt_id):
        self.position += 1
        return PROMPTS[self.position - 1]

    def state(self):
        return str(self.position).encode()

    def restore(self, state, prompt_id):
        self.position = int(state)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture(params=["directory", "file"])
def ledger(request, path, finish, releases):
    """Return a ledger after step 1, with a claim for step 2, a finished group, and one in generation."""
    file = path if request.param == "file" else None
    ledger = Ledger(CONFIG, Loader(), file=file, on_release=releases)
    finish(ledger, ledger.lease(5))
    ledger.lease(1)
    ledger.claim(1, 2)
    ledger.claim(2, 2)
    ledger.advance(1, trained=1)
    yield ledger
    ledger.close()


only_directory = pytest.mark.parametrize("ledger", ["directory"], indirect=True)
only_file = pytest.mark.parametrize("ledger", ["file"], indirect=True)


def crash(ledger):
    """End the writing as a crash does: without the last changes."""
    if ledger._file is not None:
        ledger._file.changed = False
    ledger.close()


def restore(directory=None, *, config=CONFIG, **options):
    options = {"step": 1, "version": 1, "directory": directory, **options}
    ledger = Ledger.restore(config, Loader(), **options)
    check(ledger)
    return ledger


def states(ledger, count):
    return [ledger.state(prompt_id) for prompt_id in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Both.


def test_what_a_resume_keeps(ledger, path, tmp_path):
    """Groups that a later step has claimed are open again, and durable ones are finished. The source continues."""
    if ledger._file is None:
        assert ledger.prepare(1, tmp_path) == tmp_path / "rollouts.ledger"
        places = {"directory": tmp_path}
    else:
        ledger.flush()
        places = {"file": path}
    [lease] = ledger.lease(1)
    crash(ledger)
    later = restore(**places)
    assert states(later, 7) == [*["applied"] * 2, *["finished"] * 3, "pending", "unseen"]
    assert not later.finish(lease, 0, Ref("late")), "a lease of the dead process is worth nothing"
    assert [group.prompt_id for group in later.claim(2, 2).groups] == [2, 3]
    assert [(lease.prompt_id, lease.prompt) for lease in later.lease(2)] == [(5, "prompt 5"), (6, "prompt 6")]
    later.close()
    with pytest.raises(SnapshotError, match=r"its step is (1|from 1 to 2), not 3\. Pass step="):
        restore(**places, step=3)


@only_directory
def test_commit(ledger, tmp_path, releases):
    """Durable references of trained groups are released when their checkpoint is complete, in any order of steps."""
    with pytest.raises(ValueError, match=r"step is 1, and steps \[\] are prepared"):
        ledger.commit(1)
    ledger.advance(2, trained=2)
    for step in (1, 2):
        ledger.prepare(step, tmp_path)
    assert releases == []
    for step in (2, 1, 2):
        ledger.commit(step)
        assert states(ledger, 6) == [*["applied"] * 4, "finished", "leased"]
    assert set(releases.reasons().values()) == {"applied"}
    for step, message in ((0, "step 2 has been committed"), (3, "which is no directory")):
        with pytest.raises(ValueError, match=message):
            ledger.prepare(step, tmp_path if step == 0 else tmp_path / "missing")


def test_a_run_that_began_without_a_ledger(finish, path, tmp_path):
    """`begin` continues after the steps of a job that has had no ledger, at the prompt that the caller names."""
    ledger = Ledger.begin(CONFIG, PROMPTS, step=7, version=7, prompt_id=5, file=path)
    check(ledger)
    assert (ledger.last_trained, ledger.version, ledger.state(4), ledger.state(5)) == (7, 7, "applied", "unseen")
    leases = ledger.lease(2)
    assert [(lease.prompt_id, lease.start_version) for lease in leases] == [(5, 7), (6, 7)]
    finish(ledger, leases)
    assert ledger.claim(8, 2).version == 7
    ledger.prepare(8, tmp_path)
    ledger.close()
    later = Ledger.restore(CONFIG, PROMPTS, step=8, version=8, directory=tmp_path)
    assert later.statistics().applied == 7


# The snapshot.


def with_checksum(*lines):
    body = b"".join(line + b"\n" for line in lines)
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


@only_directory
def test_damaged_snapshots(ledger, tmp_path, monkeypatch):
    """A snapshot that is missing, cut, flipped, filled or of another job is a `SnapshotError`, never a fresh start."""
    path = ledger.prepare(1, tmp_path)
    content = path.read_bytes()
    header = content.splitlines()[0]
    damaged = [content[:size] for size in range(len(content))]
    damaged += [content[:place] + b"\xff" + content[place + 1 :] for place in range(len(content))]
    damaged += [b"\xff" * 512, bytes(5000), content + b"more", b"SQLite format 3\0" + bytes(4080)]
    damaged += [with_checksum(), with_checksum(header, b"[[1]]"), with_checksum(header, b"[[0, 1, 0, null, [[]]]]")]
    damaged += map(with_checksum, [b"", b"[]", b"\xff", b"{}", b"[" * 100_000, b'{"schema": 3}'])
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(SnapshotError):
            restore(tmp_path)
    path.unlink()
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        restore(tmp_path)
    path.write_bytes(content)
    assert restore(tmp_path).state(0) == "applied"
    with pytest.raises(SnapshotError, match="its group_size is 2, not 3"):
        restore(tmp_path, config=LedgerConfig(group_size=3, groups_per_version=2, max_staleness=1))
    monkeypatch.setattr("fairlead_rollouts._snapshot.SCHEMA", 4)
    with pytest.raises(SnapshotError, match="it has schema 3, and this version of fairlead-rollouts reads schema 4"):
        restore(tmp_path)


# The file.


@only_file
def test_what_finished_since_the_checkpoint(ledger, path, tmp_path, finish, releases):
    """The file continues a checkpoint, also for drops, but not for samples of weights that no longer exist."""
    finish(ledger, ledger.lease(1))
    ledger.drop([4], "before")
    ledger.prepare(1, tmp_path)
    ledger.commit(1)
    finish(ledger, ledger.lease(1))
    ledger.drop([6], "after")
    finish(ledger, ledger.lease(1))
    ledger.advance(2)
    finish(ledger, ledger.lease(1))
    ledger.flush()
    crash(ledger)
    releases.clear()
    later = restore(tmp_path, file=path, on_release=releases)
    assert states(later, 5) == ["applied", "applied", "finished", "finished", "dropped"]
    assert [later.state(prompt_id) for prompt_id in range(5, 10)] == [
        "pending",
        "pending",
        "finished",
        "finished",
        "pending",
    ]
    assert releases.reasons() == {"9-0 of 1": "lost", "9-1 of 1": "lost"}
    later.close()


@only_file
def test_a_branch_that_was_left(ledger, path, tmp_path):
    """A file that does not continue the checkpoint is set aside, and a damaged one too."""
    ledger.prepare(1, tmp_path)
    crash(ledger)
    first, second, other = restore(tmp_path, file=path), tmp_path / "second", tmp_path / "other"
    first.advance(2, trained=2)
    second.mkdir()
    first.prepare(2, second)
    crash(first)
    crash(restore(tmp_path, file=other))
    with pytest.warns(UserWarning, match=r"was renamed to 'other.aside': it does not continue this ledger"):
        restore(second, file=other, step=2, version=2).close()
    path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="renamed"):
        restore(second, file=path, step=2, version=2).close()
    with pytest.warns(UserWarning, match="renamed"):
        Ledger(CONFIG, PROMPTS, file=path).close()
    with pytest.raises(SnapshotError, match="No such file"):
        restore(file=tmp_path / "no file")
    with pytest.raises(ValueError, match="needs the directory of the checkpoint, or the file"):
        restore()


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


@only_file
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


@only_file
def test_one_process_uses_a_file(ledger, path, run_python):
    """Another ledger is refused immediately, and the error names the process that has the lock."""
    holder = f"process {os.getpid()} on "
    with pytest.raises(SnapshotError, match=f"it is in use by {holder}"):
        restore(file=path)
    script = f"""
        from fairlead_rollouts import Ledger, LedgerConfig, SnapshotError
        try:
            Ledger(LedgerConfig(group_size=1, groups_per_version=1, max_staleness=0), ["a"], file={str(path)!r})
        except SnapshotError as error:
            print(error.found)
    """
    open(path).close()  # which would end a lock of the file itself
    assert holder in run_python(script)
    ledger.close()
    restore(file=path).close()
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
        wait_until(lambda: hasattr(ledger.claim(step, 50), "groups") or errors)  # noqa: B023
        trained += [group.prompt_id for group in ledger.claim(step, 50).groups]
        ledger.advance(step, trained=step)
        ledger.prepare(step, path.parent)
        ledger.commit(step)
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(trained) == list(range(400))
    check(ledger)
    ledger.close()
