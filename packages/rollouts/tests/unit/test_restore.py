# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a snapshot holds, and what a restored ledger keeps, regenerates and releases."""

import hashlib

import pytest
from invariants import check

from fairlead_rollouts import Ledger, LedgerConfig, Ref, SnapshotError

PROMPTS = [f"prompt {number}" for number in range(20)]


class Loader:
    """A source with a state of its own, which is its position."""

    def __init__(self):
        self.position = 0

    def get(self, prompt_id):
        self.position += 1
        return PROMPTS[self.position - 1]

    def state(self):
        return str(self.position).encode()

    def restore(self, state, prompt_id):
        self.position = int(state)


def restore(ledger, directory, *, step=1, version=1, **options):
    source = options.pop("source", PROMPTS)
    return Ledger.restore(ledger.config, source, step=step, version=version, directory=directory, **options)


@pytest.fixture
def ledger(make_ledger, finish):
    """Return a ledger after step 1, with a claim for step 2, a finished group, and one in generation."""
    made = make_ledger(PROMPTS, max_staleness=2, checkpoints=True)
    finish(made, made.lease(5))
    made.lease(1)
    assert len(made.claim(1, 2).groups) == len(made.claim(2, 2).groups) == 2
    made.advance(1, trained=1)
    return made


def states(ledger, count):
    return [ledger.state(prompt_id) for prompt_id in range(count)]


def test_a_checkpoint_covers_its_steps_only(ledger, tmp_path, releases):
    """Groups that a later step has claimed are open again, and durable ones are finished at once."""
    assert ledger.prepare(1, tmp_path).name == "rollouts.ledger"
    assert [file.name for file in tmp_path.iterdir()] == ["rollouts.ledger"]
    later = restore(ledger, tmp_path)
    check(later)
    assert states(later, 7) == [*["applied"] * 2, *["finished"] * 3, "pending", "unseen"]
    assert [group.prompt_id for group in later.claim(2, 2).groups] == [2, 3]
    assert [lease.prompt_id for lease in later.lease(2)] == [5, 6]
    assert releases == []


def test_commit(ledger, tmp_path, releases):
    """Durable references of trained groups are released when their checkpoint is complete, in any order of steps."""
    with pytest.raises(ValueError, match=r"step is 1, and steps \[\] are prepared"):
        ledger.commit(1)
    ledger.prepare(1, tmp_path)
    assert ledger.state(0) == "trained"
    with pytest.raises(ValueError, match="Prompt 0 is 'trained'; only finished and claimed groups"):
        ledger.drop([0], "late")
    ledger.advance(2, trained=2)
    ledger.prepare(2, tmp_path)
    assert releases == []
    ledger.commit(2)
    assert set(releases.reasons().values()) == {"applied"}
    assert states(ledger, 6) == [*["applied"] * 4, "finished", "leased"]
    ledger.commit(1)
    ledger.commit(2)
    assert states(ledger, 6) == [*["applied"] * 4, "finished", "leased"]
    check(ledger)
    with pytest.raises(ValueError, match="step 2 has been committed"):
        ledger.prepare(0, tmp_path)
    with pytest.raises(ValueError, match="which is no directory"):
        ledger.prepare(3, tmp_path / "missing")


def test_references_that_are_not_durable(make_ledger, tmp_path, releases):
    """They are released when trained, and regenerated after a crash."""
    ledger = make_ledger(PROMPTS, checkpoints=True)
    for lease in ledger.lease(4):
        for sample in lease.samples:
            ledger.finish(lease, sample, Ref((lease.prompt_id, sample)))
    ledger.claim(1, 2)
    ledger.advance(1, trained=1)
    assert set(releases.reasons().values()) == {"trained"}
    ledger.prepare(1, tmp_path)
    later = restore(ledger, tmp_path)
    assert states(later, 4) == ["applied", "applied", "pending", "pending"]


def test_what_a_restored_ledger_refuses(ledger, tmp_path):
    """Leases of the dead process are worth nothing, and payloads that can no longer be read are generated again."""
    ledger.prepare(1, tmp_path)
    ledger.advance(2)
    [lease] = ledger.lease(1)
    later = restore(ledger, tmp_path, exists=lambda ref: ref.value != "2-1 of 1")
    assert not later.finish(lease, 0, Ref("late"))
    assert later.statistics().fenced == 1
    assert later.state(2) == "pending"
    assert later.lease(1)[0].samples == (1,)


def test_the_source_continues(make_ledger, finish, tmp_path):
    """The state of a loader is in the snapshot, so the next lease has the next item."""
    ledger = make_ledger(Loader(), checkpoints=True)
    finish(ledger, ledger.lease(3))
    ledger.prepare(0, tmp_path)
    later = restore(ledger, tmp_path, step=0, version=0, source=Loader())
    assert [lease.prompt for lease in later.lease(1)] == ["prompt 3"]


def with_checksum(*lines):
    body = b"".join(line + b"\n" for line in lines)
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def test_damaged_snapshots(ledger, tmp_path):
    """A snapshot that is missing, cut, flipped or filled is a `SnapshotError`, never a start from the beginning."""
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
            restore(ledger, tmp_path)
    path.unlink()
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        restore(ledger, tmp_path)
    path.write_bytes(content)
    assert restore(ledger, tmp_path).state(0) == "applied"


def test_snapshots_of_another_run(ledger, tmp_path, monkeypatch):
    """The step, the group size and the schema have to fit."""
    ledger.prepare(1, tmp_path)
    with pytest.raises(SnapshotError, match=r"its step is 1, not 2\. Pass step=1"):
        restore(ledger, tmp_path, step=2)
    config = LedgerConfig(group_size=3, groups_per_version=2, max_staleness=1)
    with pytest.raises(SnapshotError, match="its group_size is 2, not 3"):
        Ledger.restore(config, PROMPTS, step=1, version=1, directory=tmp_path)
    monkeypatch.setattr("fairlead_rollouts._snapshot.SCHEMA", 4)
    with pytest.raises(SnapshotError, match="it has schema 3, and this version of fairlead-rollouts reads schema 4"):
        restore(ledger, tmp_path)


def test_a_run_that_began_without_a_ledger(make_ledger, finish, tmp_path):
    """`begin` continues after the steps of a job that has had no ledger, at the prompt that the caller names."""
    config = make_ledger().config
    ledger = Ledger.begin(config, PROMPTS, step=7, version=7, prompt_id=5, file=tmp_path / "ledger")
    check(ledger)
    assert (ledger.last_trained, ledger.version, ledger.state(4), ledger.state(5)) == (7, 7, "applied", "unseen")
    leases = ledger.lease(2)
    assert [(lease.prompt_id, lease.start_version) for lease in leases] == [(5, 7), (6, 7)]
    finish(ledger, leases)
    with pytest.raises(ValueError, match="step 7 has been trained"):
        ledger.claim(7, 2)
    assert ledger.claim(8, 2).version == 7
    ledger.prepare(8, tmp_path)
    ledger.close()
    assert restore(ledger, tmp_path, step=8, version=8).statistics().applied == 7
