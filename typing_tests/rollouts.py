# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-rollouts as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, assert_type

import fairlead_rollouts
from fairlead_rollouts import (
    AsyncLedger,
    Claim,
    Completeness,
    Event,
    Group,
    IllegalTransitionError,
    IndexStream,
    InOrder,
    InvariantError,
    Journal,
    JournalError,
    JournalLockedError,
    Lease,
    Ledger,
    LedgerConfig,
    LoaderStream,
    OldestFirst,
    OldWeightsError,
    OpenGroup,
    Policy,
    PromptSource,
    ReadyFirst,
    Ref,
    RolloutError,
    Sample,
    Selection,
    Shortage,
    SnapshotError,
    Statistics,
    View,
    WeightFifo,
    Windowed,
    exceptions,
    miles,
    room_for,
    sample_id,
)
from fairlead_rollouts.metrics import export
from fairlead_rollouts.nemo import LedgerSampler
from fairlead_rollouts.ray import LedgerHandle, start_ledger
from fairlead_rollouts.slime import LedgerDataSource, generate_rollout
from fairlead_rollouts.verl import LedgerReplayBuffer

State = Literal["unseen", "pending", "leased", "sealed", "claimed", "trained", "applied", "dropped"]

assert_type(fairlead_rollouts.__version__, str)
assert_type(sample_id(1, 2), str)


def make() -> None:
    completeness = Completeness(min_samples=3, retry="group", max_attempts=2)
    assert_type(completeness.min_samples, int | None)
    assert_type(completeness.retry, Literal["sibling", "group"])
    assert_type(completeness.max_attempts, int)
    config = LedgerConfig(
        group_size=4,
        groups_per_version=8,
        max_staleness=1,
        lookahead="max_staleness",
        serving_lag=0,
        max_leased=None,
        max_open=64,
        policy=Windowed(freshest_first=True),
        on_stale="requeue",
        completeness=completeness,
    )
    assert_type(config.group_size, int)
    assert_type(config.groups_per_version, int)
    assert_type(config.max_staleness, int | None)
    assert_type(config.lookahead, int | Literal["max_staleness"] | None)
    assert_type(config.serving_lag, int)
    assert_type(config.max_leased, int | None)
    assert_type(config.max_open, int | None)
    assert_type(config.policy, Policy)
    assert_type(config.on_stale, Literal["wait", "requeue", "drop"])
    assert_type(config.completeness, Completeness)
    assert_type(config.gate, int | None)
    assert_type(config.min_samples, int)
    assert_type(config.most_open, int | None)
    source: PromptSource = IndexStream(10, seed=0, epochs=1)
    source = LoaderStream([1, 2], key=str)
    assert_type(source.get(0), Any)
    assert_type(source.state(), bytes)
    assert_type(source.restore(b"", 0), None)
    assert_type(IndexStream(10, seed=0).get(0), int)

    def release(ref: Ref, reason: str) -> None: ...
    def record(event: Event) -> None: ...

    ledger = Ledger(config, source, run=1, journal=None, checkpoints=False, on_release=release, on_event=record)
    Ledger(config, ["a", "b"])
    assert_type(ledger.config, LedgerConfig)
    assert_type(ledger.version, int)


def roll_out(ledger: Ledger, lease: Lease) -> None:
    assert_type(ledger.room(), int)
    assert_type(ledger.offer([1, "a", {"b": 2}]), list[int])
    assert_type(ledger.lease(4, serving_version=1, deadline=2.0), list[Lease])
    assert_type(ledger.seal(lease, 0, Ref(object()), oldest_version=0, newest_version=1), bool)
    assert_type(ledger.seal_many([(lease, 0, Ref("a", durable=True))]), list[bool])
    assert_type(ledger.park(lease, 0, Ref("a")), bool)
    assert_type(ledger.fail(lease, [0], reason="it broke"), bool)
    assert_type(ledger.cancel(lease), bool)
    assert_type(ledger.expire(1.0), list[Lease])
    assert_type(ledger.to_abort(), list[Lease])
    assert_type(lease.ordinal, int)
    assert_type(lease.siblings, tuple[int, ...])
    assert_type(lease.token, int)
    assert_type(lease.start_version, int)
    assert_type(lease.prompt, Any)
    assert_type(lease.attempt, int)
    assert_type(lease.target_step, int | None)
    assert_type(lease.carry, Mapping[int, Sample])


def train(ledger: Ledger, group: Group) -> None:
    claim = ledger.claim(1, 8, minimum=4)
    assert_type(claim, Claim | Shortage)
    if isinstance(claim, Shortage):
        assert_type(claim.reason, Literal["not_enough", "wait", "exhausted"])
        assert_type(claim.have, int)
        assert_type(claim.need, int)
        assert_type(claim.blocked_by, tuple[int, ...])
        return
    assert_type(claim.step, int)
    assert_type(claim.version, int)
    assert_type(claim.groups, tuple[Group, ...])
    assert_type(group.ordinal, int)
    assert_type(group.samples, tuple[Sample, ...])
    assert_type(group.oldest_version, int)
    assert_type(group.newest_version, int)
    assert_type(group.attempt, int)
    assert_type(group.samples[0].sibling, int)
    assert_type(group.samples[0].ref, Ref)
    assert_type(group.samples[0].ref.value, Any)
    assert_type(group.samples[0].ref.durable, bool)
    assert_type(ledger.unclaim(1), None)
    assert_type(ledger.advance(1, trained=1), None)
    assert_type(ledger.drop([1], "no_signal"), None)
    assert_type(ledger.sweep(), int)


def save(config: LedgerConfig, ledger: Ledger, directory: Path) -> None:
    assert_type(ledger.prepare(1, directory), Path)
    assert_type(ledger.prepare(1, "checkpoint"), Path)
    assert_type(ledger.commit(1), None)
    assert_type(ledger.flush(), None)

    def exists(ref: Ref) -> bool:
        return ref.durable

    with Journal(directory / "journal", keep_steps=2) as journal:
        assert_type(journal, Journal)
        assert_type(journal.keep_steps, int)
        assert_type(journal.kept_step, int | None)
        assert_type(journal.make_room(), None)
        journal.keep  # noqa: B018  for the snapshots of a ledger only
        journal.read_step(1)
        assert_type(journal.path, Path)
        assert_type(journal.flush(), None)
        assert_type(journal.close(), None)
        assert_type(journal.reset("id", (1,), [], 0), None)
        assert_type(journal.remove(0, 0), None)
        assert_type(journal.settle(0), None)
        journal.load("id", (1,))
        journal.put  # noqa: B018  for records only
        later = Ledger.restore(
            config, ["a"], step=1, version=1, directory="checkpoint", journal=journal, exists=exists, checkpoints=True
        )
        assert_type(later, Ledger)
        assert_type(Ledger.restore(config, ["a"], step=1, version=1, journal=journal), Ledger)


async def wait(ledger: Ledger) -> None:
    waiting = AsyncLedger(ledger)
    assert_type(waiting.ledger, Ledger)
    assert_type(await waiting.lease(4, serving_version=1, deadline=2.0, timeout_s=1.0), list[Lease])
    assert_type(await waiting.claim(1, 4, minimum=1, timeout_s=1.0), Claim | Shortage)
    assert_type(ledger.exhausted, bool)
    assert_type(ledger.subscribe(print), None)


def in_an_actor(ledger: Ledger, lease: Lease) -> None:
    handle = start_ledger(lambda: ledger, name="ledger")
    assert_type(handle, LedgerHandle)
    assert_type(handle.lease(4, timeout_s=1.0), Any)
    assert_type(handle.seal(lease, 0, Ref("a")), Any)
    assert_type(handle.seal_many([(lease, 0, Ref("a"))]), Any)
    assert_type(handle.fail(lease, reason="it broke"), Any)
    assert_type(handle.claim(1, 4), Any)
    assert_type(handle.advance(1, trained=1), Any)
    assert_type(handle.call("statistics"), Any)


def adapt(buffer: LedgerReplayBuffer) -> None:
    assert_type(buffer.ledger, Ledger)
    assert_type(buffer.sample(1, "train", 8), tuple[Any, dict[str, Any]])


async def adapt_nemo(buffer: object) -> None:
    sampler = LedgerSampler(
        buffer, groups_per_version=4, policy="windowed", max_staleness_versions=1, sample_freshest_first=True
    )
    assert_type(sampler.ledger, Ledger)
    assert_type(await sampler.admit(trainer_version_fn=lambda: 1), int | None)
    selected = await sampler.select(current_train_weight=1, min_prompt_groups=1, max_prompt_groups=4)
    assert_type(selected, tuple[Any, int])
    assert_type(await sampler.evict(current_train_weight=1), int)
    assert_type(sampler.should_abort_inflight(start_weight_version=0, current_train_weight=1), bool)
    assert_type(sampler.is_on_policy, bool)
    assert_type(sampler.required_buffer_capacity(4), int | None)
    assert_type(sampler.set_dispatch_index(3), None)


def adapt_slime(args: object) -> None:
    data = LedgerDataSource(args)
    assert_type(data.kept, Path)
    assert_type(data.release(Ref("groups/0", durable=True), "applied"), None)
    assert_type(data.ledger, Ledger)
    assert_type(data.get_samples(1), list[list[Any]])
    assert_type(data.add_samples([[1]]), None)
    assert_type(data.begin(1), None)
    assert_type(data.take(1, [[1]]), None)
    assert_type(data.save(1), None)
    assert_type(data.load(1), None)
    assert_type(data.get_buffer_length(), int)
    generate_rollout(args, 1, data)


async def adapt_miles(args: object, ordinal: int) -> None:
    data = miles.LedgerDataSource(args)
    assert_type(data.keeps, bool)
    assert_type(data.kept, Path)
    assert_type(data.release(Ref("groups/0", durable=True), "applied"), None)
    assert_type(data.latest, miles.LedgerDataSource | None)
    assert_type(data.end(ordinal), Lease | None)
    assert_type(data.dataset, Any)
    with data.lock:
        assert_type(data.ledger, Ledger)
    buffer = miles.LedgerDataBuffer(args)
    assert_type(await buffer.put(args), None)
    assert_type(await buffer.get(current_version=1), Any)
    assert_type(buffer.get_metrics(), dict[str, float])


def look(ledger: Ledger, event: Event) -> None:
    assert_type(ledger.state(0), State)
    assert_type(ledger.explain(0), str)
    assert_type(ledger.check(), None)
    assert_type(ledger.show(), None)
    assert_type(export(ledger), None)
    numbers = ledger.statistics()
    assert_type(numbers, Statistics)
    for number in (numbers.version, numbers.pending, numbers.leased, numbers.sealed, numbers.claimed, numbers.trained):
        assert_type(number, int)
    for number in (numbers.applied, numbers.dropped, numbers.room, numbers.attempts, numbers.regenerated):
        assert_type(number, int)
    for number in (numbers.fenced, numbers.waits, numbers.versions_in_flight, numbers.versions_in_queue):
        assert_type(number, int)
    assert_type(numbers.oldest_open, int | None)
    assert_type(numbers.drops, Mapping[str, int])
    assert_type(numbers.staleness, Mapping[int, int])
    assert_type(numbers.requeued, Mapping[int, int])
    assert_type(numbers.blocked_by, tuple[int, ...])
    assert_type(event.ordinal, int)
    assert_type(event.before, State)
    assert_type(event.after, State)
    assert_type(event.version, int)
    assert_type(event.step, int | None)
    assert_type(event.reason, str | None)


class Last:
    def select(self, view: View, count: int) -> Selection:
        return Selection(tuple(group.ordinal for group in view.ready()[-count:]), blocked_by=())


def policies(view: View) -> None:
    in_order = InOrder(groups_per_step=2, first_step=0)
    assert_type(in_order.groups_per_step, int)
    assert_type(in_order.first_step, int)
    assert_type(Windowed().freshest_first, bool)
    for policy in (OldestFirst(), ReadyFirst(), in_order, WeightFifo(), Windowed(), Last()):
        checked: Policy = policy
        assert_type(checked.select(view, 2), Selection)
    assert_type(view.step, int)
    assert_type(view.version, int)
    assert_type(view.max_staleness, int | None)
    assert_type(view.groups, tuple[OpenGroup, ...])
    assert_type(view.ready(), list[OpenGroup])
    assert_type(view.groups[0].ordinal, int)
    assert_type(view.groups[0].ready, bool)
    assert_type(view.groups[0].oldest_version, int)
    assert_type(view.groups[0].target_step, int | None)
    assert_type(Last().select(view, 1).ordinals, tuple[int, ...])
    assert_type(Last().select(view, 1).blocked_by, tuple[int, ...])
    room = room_for(
        lookahead=1, serving_lag=0, groups_per_version=4, leased=1, sealed=1, ahead=0, max_leased=None, max_open=9
    )
    assert_type(room, int)


def errors(
    illegal: IllegalTransitionError,
    invariant: InvariantError,
    snapshot: SnapshotError,
    journal: JournalError,
    locked: JournalLockedError,
    old: OldWeightsError,
) -> None:
    for one in (snapshot, journal):
        for text in (one.path, one.found, one.remedy):
            assert_type(text, str)
    for text in (locked.path, locked.holder):
        assert_type(text, str)
    for number in (old.serving_version, old.oldest, old.version):
        assert_type(number, int)
    assert_type(illegal.ordinal, int)
    assert_type(illegal.state, str)
    assert_type(illegal.method, str)
    assert_type(illegal.legal, tuple[str, ...])
    assert_type(invariant.invariant, str)
    assert_type(invariant.found, str)
    assert_type(invariant.ordinals, tuple[int, ...])
    error: RolloutError = illegal
    error = invariant
    error = snapshot
    error = journal
    error = locked
    error = old
    assert_type(exceptions.RolloutError, type[RolloutError])
    raise error


def wrong(ledger: Ledger, lease: Lease) -> None:
    LedgerConfig(4, 8, 1)  # type: ignore[call-arg]
    LedgerConfig(group_size=4, groups_per_version=8, max_staleness=1, on_stale="later")  # type: ignore[arg-type]
    ledger.seal(lease, 0, "tokens")  # type: ignore[arg-type]
    ledger.fail(lease)  # type: ignore[call-arg]
    ledger.claim(1)  # type: ignore[call-arg]
    lease.token = 1  # type: ignore[misc]
