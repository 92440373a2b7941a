# SPDX-License-Identifier: Apache-2.0
"""The file of a journal: many samples, a disk that is full, and a file that cannot be opened."""

import contextlib
import pickle
import resource

import pytest

from fairlead_rollouts import Journal, JournalError, Ledger, Ref
from fairlead_rollouts._store.schema import read_samples

GROUPS = 200


@contextlib.contextmanager
def small_disk(path=None):
    """Let files grow no further than the largest of a folder, as on a disk that is full; without one not at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = max((one.stat().st_size for one in path.iterdir()), default=0) if path else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def restart(ledger, folder, journal, releases):
    return Ledger.restore(
        ledger.config, range(GROUPS), step=0, version=0, directory=folder, journal=journal, on_release=releases
    )


def finish_each(ledger, results):
    while results:
        assert ledger.seal(*results[0])
        del results[0]


def test_more_samples_than_the_buffer_holds(make_ledger, finish, releases, tmp_path):
    """All of them survive two restarts, of which the second reads what the first has written."""
    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(range(GROUPS), journal=journal, checkpoints=True, max_staleness=GROUPS)
        ledger.prepare(0, tmp_path)
        finish(ledger, ledger.lease(GROUPS))
    for _ in range(2):
        with Journal(tmp_path / "journal") as journal:
            ledger = restart(ledger, tmp_path, journal, releases)
            assert ledger.statistics().sealed == GROUPS
    assert releases == []


def test_a_full_disk(make_ledger, releases, tmp_path):
    """A sample that the journal has no room for is refused, and can be sealed when there is room."""
    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(range(GROUPS), journal=journal, checkpoints=True, max_staleness=GROUPS)
        ledger.prepare(0, tmp_path)
        leases = ledger.lease(GROUPS)
        results = [(lease, one, Ref(f"{lease.ordinal} {one}", durable=True)) for lease in leases for one in (0, 1)]
        with small_disk(tmp_path), pytest.raises(JournalError, match=r"cannot be written: .*Make room on its disk"):
            finish_each(ledger, results)
        assert 0 < len(results) < 2 * GROUPS
        with small_disk(tmp_path), pytest.raises(JournalError):
            ledger.flush()
        ledger.check()
        finish_each(ledger, results)
        ledger.check()
    with Journal(tmp_path / "journal") as journal:
        assert restart(ledger, tmp_path, journal, releases).statistics().sealed == GROUPS
    assert releases == []


def test_what_a_call_has_done_on_a_full_disk(make_ledger, finish, releases, tmp_path):
    """A claim that cannot remove old samples from the journal returns its groups; payloads wait until it can."""
    with Journal(tmp_path / "journal") as journal:
        rules = {"max_staleness": 0, "lookahead": 2, "on_stale": "requeue"}
        ledger = make_ledger(20, journal=journal, checkpoints=True, **rules)
        leases = ledger.lease(4)
        finish(ledger, leases[:2])
        ledger.flush()
        ledger.advance(1)
        finish(ledger, leases[2:], oldest_version=1)
        with small_disk(tmp_path):
            assert [group.ordinal for group in ledger.claim(1, 2).groups] == [2, 3]
            again = ledger.lease(2)
            assert [lease.ordinal for lease in again] == [0, 1]
            assert ledger.seal(again[0], 0, Ref("again", durable=True))
            with pytest.raises(JournalError):
                ledger.flush()
            assert releases == []
        ledger.flush()
        assert list(releases.reasons().values()) == ["stale"] * 4
        ledger.check()


def test_ctrl_c_in_a_flush(make_ledger, monkeypatch, tmp_path):
    """A transaction that was interrupted is undone, and the next flush writes everything."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(GROUPS, journal=journal, checkpoints=True)
        ledger.prepare(0, tmp_path)
        ledger.seal(ledger.lease(1)[0], 0, Ref("a", durable=True))
        with monkeypatch.context() as patched:
            patched.setattr("fairlead_rollouts._store.journal.insert", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ledger.flush()
        ledger.flush()
        assert read_samples(journal._database) == [(0, 0, 0, 0, "a")]


def test_a_step_on_a_full_disk(make_ledger, finish, tmp_path):
    """A step that could not be kept is kept when it is reported again."""
    with Journal(tmp_path / "journal", keep_steps=2) as journal:
        ledger = make_ledger(20, journal=journal, checkpoints=True)
        finish(ledger, ledger.lease(2))
        ledger.claim(1, 2)
        with small_disk(tmp_path), pytest.raises(JournalError, match="cannot be written"):
            ledger.advance(1, trained=1)
        ledger.check()
        ledger.advance(1, trained=1)
        source = [f"prompt {number}" for number in range(20)]
        later = Ledger.restore(ledger.config, source, step=1, version=1, journal=journal)
        assert later.statistics().applied == 2


@pytest.mark.parametrize("reason", ["full", "folder"])
def test_a_file_that_cannot_be_opened(tmp_path, reason):
    """Only a damaged file is moved aside, and never one that cannot be read or written now."""
    path = tmp_path / "journal" if reason == "full" else tmp_path / "missing" / "journal"
    remedy = "Make room on its disk" if reason == "full" else "a folder that exists"
    with small_disk(tmp_path), pytest.raises(JournalError, match=f"cannot be opened: .*{remedy}") as raised:
        Journal(path)
    assert not [one.name for one in tmp_path.iterdir() if "aside" in one.name]
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.path) == (str(raised.value), str(path))
    path.parent.mkdir(exist_ok=True)
    with Journal(path):
        pass


def test_an_old_journal_on_a_full_disk(tmp_path):
    """It is not used, and can be opened when there is room."""
    for _ in range(2):
        with Journal(tmp_path / "journal"):
            pass
        with small_disk(), pytest.raises(JournalError, match="cannot be opened"):
            Journal(tmp_path / "journal")
