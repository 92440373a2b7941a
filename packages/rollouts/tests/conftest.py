# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


class Releases(list):
    """Collect the references that a ledger releases, and fail at the second release of one."""

    def __call__(self, ref, reason):
        assert all(ref is not other for other, _ in self), f"{ref} was released twice"
        self.append((ref, reason))

    def reasons(self):
        """Return the reason for each value."""
        return {ref.value: reason for ref, reason in self}


@pytest.fixture
def releases():
    return Releases()


@pytest.fixture
def no_thread(monkeypatch):
    """Let the file be written by the calls of a test only."""
    from fairlead_rollouts._file import SnapshotFile

    monkeypatch.setattr(SnapshotFile, "_run", lambda file: None)


@pytest.fixture
def make_ledger(releases):
    """Return a maker of ledgers with small groups, one group per version and ten prompts, and no checkpoints."""
    from fairlead_rollouts import Ledger, LedgerConfig

    def make(prompts=10, **options):
        checkpoints = options.pop("checkpoints", False)
        options = {"group_size": 2, "groups_per_version": 2, "max_staleness": 1, **options}
        source = [f"prompt {number}" for number in range(prompts)] if isinstance(prompts, int) else prompts
        return Ledger(LedgerConfig(**options), source, on_release=releases, checkpoints=checkpoints)

    return make


@pytest.fixture
def finish():
    """Return a function that finishes all samples of leases, with a value for each."""
    from fairlead_rollouts import Ref, sample_id

    def finish_all(ledger, leases, **versions):
        for lease in leases:
            for sample in lease.samples:
                ref = Ref(f"{sample_id(lease.prompt_id, sample)} of {lease.attempt}", durable=True)
                assert ledger.finish(lease, sample, ref, **versions)

    return finish_all
