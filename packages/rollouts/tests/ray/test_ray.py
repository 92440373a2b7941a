# SPDX-License-Identifier: Apache-2.0
"""A ledger in an actor: several generators and one trainer share it."""

import pytest

ray = pytest.importorskip("ray", reason="the actor needs Ray")

from fairlead_rollouts import Claim, Ledger, LedgerConfig, Ref  # noqa: E402
from fairlead_rollouts.ray import LedgerHandle, start_ledger  # noqa: E402

CONFIG = LedgerConfig(group_size=2, groups_per_version=4, max_staleness=1)


def make():
    return Ledger(CONFIG, list(range(40)), checkpoints=False)


@ray.remote(num_cpus=0)
def generate(ledger: LedgerHandle):
    """Generate until the source has ended."""
    groups = 0
    while leases := ray.get(ledger.lease(2)):
        results = [(lease, sample, Ref(lease.prompt)) for lease in leases for sample in lease.samples]
        assert all(ray.get(ledger.finish_many(results)))
        groups += len(leases)
    return groups


def test_generators_and_a_trainer(local_ray):
    """All prompts are trained once, whoever generates them."""
    ledger = start_ledger(make)
    generators = [generate.remote(ledger) for _ in range(3)]
    trained = []
    for step in range(1, 11):
        claim = ray.get(ledger.claim(step, 4), timeout=60)
        assert isinstance(claim, Claim)
        trained += [group.prompt_id for group in claim.groups]
        ray.get(ledger.advance(step, trained=step))
    assert sorted(trained) == list(range(40))
    assert sum(ray.get(generators, timeout=60)) == 40
    assert ray.get(ledger.call("state", 7)) == "applied"
