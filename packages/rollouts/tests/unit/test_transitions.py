# SPDX-License-Identifier: Apache-2.0
"""Every transition, every refusal, and the references that each of them releases."""

import sys

import pytest
from invariants import check

from fairlead_rollouts import Completeness, Ledger, LedgerConfig, ReadyFirst, Ref, Shortage


def refuses(ledger, call, match):
    """Check that a call is refused and changes nothing."""

    def describe():
        records = ledger._book.records.values()
        groups = [(record.state, record.waiting, sorted(record.samples), record.attempt) for record in records]
        return groups, ledger.statistics()

    before = describe()
    with pytest.raises(ValueError, match=match):
        call()
    assert describe() == before
    check(ledger)


def bring(ledger, finish, folder, state):
    """Bring prompt 0 into a state, and return its lease."""
    [lease] = ledger.lease(1, deadline=5.0)
    if state == "pending":
        ledger.cancel(lease)
    if state in ("finished", "claimed", "trained", "applied", "dropped"):
        finish(ledger, [lease])
    if state in ("claimed", "trained", "applied"):
        ledger.claim(1, 1)
    if state in ("trained", "applied"):
        ledger.advance(0, trained=1)
        ledger.prepare(1, folder)
    if state == "applied":
        ledger.commit(1)
    if state == "dropped":
        ledger.drop([0], "no_signal")
    return lease


ROWS = [
    ("pending", lambda ledger, lease: ledger.lease(1), "leased", None),
    ("leased", lambda ledger, lease: ledger.fail(lease, reason="it broke"), "pending", None),
    ("leased", lambda ledger, lease: ledger.expire(5.0) == [lease], "pending", None),
    ("leased", lambda ledger, lease: ledger.cancel(lease), "pending", None),
    ("finished", lambda ledger, lease: ledger.claim(1, 1), "claimed", None),
    ("finished", lambda ledger, lease: ledger.drop([0], "no_signal") is None, "dropped", "no_signal"),
    ("finished", lambda ledger, lease: ledger.advance(2) is None and ledger.evict() == 1, "pending", "stale"),
    ("finished", lambda ledger, lease: ledger.advance(2) is None and ledger.claim(1, 1), "pending", "stale"),
    ("claimed", lambda ledger, lease: ledger.drop([0], "no_signal") is None, "dropped", "no_signal"),
    ("claimed", lambda ledger, lease: ledger.advance(1, trained=1) is None, "trained", None),
    ("trained", lambda ledger, lease: ledger.commit(1) is None, "applied", "applied"),
]


@pytest.mark.parametrize(("before", "call", "after", "reason"), ROWS)
def test_table(make_ledger, finish, releases, tmp_path, before, call, after, reason):
    """Each row of the table in the guide, and what it releases."""
    ledger = make_ledger(checkpoints=True, on_stale="requeue")
    lease = bring(ledger, finish, tmp_path, before)
    assert ledger.state(0) == before
    assert call(ledger, lease)
    assert ledger.state(0) == after
    assert set(releases.reasons().values()) == ({reason} if reason else set())
    check(ledger)


@pytest.mark.parametrize("state", ["pending", "leased", "finished", "claimed", "trained", "applied", "dropped"])
def test_refusals(make_ledger, finish, releases, tmp_path, state):
    """A late result returns False and is released, and only finished and claimed groups can be dropped."""
    ledger = make_ledger(checkpoints=True)
    lease = bring(ledger, finish, tmp_path, state)
    if state not in ("finished", "claimed"):
        refuses(ledger, lambda: ledger.drop([0], "late"), f"Prompt 0 is {state!r}")
    if state != "leased":
        assert not ledger.finish(lease, 0, Ref("late"))
        assert not ledger.fail(lease, reason="late")
        assert not ledger.cancel(lease)
        assert releases.reasons()["late"] == "fenced"
        assert (ledger.state(0), ledger.statistics().fenced) == (state, 1)


# The rollout side.


def test_lease(make_ledger):
    """A lease names its samples, its weights and a token of this run; pending groups are leased before new ones."""
    ledger = make_ledger()
    first, second = ledger.lease(2)
    assert (first.prompt_id, first.samples, first.prompt, first.start_version) == (0, (0, 1), "prompt 0", 0)
    assert (first.attempt, first.token >> 32) == (1, second.token >> 32)
    assert first.token != second.token
    leases = ledger.lease(9)
    assert [lease.prompt_id for lease in leases] == [2, 3]
    assert ledger.lease(9) == []
    assert ledger.cancel(leases[1])
    assert ledger.cancel(first)
    assert [(lease.prompt_id, lease.attempt) for lease in ledger.lease(9)] == [(0, 1), (3, 1)], "cancel costs nothing"


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 12),
        ({"serving_lag": 1}, 8),
        ({"max_leased": 5}, 5),
        ({"max_open": 7}, 7),
        ({"lookahead": None, "on_stale": "drop"}, sys.maxsize),
    ],
)
def test_room(make_ledger, finish, options, room):
    """The room is the smallest of the limits, and what is leased, finished or claimed takes some of it."""
    ledger = make_ledger(prompts=99, groups_per_version=4, max_staleness=2, **options)
    assert ledger.room() == room
    finish(ledger, ledger.lease(4)[:2])
    assert options or ledger.room() == 8
    if not options:
        ledger.claim(1, 2)
        ledger.drop([0], "no_signal")
        assert ledger.room() == 9, "another group can be claimed for it"


def test_finish(make_ledger):
    """A group is finished with its last sample; by default its versions are those of the lease and of the trainer."""
    ledger = make_ledger(serving_lag=1, groups_per_version=4)
    [lease] = ledger.lease(1)
    ledger.advance(1)
    assert ledger.finish(lease, 1, Ref("b"))
    assert ledger.state(0) == "leased"
    assert ledger.finish(lease, 0, Ref("a"), oldest_version=1, newest_version=1)
    assert ledger.state(0) == "finished"
    group = ledger.claim(1, 1).groups[0]
    samples = [
        (sample.index, sample.ref.value, sample.oldest_version, sample.newest_version) for sample in group.samples
    ]
    assert samples == [(0, "a", 1, 1), (1, "b", 0, 1)]
    assert (group.oldest_version, group.newest_version) == (0, 1)


def test_finish_many(make_ledger, releases):
    """All results of a call are checked before any is stored, and a result that is reported twice is not released."""
    ledger = make_ledger()
    first, second = ledger.lease(2)
    results = [
        (lease, sample, Ref(f"{lease.prompt_id}-{sample}", durable=True))
        for lease in (first, second)
        for sample in (0, 1)
    ]
    refuses(ledger, lambda: ledger.finish_many([*results, (second, 2, Ref("c"))]), "sample is 2")
    again = first, 0, Ref("0-0", durable=True)
    assert ledger.finish_many([*results, again, (first, 0, Ref("b"))]) == [True, True, True, True, False, False]
    assert releases.reasons() == {"b": "fenced"}


@pytest.mark.parametrize("retry", ["sample", "group"])
def test_a_failure(make_ledger, releases, retry):
    """With retry "sample" the next lease is for the failed samples only; with "group" the others are released."""
    ledger = make_ledger(group_size=3, completeness=Completeness(retry=retry))
    [lease] = ledger.lease(1)
    ledger.lease(3)
    ledger.finish(lease, 0, Ref("a"))
    assert ledger.fail(lease, [1], reason="out of memory")
    assert ledger.state(0) == "leased"
    ledger.finish(lease, 2, Ref("c"))
    assert (ledger.state(0), ledger.room()) == ("pending", 1)
    [again] = ledger.lease(9)
    assert (again.samples, again.attempt) == ((1,) if retry == "sample" else (0, 1, 2), 2)
    assert "A sample has failed: out of memory." in ledger.explain(0)
    assert releases.reasons() == ({} if retry == "sample" else {"a": "retried", "c": "retried"})
    assert ledger.statistics().regenerated == len(releases)


@pytest.mark.parametrize("min_samples", [2, 3])
def test_no_attempt_is_left(make_ledger, releases, min_samples):
    """After the last attempt a group is accepted with `min_samples`, or dropped; a failure is never a sample."""
    ledger = make_ledger(group_size=3, completeness=Completeness(min_samples=min_samples, max_attempts=2))
    [lease] = ledger.lease(1)
    for sample in (0, 1):
        ledger.finish(lease, sample, Ref(sample))
    ledger.fail(lease, [2], reason="it broke")
    assert ledger.state(0) == "pending", "smaller groups are accepted only after the last attempt"
    [lease] = ledger.lease(1)
    ledger.fail(lease, reason="it broke")
    if min_samples == 2:
        assert [sample.index for sample in ledger.claim(1, 1).groups[0].samples] == [0, 1]
        return
    assert ledger.state(0) == "dropped"
    assert releases.reasons() == {0: "failed", 1: "failed"}
    assert ledger.statistics().drops == {"failed": 1}


# The trainer side.


@pytest.mark.parametrize(("policy", "prompt_ids"), [(None, [2, 0]), (ReadyFirst(), [0, 2])])
def test_policies(make_ledger, finish, policy, prompt_ids):
    """`OldestFirst` takes the oldest weights, `ReadyFirst` the lowest prompt id."""
    ledger = make_ledger(max_staleness=2, on_stale="requeue", **({"policy": policy} if policy else {}))
    ledger.advance(1)
    leases = ledger.lease(3)
    finish(ledger, leases[:1])
    finish(ledger, leases[2:], oldest_version=0)
    assert [group.prompt_id for group in ledger.claim(1, 2).groups] == prompt_ids


def test_the_version_of_a_claim(make_ledger, finish):
    """A claim trains at the version after those whose groups are all claimed, also if a claim is made ahead."""
    ledger = make_ledger(max_staleness=2)
    finish(ledger, ledger.lease(6))
    assert [ledger.claim(step, 1).version for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    ledger.drop([0], "no_signal")
    assert ledger.claim(5, 2).version == 2, "version 0 counts as full, because version 1 has been claimed"


def test_a_short_step_uses_up_its_places(make_ledger, finish):
    """A step that takes fewer groups than requested ends its version too, so the next one is not too old."""
    ledger = make_ledger(groups_per_version=4, max_staleness=0, on_stale="requeue")
    leases = ledger.lease(4)
    finish(ledger, leases[:2])
    assert ledger.claim(1, 4) == Shortage("not_enough", have=2, need=4)
    assert ledger.claim(1, 4, minimum=2).version == 0
    finish(ledger, leases[2:])
    assert ledger.claim(2, 2) == Shortage("not_enough", 0, 2), "groups of version 0 are too old for version 1"
    check(ledger)


def test_drop(make_ledger, finish):
    """The places of groups that a filter drops can be claimed again for the same step, until it is trained."""
    ledger = make_ledger()
    finish(ledger, ledger.lease(4))
    ledger.claim(1, 2)
    ledger.drop([0, 3], "no_signal")
    assert [group.prompt_id for group in ledger.claim(1, 2).groups] == [1, 2]
    ledger.advance(1, trained=1)
    assert [ledger.state(prompt_id) for prompt_id in range(4)] == ["dropped", "applied", "applied", "dropped"]
    assert ledger.statistics().drops == {"no_signal": 2}
    refuses(ledger, lambda: ledger.advance(0), "version is 0, below 1")
    refuses(ledger, lambda: ledger.claim(1, 1), "step 1 has been trained")


# Staleness.


@pytest.mark.parametrize("end", ["finished", "expired"])
def test_wait(make_ledger, finish, end):
    """With "wait" a claim waits for the group that it would make too old, and names it, until the group ends."""
    ledger = make_ledger(groups_per_version=1)
    slow, quick = ledger.lease(2, deadline=1.0)
    finish(ledger, [quick])
    ledger.claim(1, 1)
    ledger.advance(1, trained=1)
    finish(ledger, ledger.lease(1))
    assert ledger.claim(2, 1) == Shortage("wait", have=1, need=1, blocked_by=(slow.prompt_id,))
    assert (ledger.statistics().waits, ledger.statistics().blocked_by) == (1, (0,))
    finish(ledger, [slow]) if end == "finished" else ledger.expire(1.0)
    assert [group.prompt_id for group in ledger.claim(2, 1).groups] == [0 if end == "finished" else 2]
    assert ledger.statistics().staleness == ({0: 1, 1: 1} if end == "finished" else {0: 2})


# Refusals.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ledger, lease: ledger.lease(0), "count is 0"),
        (lambda ledger, lease: ledger.lease(1, serving_version=2), "serving_version is 2, and the trainer is at 1"),
        (lambda ledger, lease: ledger.claim(1, 0), "count is 0 and minimum is 0"),
        (lambda ledger, lease: ledger.claim(1, 2, minimum=3), "count is 2 and minimum is 3"),
        (lambda ledger, lease: ledger.claim(1, 5), "at most 4 groups can be open"),
        (lambda ledger, lease: ledger.claim(1, 3), "count is 3, but 2 of the 2 groups of version 1 are left"),
        (lambda ledger, lease: ledger.state(-1), "prompt_id is -1"),
        (lambda ledger, lease: ledger.finish(lease, 2, Ref("a")), "2 samples, counted from 0"),
        (lambda ledger, lease: ledger.fail(lease, [2], reason="it broke"), "2 samples, counted from 0"),
        (lambda ledger, lease: ledger.finish(lease, 0, Ref("a"), newest_version=3), "newest_version is 3"),
        (lambda ledger, lease: ledger.finish(lease, 0, Ref("a"), newest_version=0), "oldest_version is 1 and newest"),
        (lambda ledger, lease: ledger.finish(lease, 0, Ref("a"), oldest_version=-1), "oldest_version is -1"),
        (lambda ledger, lease: ledger.drop([9], "late"), "Prompt 9 is 'unseen'"),
        (lambda ledger, lease: ledger.lease(3), "A prompt must be a JSON value"),
    ],
)
def test_wrong_arguments(make_ledger, call, message):
    """Wrong arguments are refused with what was found, and change nothing."""
    ledger = make_ledger(["first", object()])
    ledger.advance(1)
    [lease] = ledger.lease(1)
    refuses(ledger, lambda: call(ledger, lease), message)


def test_a_callback_that_fails(finish, caplog):
    """An error of a callback is logged, the others run, the claim is returned, and `flush` raises the error."""
    calls = []

    def on_release(ref, reason):
        calls.append(ref.value)
        if len(calls) == 1:
            raise OSError("503 slow down")

    config = LedgerConfig(
        group_size=1, groups_per_version=4, max_staleness=1, lookahead=None, policy=ReadyFirst(), on_stale="drop"
    )
    ledger = Ledger(config, range(100), on_release=on_release)
    finish(ledger, ledger.lease(2))
    ledger.advance(2)
    finish(ledger, ledger.lease(4))
    claim = ledger.claim(1, 2)
    assert [group.prompt_id for group in claim.groups] == [2, 3]
    assert len(calls) == 2
    assert "503 slow down" in caplog.text
    assert ledger.claim(1, 2) == claim, "a repeated call has the same groups"
    with pytest.raises(OSError, match="503 slow down"):
        ledger.flush()
    ledger.flush()


def test_explain(make_ledger, finish):
    """The ledger says of each group what it knows."""
    ledger = make_ledger()
    first, second = ledger.lease(2)
    ledger.finish(first, 1, Ref("b"))
    assert ledger.explain(0) == (
        "Prompt 0 is leased, attempt 1 of 3. 1 of 2 samples are finished. "
        "Its lease started at version 0 and owes samples [0]. "
        "Its oldest version is 0, and the next claim trains at 0; 1 is the last version that may train it."
    )
    finish(ledger, [second])
    ledger.claim(4, 1)
    assert "Step 4 trains it at version 0, 0 versions after its weights." in ledger.explain(1)
