# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a snapshot holds, and what a restored ledger keeps, regenerates and releases."""

import random

import pytest
from invariants import check

from fairlead_rollouts import (
    IllegalTransitionError,
    Journal,
    Ledger,
    LedgerConfig,
    Ref,
    SnapshotError,
)

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


def test_a_checkpoint_covers_its_steps_only(ledger, tmp_path, releases):
    """Groups that a later step has claimed are open again, and durable ones are finished at once."""
    path = ledger.prepare(1, tmp_path)
    assert path.name == "rollouts.ledger"
    assert [one.name for one in tmp_path.iterdir()] == ["rollouts.ledger"]
    later = restore(ledger, tmp_path)
    check(later)
    assert [later.state(prompt_id) for prompt_id in range(7)] == [
        *["applied"] * 2,
        *["finished"] * 3,
        "pending",
        "unseen",
    ]
    assert [group.prompt_id for group in later.claim(2, 2).groups] == [2, 3]
    assert [lease.prompt_id for lease in later.lease(2)] == [5, 6]
    assert releases == []


def test_commit(ledger, tmp_path, releases):
    """Durable references of trained groups are released when their checkpoint is complete."""
    with pytest.raises(ValueError, match=r"step is 1, and steps \[\] are prepared"):
        ledger.commit(1)
    ledger.prepare(1, tmp_path)
    assert ledger.state(0) == "trained"
    with pytest.raises(IllegalTransitionError, match="In this state these methods do: commit"):
        ledger.drop([0], "late")
    with pytest.raises(IllegalTransitionError):
        ledger.unclaim(1)
    assert releases == []
    ledger.commit(1)
    assert set(releases.reasons().values()) == {"applied"}
    assert [ledger.state(prompt_id) for prompt_id in range(3)] == ["applied", "applied", "claimed"]
    with pytest.raises(ValueError, match="step 1 has been committed"):
        ledger.prepare(0, tmp_path)
    with pytest.raises(ValueError, match="which is no directory"):
        ledger.prepare(2, tmp_path / "missing")


def test_commits_out_of_order(ledger, tmp_path):
    """The checkpoint of an earlier step may be complete later, and a commit may be repeated: nothing changes."""
    ledger.prepare(1, tmp_path)
    ledger.advance(2, trained=2)
    ledger.prepare(2, tmp_path)
    ledger.commit(2)
    before = [ledger.state(prompt_id) for prompt_id in range(7)]
    ledger.commit(1)
    ledger.commit(2)
    assert [ledger.state(prompt_id) for prompt_id in range(7)] == before
    check(ledger)


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
    assert [later.state(prompt_id) for prompt_id in range(4)] == ["applied", "applied", "pending", "pending"]


def test_results_of_the_dead_process_are_fenced(ledger, tmp_path):
    """Leases of the process that ended are worth nothing in the next one, even of erased versions."""
    ledger.prepare(1, tmp_path)
    ledger.advance(2)
    [lease] = ledger.lease(1)
    later = restore(ledger, tmp_path)
    assert not later.finish(lease, 0, Ref("late"))
    assert later.statistics().fenced == 1


def test_samples_of_lost_versions(ledger, tmp_path, finish, releases):
    """Versions after the checkpoint will be other weights, so their samples are released and generated again."""
    with Journal(tmp_path / "journal") as journal:
        ledger._use(journal)
        ledger.prepare(1, tmp_path)
        ledger.advance(2)
        finish(ledger, ledger.lease(1))
        finish(ledger, ledger.lease(1), newest_version=1, oldest_version=1)
        ledger.flush()
        later = restore(ledger, tmp_path, journal=journal, on_release=releases)
        check(later)
    assert [later.state(6), later.state(7)] == ["pending", "finished"]
    assert {one for one, reason in releases.reasons().items() if reason == "lost"} == {"6-0 of 1", "6-1 of 1"}


def test_the_journal_keeps_what_the_snapshot_has_not_seen(ledger, tmp_path, finish):
    """Finished groups after the checkpoint are finished in the next process; their prompts are read again."""
    with Journal(tmp_path / "journal") as journal:
        ledger._use(journal)
        ledger.prepare(1, tmp_path)
        finish(ledger, ledger.lease(2))
        ledger.flush()
        later = restore(ledger, tmp_path, journal=journal)
        assert [later.state(prompt_id) for prompt_id in range(5, 9)] == ["pending", "finished", "finished", "unseen"]
        changed = [*PROMPTS[:6], "another prompt", *PROMPTS[7:]]
        later.flush()
        with pytest.warns(UserWarning, match="Prompt 6 is 'another prompt', and the journal has samples of 'prompt 6'"):
            again = restore(ledger, tmp_path, journal=journal, source=changed)
        check(again)
        assert [again.state(6), again.state(7)] == ["pending", "finished"]


def test_the_journal_keeps_the_last_steps(make_ledger, finish, tmp_path, releases):
    """Without a place in the trainer's checkpoint the journal has the snapshots: of the last steps, and of step 0."""
    path = tmp_path / "journal"
    with Journal(path, keep_steps=3) as journal:
        ledger = make_ledger(Loader(), journal=journal, max_staleness=2)
        for step in (1, 2, 3, 4):
            finish(ledger, ledger.lease(4))
            prompt_ids = [group.prompt_id for group in ledger.claim(step, 2).groups]
            if step == 3:
                ledger.drop(prompt_ids[:1], "no_signal")
            ledger.advance(step, trained=step)
        config, taken = ledger.config, prompt_ids
    places = {"directory": None, "on_release": releases, "checkpoints": False}
    with Journal(path, keep_steps=3) as journal:
        found = r"no snapshot of step 1; the journal holds steps 2, 3, 4\. Pass a step"
        with pytest.raises(SnapshotError, match=found):
            restore(ledger, None, step=1, version=1, journal=journal)
        later = Ledger.restore(config, Loader(), step=3, version=3, journal=journal, **places)
        check(later)
        assert [later.state(one) for one in range(6)] == [*["applied"] * 4, "dropped", "applied"]
        # Step 4 was applied at once, so its payloads are gone, and its prompts are generated again.
        assert [later.state(one) for one in taken] == ["pending"] * 2
        assert [lease.prompt_id for lease in later.lease(2)] == taken
    # Step 4 belongs to a branch that has been left.
    with Journal(path, keep_steps=3) as journal, pytest.raises(SnapshotError, match="the journal holds steps 2, 3"):
        restore(ledger, None, step=4, version=4, journal=journal)
    with Journal(tmp_path / "other") as journal:
        make_ledger(PROMPTS, journal=journal)
        with pytest.raises(SnapshotError, match=r"the journal holds none\. Make the journal with keep_steps"):
            restore(ledger, None, step=0, version=0, journal=journal)
    with Journal(tmp_path / "new", keep_steps=1) as journal:
        first = make_ledger(PROMPTS, journal=journal)
        assert restore(first, None, step=0, version=0, journal=journal).statistics().applied == 0
    with pytest.raises(ValueError, match="needs the directory of the checkpoint, or a journal"):
        restore(ledger, None)
    with pytest.raises(ValueError, match="keep_steps is -1"):
        Journal(tmp_path / "bad", keep_steps=-1)


def test_the_journal_of_a_branch_that_was_left(ledger, tmp_path, finish):
    """After a run on another node, the journal of the run before it is set aside: its weights have been replaced."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with Journal(tmp_path / "journal") as journal:
        ledger._use(journal)
        ledger.prepare(1, first)
        ledger.advance(2)
        finish(ledger, ledger.lease(1))
    with Journal(tmp_path / "journal of another node") as journal:
        later = restore(ledger, first, journal=journal, run=8)
        later.advance(2, trained=2)
        later.prepare(2, second)
    with Journal(tmp_path / "journal") as journal:
        with pytest.warns(UserWarning, match="the process that wrote the checkpoint has not used it"):
            again = restore(ledger, second, step=2, version=2, journal=journal, run=9)
        check(again)
        assert again.state(6) == "unseen"
    with Journal(tmp_path / "journal") as journal:
        restore(ledger, second, step=2, version=2, journal=journal, run=10)


def test_prompts_are_json_before_a_crash_too(make_ledger, tmp_path, finish):
    """A tuple is a list from the beginning, so that the journal knows its prompt again."""
    prompts = [("math", 1), {"row": (2, 3)}]
    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(prompts, checkpoints=True, journal=journal)
        ledger.prepare(0, tmp_path)
        leases = ledger.lease(2)
        assert [lease.prompt for lease in leases] == [["math", 1], {"row": [2, 3]}]
        finish(ledger, leases)
        ledger.flush()
        later = restore(ledger, tmp_path, step=0, version=0, journal=journal, source=prompts)
        assert later.statistics().finished == 2


def test_offered_prompts_get_their_samples_back(make_ledger, tmp_path, finish):
    """Without a source, samples wait until the prompt of their prompt_id is offered again."""
    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(None, checkpoints=True, journal=journal)
        ledger.prepare(0, tmp_path)
        ledger.offer(["a", "b"])
        finish(ledger, ledger.lease(2))
        ledger.flush()
        later = restore(ledger, tmp_path, step=0, version=0, journal=journal, source=None)
        assert later.state(0) == "unseen"
        later.offer(["a"])
        assert later.state(0) == "finished"
        check(later)


def test_a_crash_between_checkpoint_and_commit(ledger, tmp_path, releases):
    """Payloads of steps that the checkpoint covers are released by the next process."""
    with Journal(tmp_path / "journal") as journal:
        ledger._use(journal)
        ledger.prepare(1, tmp_path)
        later = restore(ledger, tmp_path, journal=journal, on_release=releases)
        check(later)
    assert releases.reasons() == {f"{prompt_id}-{sample} of 1": "applied" for prompt_id in (0, 1) for sample in (0, 1)}


def test_payloads_that_are_gone(ledger, tmp_path):
    """A payload that can no longer be read is generated again."""
    ledger.prepare(1, tmp_path)
    later = restore(ledger, tmp_path, exists=lambda ref: ref.value != "2-1 of 1")
    assert later.state(2) == "pending"
    assert later.lease(1)[0].samples == (1,)


def test_the_source_continues(make_ledger, finish, tmp_path):
    """The state of a loader is in the snapshot, so the next lease has the next item."""
    ledger = make_ledger(Loader(), checkpoints=True)
    finish(ledger, ledger.lease(3))
    ledger.prepare(0, tmp_path)
    later = restore(ledger, tmp_path, step=0, version=0, source=Loader())
    assert [lease.prompt for lease in later.lease(1)] == ["prompt 3"]


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
def test_damaged_snapshots(ledger, tmp_path, damage):
    """A snapshot that is missing or damaged is an error, never a start from the beginning."""
    path = ledger.prepare(1, tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes({"cut": content[:5000], "flipped": content, "empty": b""}[damage])
    with pytest.raises(SnapshotError, match="cannot be read: No such file" if damage == "missing" else "is damaged"):
        restore(ledger, tmp_path)


def test_a_full_disk(ledger, tmp_path, monkeypatch):
    """A snapshot that cannot be written leaves nothing, and the one before it stays."""
    content = ledger.prepare(1, tmp_path).read_bytes()

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        ledger.prepare(1, tmp_path)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"rollouts.ledger": content}


def test_snapshots_of_another_run(ledger, tmp_path, monkeypatch):
    """The step, the group size and the schema have to fit."""
    ledger.prepare(1, tmp_path)
    with pytest.raises(SnapshotError, match=r"its step is 1, not 2\. Pass step=1"):
        restore(ledger, tmp_path, step=2)
    with pytest.raises(SnapshotError, match="its group_size is 2, not 3"):
        Ledger.restore(
            LedgerConfig(group_size=3, groups_per_version=2, max_staleness=1),
            step=1,
            version=1,
            directory=tmp_path,
        )
    monkeypatch.setattr("fairlead_rollouts._store.snapshot.SCHEMA", 2)
    with pytest.raises(SnapshotError, match="it has schema 1, and this version of fairlead-rollouts reads schema 2"):
        restore(ledger, tmp_path)


def test_the_journal_of_another_job(make_ledger, tmp_path):
    """A new ledger does not read the journal of an old one."""
    with Journal(tmp_path / "journal") as journal:
        ledger = make_ledger(journal=journal)
        [lease] = ledger.lease(1)
        ledger.finish(lease, 0, Ref("a", durable=True))
        ledger.flush()
        with pytest.warns(UserWarning, match="moved to 'journal.aside-1': it belongs to the ledger"):
            make_ledger(journal=journal)


def test_settled_prompt_ids_are_small(make_ledger):
    """The fates of a million prompts, one in a hundred of them dropped, take a quarter of a megabyte."""
    settled = make_ledger()._book.settled
    order = random.Random(0)
    late = set(order.sample(range(100_000), 1000))
    for prompt_id in [one for one in range(100_000) if one not in late]:
        settled.add(prompt_id, dropped=prompt_id % 100 == 0)
    assert settled.frontier == min(late)
    for prompt_id in late:
        settled.add(prompt_id, dropped=False)
    assert settled.frontier == 100_000
    assert settled.is_dropped(300) or 300 in late
    assert len(settled.settled_bits) + len(settled.dropped_bits) < 30_000
