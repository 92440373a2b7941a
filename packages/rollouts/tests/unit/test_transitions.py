# SPDX-License-Identifier: Apache-2.0
"""Every transition, every refusal, and the references that each of them releases."""

import pytest
from invariants import check

from fairlead_rollouts import (
    Claim,
    Completeness,
    Ledger,
    LedgerConfig,
    ReadyFirst,
    Ref,
    Shortage,
)


def snapshot(ledger):
    """Return everything that a refused call must leave unchanged."""
    records = ledger._book.records
    states = {
        prompt_id: (one.state, one.waiting, sorted(one.samples), one.attempt) for prompt_id, one in records.items()
    }
    return states, ledger.statistics(), ledger._book.next


def refuses(ledger, call, match, error=ValueError):
    before = snapshot(ledger)
    with pytest.raises(error, match=match):
        call()
    assert snapshot(ledger) == before
    check(ledger)


# The table of transitions.


@pytest.mark.parametrize("prompt", [object(), {1, 2}, "x" * 5000], ids=["object", "set", "long"])
def test_wrong_prompts(make_ledger, prompt):
    """A prompt is a short JSON value."""
    from_source = make_ledger([prompt])
    refuses(from_source, lambda: from_source.lease(1), "prompt")


def test_lease(make_ledger):
    """A lease names its samples, its weights and a token of this run; at most `room()` groups are leased."""
    ledger = make_ledger()
    first, second = ledger.lease(2)
    assert (first.prompt_id, first.samples, first.prompt, first.start_version) == (0, (0, 1), "prompt 0", 0)
    assert first.attempt == 1
    assert first.token >> 32 == second.token >> 32 == 7
    assert first.token != second.token
    assert ledger.room() == 2
    assert [lease.prompt_id for lease in ledger.lease(9)] == [2, 3]
    assert ledger.lease(9) == []


def test_pending_groups_are_leased_first(make_ledger):
    """A group that was taken back is leased before new prompts, lowest prompt_id first."""
    ledger = make_ledger()
    leases = ledger.lease(4)
    for lease in (leases[3], leases[1]):
        assert ledger.cancel(lease)
    assert [(lease.prompt_id, lease.attempt) for lease in ledger.lease(4)] == [(1, 1), (3, 1)]


def test_finish(make_ledger, finish, releases):
    """A group is finished with its last sample; by default its versions are those of the lease and of the trainer."""
    ledger = make_ledger(serving_lag=1, groups_per_version=4)
    [lease] = ledger.lease(1)
    ledger.advance(1)
    assert ledger.finish(lease, 1, Ref("b"))
    assert ledger.state(0) == "leased"
    assert ledger.finish(lease, 0, Ref("a"), oldest_version=1, newest_version=1)
    assert ledger.state(0) == "finished"
    group = ledger.claim(1, 1).groups[0]
    assert [(one.index, one.ref.value, one.oldest_version, one.newest_version) for one in group.samples] == [
        (0, "a", 1, 1),
        (1, "b", 0, 1),
    ]
    assert (group.oldest_version, group.newest_version) == (0, 1)
    assert releases == []


def test_finish_many(make_ledger):
    """Many results are accepted in one call, and all are checked before any is stored."""
    ledger = make_ledger()
    first, second = ledger.lease(2)
    results = [(lease, sample, Ref((lease.prompt_id, sample))) for lease in (first, second) for sample in (0, 1)]
    refuses(ledger, lambda: ledger.finish_many([*results, (second, 2, Ref("c"))]), "sample is 2")
    assert ledger.finish_many([*results, results[0]]) == [True, True, True, True, False]
    assert ledger.state(0) == ledger.state(1) == "finished"


def test_the_same_call_again(make_ledger, releases):
    """A result that is reported twice is not released: its payload is that of the sample."""
    ledger = make_ledger()
    [lease] = ledger.lease(1)
    assert ledger.finish(lease, 0, Ref("a", durable=True))
    assert not ledger.finish(lease, 0, Ref("a", durable=True))
    assert not ledger.finish(lease, 0, Ref("b", durable=True))
    assert list(releases.reasons()) == ["b"]
    assert len(releases) == 1
    check(ledger)


@pytest.mark.parametrize("late", ["twice", "cancelled", "failed", "expired", "dropped", "applied"])
def test_late_results_are_fenced(make_ledger, finish, releases, late):
    """A late result returns False, is counted, and its reference is released."""
    ledger = make_ledger()
    [lease] = ledger.lease(1, deadline=5.0)
    match late:
        case "cancelled":
            ledger.cancel(lease)
        case "failed":
            ledger.fail(lease, reason="it broke")
        case "expired":
            ledger.expire(5.0)
        case _:
            finish(ledger, [lease])
    if late in ("dropped", "applied"):
        ledger.claim(1, 1)
        ledger.drop([0], "no_signal") if late == "dropped" else ledger.advance(1, trained=1)
    before = ledger.state(0)
    assert not ledger.finish(lease, 0, Ref("late"))
    assert not ledger.finish(lease, 0, Ref("later"))
    assert not ledger.fail(lease, reason="late")
    if before != "leased":
        assert not ledger.cancel(lease)
    assert ledger.state(0) == before
    assert ledger.statistics().fenced == 2
    assert releases.reasons()["late"] == releases.reasons()["later"] == "fenced"
    check(ledger)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"newest_version": 3}, "newest_version is 3"),
        ({"oldest_version": 2, "newest_version": 1}, "oldest_version is 2 and newest_version is 1"),
        ({"oldest_version": -1}, "oldest_version is -1"),
    ],
)
def test_wrong_versions(make_ledger, versions, message):
    """Versions ascend, and are not newer than the trainer."""
    ledger = make_ledger(max_staleness=4)
    ledger.advance(2)
    [lease] = ledger.lease(1)
    refuses(ledger, lambda: ledger.finish(lease, 0, Ref("a"), **versions), message)


def test_a_failed_sample_is_generated_again(make_ledger, releases):
    """With retry "sample" the next lease is for the failed samples only, and costs no room."""
    ledger = make_ledger(group_size=3)
    [lease] = ledger.lease(1)
    ledger.lease(3)
    assert ledger.room() == 0
    ledger.finish(lease, 0, Ref("a"))
    assert ledger.fail(lease, [1], reason="out of memory")
    assert ledger.state(0) == "leased"
    ledger.finish(lease, 2, Ref("c"))
    assert ledger.state(0) == "pending"
    assert ledger.room() == 1
    [again] = ledger.lease(9)
    assert (again.prompt_id, again.samples, again.attempt) == (0, (1,), 2)
    assert ledger.finish(again, 1, Ref("b"))
    assert [one.ref.value for one in ledger.claim(1, 1).groups[0].samples] == ["a", "b", "c"]
    assert releases == []


def test_a_failed_group_is_generated_again(make_ledger, releases):
    """With retry "group" the finished samples are released, and counted as regenerated."""
    ledger = make_ledger(completeness=Completeness(retry="group"))
    [lease] = ledger.lease(1)
    ledger.finish(lease, 0, Ref("a"))
    ledger.fail(lease, reason="out of memory")
    assert releases.reasons() == {"a": "retried"}
    assert ledger.lease(1)[0].samples == (0, 1)
    assert ledger.statistics().regenerated == 1


def test_why_a_group_failed(make_ledger):
    """The reason of a failure is that of the event, also if another sample is the last, and `explain` keeps it."""
    events = []
    ledger = make_ledger(completeness=Completeness(max_attempts=2), on_event=events.append)
    [lease] = ledger.lease(1)
    ledger.fail(lease, [0], reason="out of memory")
    ledger.finish(lease, 1, Ref("b"))
    assert (events[-1].after, events[-1].reason) == ("pending", "out of memory")
    [lease] = ledger.lease(1)
    assert "A sample has failed: out of memory." in ledger.explain(0)
    ledger.fail(lease, reason="it broke")
    assert (events[-1].after, events[-1].reason) == ("dropped", "it broke")
    assert ledger.statistics().drops == {"failed": 1}


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
        assert [one.index for one in ledger.claim(1, 1).groups[0].samples] == [0, 1]
        return
    assert ledger.state(0) == "dropped"
    assert releases.reasons() == {0: "failed", 1: "failed"}
    assert ledger.statistics().drops == {"failed": 1}


def test_cancel_costs_no_attempt(make_ledger):
    """A cancelled lease may be repeated any number of times."""
    ledger = make_ledger(completeness=Completeness(max_attempts=1))
    for _ in range(5):
        [lease] = ledger.lease(1)
        assert lease.attempt == 1
        assert ledger.cancel(lease)


def test_expire(make_ledger):
    """Leases fail at their deadline, and are returned to be aborted."""
    ledger = make_ledger()
    [first] = ledger.lease(1, deadline=5.0)
    [second] = ledger.lease(1, deadline=6.0)
    ledger.lease(1)
    assert ledger.expire(4.9) == []
    assert ledger.expire(5.0) == [first]
    assert [ledger.state(prompt_id) for prompt_id in range(3)] == ["pending", "leased", "leased"]
    assert ledger.expire(9.0) == [second]


def test_claim(make_ledger, finish):
    """A claim is all or nothing, or at least its minimum."""
    ledger = make_ledger(groups_per_version=3)
    finish(ledger, ledger.lease(2))
    assert ledger.claim(1, 3) == Shortage("not_enough", have=2, need=3)
    claim = ledger.claim(1, 3, minimum=1)
    assert isinstance(claim, Claim)
    assert (claim.step, claim.version, [group.prompt_id for group in claim.groups]) == (1, 0, [0, 1])
    assert ledger.state(0) == "claimed"


def test_the_version_of_a_claim(make_ledger, finish):
    """A claim trains at the version after those whose groups are all claimed, also if a claim is made ahead."""
    ledger = make_ledger(max_staleness=2)
    finish(ledger, ledger.lease(6))
    assert [ledger.claim(step, 1).version for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert ledger.claim(5, 2).version == 2
    ledger.advance(1, trained=2)
    finish(ledger, ledger.lease(9))
    assert ledger.claim(6, 2).version == 3


def test_drop(make_ledger, finish, releases):
    """A filter drops finished and claimed groups, and their places can be claimed again for the same step."""
    ledger = make_ledger()
    finish(ledger, ledger.lease(4))
    ledger.claim(1, 2)
    ledger.drop([0, 3], "no_signal")
    assert ledger.state(0) == ledger.state(3) == "dropped"
    assert sorted(set(releases.reasons().values())) == ["no_signal"]
    assert [group.prompt_id for group in ledger.claim(1, 2).groups] == [1, 2]
    ledger.advance(1, trained=1)
    assert [ledger.state(prompt_id) for prompt_id in range(4)] == ["dropped", "applied", "applied", "dropped"]
    assert ledger.statistics().drops == {"no_signal": 2}


def test_advance(make_ledger, finish, releases):
    """Trained groups are applied, and their references are released."""
    ledger = make_ledger()
    finish(ledger, ledger.lease(4))
    ledger.claim(1, 2)
    ledger.claim(2, 2)
    ledger.advance(0, trained=1)
    assert [ledger.state(prompt_id) for prompt_id in range(4)] == ["applied", "applied", "claimed", "claimed"]
    assert set(releases.reasons().values()) == {"applied"}
    ledger.advance(2, trained=2)
    assert ledger.version == 2
    assert len(releases) == 8
    refuses(ledger, lambda: ledger.advance(1), "version is 1, below 2")
    refuses(ledger, lambda: ledger.claim(2, 1), "step 2 has been trained")


def test_short_steps_do_not_admit_more(make_ledger, finish):
    """If a version is left before all its groups were claimed, the places of later versions stay as they are."""
    ledger = make_ledger(groups_per_version=2, max_staleness=2)
    finish(ledger, ledger.lease(6))
    ledger.claim(1, 2)
    ledger.claim(2, 2)
    ledger.drop([0], "no_signal")
    assert ledger._book.ahead == 4, "version 0 counts as full, because version 1 has been claimed"
    assert ledger.claim(3, 2).version == 2


def test_a_short_step_uses_up_its_places(make_ledger, finish):
    """A step that takes fewer groups than requested ends its version too, so the next one is not too old."""
    ledger = make_ledger(groups_per_version=4, max_staleness=0, on_stale="requeue")
    leases = ledger.lease(4)
    finish(ledger, leases[:2])
    assert ledger.claim(1, 4, minimum=2).version == 0
    finish(ledger, leases[2:])
    assert ledger.claim(2, 2) == Shortage("not_enough", 0, 2), "groups of version 0 are too old for version 1"
    assert ledger.claim(1, 4, minimum=2).groups[1].prompt_id == 1
    check(ledger)


# Staleness.


def test_stale_groups_are_requeued(make_ledger, finish, releases):
    """With "requeue" a group that is too old is generated again."""
    ledger = make_ledger(max_staleness=0, on_stale="requeue")
    finish(ledger, ledger.lease(2))
    ledger.advance(1)
    assert ledger.claim(1, 1) == Shortage("not_enough", 0, 1)
    assert ledger.state(0) == ledger.state(1) == "pending"
    assert set(releases.reasons().values()) == {"stale"}
    numbers = ledger.statistics()
    assert (numbers.requeued, numbers.regenerated, numbers.room) == ({1: 2}, 4, 2)
    assert ledger.lease(1)[0].samples == (0, 1)


def test_stale_groups_are_dropped(make_ledger, finish):
    """With "drop" a group that is too old is gone."""
    ledger = make_ledger(max_staleness=0, on_stale="drop")
    finish(ledger, ledger.lease(2))
    ledger.advance(1)
    assert ledger.evict() == 2
    assert ledger.evict() == 0
    assert ledger.statistics().drops == {"stale": 2}


def test_wait(make_ledger, finish):
    """With "wait" a claim waits for the group that it would make too old, and names it."""
    ledger = make_ledger(groups_per_version=1)
    slow, quick = ledger.lease(2)
    finish(ledger, [quick])
    assert isinstance(ledger.claim(1, 1), Claim)
    ledger.advance(1, trained=1)
    [next_one] = ledger.lease(2)
    finish(ledger, [next_one])
    assert ledger.claim(2, 1) == Shortage("wait", have=1, need=1, blocked_by=(slow.prompt_id,))
    assert ledger.statistics().waits == 1
    assert ledger.statistics().blocked_by == (0,)
    finish(ledger, [slow])
    claim = ledger.claim(2, 1)
    assert [group.prompt_id for group in claim.groups] == [0]
    assert ledger.statistics().staleness == {0: 1, 1: 1}


def test_expired_leases_end_a_wait(make_ledger, finish):
    """A group that never finishes blocks a claim until its lease expires."""
    ledger = make_ledger(groups_per_version=1)
    ledger.lease(1, deadline=1.0)
    finish(ledger, ledger.lease(1))
    ledger.claim(1, 1)
    ledger.advance(1, trained=1)
    finish(ledger, ledger.lease(1))
    assert ledger.claim(2, 1).reason == "wait"
    ledger.expire(1.0)
    assert isinstance(ledger.claim(2, 1), Claim)


# Refusals.


@pytest.mark.parametrize("state", ["unseen", "pending", "leased", "applied", "dropped"])
def test_illegal_drops(make_ledger, finish, state):
    """A group that is not finished, or that is final, cannot be dropped."""
    ledger = make_ledger()
    finish(ledger, ledger.lease(1))
    prompt_id = 1 if state != "unseen" else 9
    if state != "unseen":
        [lease] = ledger.lease(1)
    if state == "pending":
        ledger.cancel(lease)
    if state in ("applied", "dropped"):
        finish(ledger, [lease])
        ledger.claim(1, 2)
        ledger.drop([1], "no_signal") if state == "dropped" else ledger.advance(1, trained=1)
    if state == "applied":
        finish(ledger, ledger.lease(1))
    assert ledger.state(prompt_id) == state
    finished = next(one for one in (0, 2) if ledger.state(one) in ("finished", "claimed"))
    refuses(ledger, lambda: ledger.drop([finished, prompt_id], "late"), f"Prompt {prompt_id} is {state!r}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ledger: ledger.lease(0), "count is 0"),
        (lambda ledger: ledger.lease(1, serving_version=2), "serving_version is 2, and the trainer is at 1"),
        (lambda ledger: ledger.lease(1, serving_version=0), "serving_version is 0"),
        (lambda ledger: ledger.claim(1, 0), "count is 0 and minimum is 0"),
        (lambda ledger: ledger.claim(1, 2, minimum=3), "count is 2 and minimum is 3"),
        (lambda ledger: ledger.claim(1, 5), "at most 4 groups can be open"),
        (lambda ledger: ledger.claim(1, 3), "count is 3, but 2 of the 2 groups of version 1 are left"),
        (lambda ledger: ledger.state(-1), "prompt_id is -1"),
    ],
)
def test_wrong_arguments(make_ledger, call, message):
    """Wrong arguments are refused with what was found, and change nothing."""
    ledger = make_ledger()
    ledger.advance(1)
    refuses(ledger, lambda: call(ledger), message)


@pytest.mark.parametrize("call", ["finish", "fail"])
def test_wrong_samples(make_ledger, call):
    """A sample that the group does not have is refused."""
    ledger = make_ledger()
    [lease] = ledger.lease(1)
    calls = {"finish": lambda: ledger.finish(lease, 2, Ref("a")), "fail": lambda: ledger.fail(lease, [2], reason="x")}
    refuses(ledger, calls[call], "2 samples, counted from 0")


def test_wrong_run(make_ledger):
    """A run has 48 bits."""
    with pytest.raises(ValueError, match="it must be a number of 48 bits"):
        make_ledger(run=1 << 48)


# The end of the source, callbacks, and what people see.


def test_exhausted(make_ledger, finish):
    """At the end of the source a claim says that too few groups can come, and `minimum` takes the rest."""
    ledger = make_ledger(prompts=3)
    finish(ledger, ledger.lease(9))
    ledger.claim(1, 2)
    assert ledger.lease(9) == []
    assert ledger.claim(2, 2) == Shortage("exhausted", have=1, need=2)
    assert len(ledger.claim(2, 2, minimum=1).groups) == 1
    assert ledger.claim(3, 1) == Shortage("exhausted", have=0, need=1)


def test_events(make_ledger, finish):
    """Every transition is reported once, with its step and its reason."""
    events = []
    ledger = make_ledger(group_size=1, on_event=events.append)
    finish(ledger, ledger.lease(1))
    ledger.claim(1, 1)
    ledger.drop([0], "no_signal")
    assert [(one.before, one.after, one.reason) for one in events] == [
        ("unseen", "pending", None),
        ("pending", "leased", None),
        ("leased", "finished", None),
        ("finished", "claimed", None),
        ("claimed", "dropped", "no_signal"),
    ]
    assert events[3].step == 1


def test_a_callback_that_fails(make_ledger, finish, caplog):
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
    ledger.advance(3, trained=1)
    assert [ledger.state(prompt_id) for prompt_id in range(6)] == [
        *["dropped"] * 2,
        *["trained"] * 2,
        *["finished"] * 2,
    ]
    with pytest.raises(OSError, match="503 slow down"):
        ledger.flush()
    ledger.flush()


def test_explain(make_ledger, finish):
    """The ledger says of each group what it knows."""
    ledger = make_ledger()
    leases = ledger.lease(2)
    ledger.finish(leases[0], 1, Ref("b"))
    assert ledger.explain(0) == (
        "Prompt 0 is leased, attempt 1 of 3. 1 of 2 samples are finished. "
        "Its lease started at version 0 and owes samples [0]. "
        "Its oldest version is 0, and the next claim trains at 0; 1 is the last version that may train it."
    )
    finish(ledger, leases[1:])
    ledger.claim(4, 1)
    assert "Step 4 trains it at version 0, 0 versions after its weights." in ledger.explain(1)
    assert ledger.explain(5) == "Prompt 5 is unseen."


def test_statistics(make_ledger, finish):
    """The staleness of a claim includes the time in the queue."""
    ledger = make_ledger(max_staleness=3, groups_per_version=1)
    [lease] = ledger.lease(1)
    ledger.advance(1)
    finish(ledger, [lease])
    ledger.advance(3)
    assert ledger.statistics().oldest_open == 3
    ledger.claim(1, 1)
    numbers = ledger.statistics()
    assert numbers.staleness == {3: 1}
    ledger.advance(4, trained=1)
    assert ledger.statistics().oldest_open is None


def test_own_policy(make_ledger, finish):
    """A policy of the caller's own chooses among the finished groups."""

    class LastFirst:
        def select(self, view, count):
            return tuple(group.prompt_id for group in view.ready()[::-1][:count])

    ledger = make_ledger(policy=LastFirst(), on_stale="requeue")
    finish(ledger, ledger.lease(3))
    assert [group.prompt_id for group in ledger.claim(1, 2).groups] == [2, 1]
