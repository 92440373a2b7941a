# SPDX-License-Identifier: Apache-2.0
"""Use fairlead-rollouts as type checkers see it. `nox -s typecheck` checks these types; nothing runs them.

A comment that ignores an error marks a use that type checkers must reject: an ignore without an error is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from pathlib import Path
from typing import Any, assert_type

import fairlead_rollouts as fr
from fairlead_rollouts import miles, slime
from fairlead_rollouts.ray import LedgerHandle, start_ledger


def make() -> fr.Ledger:
    policy: fr.OldestFirst | fr.ReadyFirst
    for policy in (fr.OldestFirst(), fr.ReadyFirst()):
        fr.LedgerConfig(group_size=4, groups_per_version=8, max_staleness=1, policy=policy)
    completeness = fr.Completeness(min_samples=3, retry="group", max_attempts=2)
    config = fr.LedgerConfig(
        group_size=4, groups_per_version=8, max_staleness=1, policy=fr.ReadyFirst(), completeness=completeness
    )
    source: fr.PromptSource = fr.IndexStream(10, seed=0)
    fr.LedgerConfig(4, 8, 1)  # type: ignore[call-arg]
    fr.LedgerConfig(group_size=4, groups_per_version=8, max_staleness=1, on_stale="later")  # type: ignore[arg-type]
    assert_type(fr.sample_id(1, 2), str)
    fr.Ledger(config, source, on_release=print)
    return fr.Ledger(config, fr.IndexStream(10, seed=0, epochs=1))


def roll_out(ledger: fr.Ledger, lease: fr.Lease) -> None:
    assert_type(ledger.lease(4, serving_version=1, deadline=2.0), list[fr.Lease])
    assert_type(ledger.finish(lease, 0, fr.Ref(object()), oldest_version=0, newest_version=1), bool)
    assert_type(ledger.fail(lease, [0], reason="it broke"), bool)
    assert_type(ledger.expire(1.0), list[fr.Lease])
    assert_type((lease.prompt, lease.samples), tuple[Any, tuple[int, ...]])
    ledger.finish(lease, 0, "tokens")  # type: ignore[arg-type]
    ledger.fail(lease)  # type: ignore[call-arg]
    lease.token = 1  # type: ignore[misc]


def train(ledger: fr.Ledger, config: fr.LedgerConfig, folder: Path) -> None:
    claim = ledger.claim(1, 8, minimum=4)
    if isinstance(claim, fr.Shortage):
        assert_type(claim.blocked_by, tuple[int, ...])
        return
    assert_type((claim, claim.groups), tuple[fr.Claim, tuple[fr.Group, ...]])
    assert_type(claim.groups[0].samples, tuple[fr.Sample, ...])
    ledger.advance(1, trained=1)
    assert_type(ledger.prepare(1, folder), Path)
    ledger.commit(1)
    assert_type(fr.Ledger.restore(config, ["a"], step=1, version=1, file=folder / "ledger"), fr.Ledger)
    assert_type(fr.Ledger.begin(config, ["a"], step=1, version=1, prompt_id=9), fr.Ledger)
    assert_type((ledger.statistics(), ledger.explain(0)), tuple[fr.Statistics, str])


async def wait(ledger: fr.Ledger) -> None:
    waiting = fr.AsyncLedger(ledger)
    assert_type(await waiting.lease(4, serving_version=1, timeout_s=1.0), list[fr.Lease])
    assert_type(await waiting.claim(1, 4, minimum=1), fr.Claim | fr.Shortage)
    assert_type(start_ledger(lambda: ledger, name="ledger"), LedgerHandle)


async def adapt(args: object) -> None:
    assert_type(slime.LedgerDataSource(args).get_samples(1), list[list[Any]])
    slime.generate_rollout(args, 1, slime.LedgerDataSource(args))
    assert_type(miles.LedgerDataSource(args).ledger, fr.Ledger)
    assert_type(await miles.LedgerDataBuffer(args).get(current_version=1), Any)


def look(error: fr.RolloutError) -> None:
    match error:
        case fr.SnapshotError():
            assert_type((error.path, error.found, error.remedy), tuple[str, str, str])
        case fr.OldWeightsError():
            assert_type((error.serving_version, error.oldest), tuple[int, int])
        case _:
            assert_type(error.args, tuple[Any, ...])
