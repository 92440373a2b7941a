# SPDX-License-Identifier: Apache-2.0
"""A system over the ledger passes every case."""

import shutil
import tempfile
from pathlib import Path

import pytest
from conformance import CASES, Step, Work, judge

from fairlead_rollouts import Claim, Completeness, IndexStream, Ledger, LedgerConfig, Ref


class Prompts(IndexStream):
    """The prompts in their order."""

    def get(self, prompt_id):
        if prompt_id >= self._size:
            raise IndexError
        return prompt_id


class OverLedger:
    """A framework that keeps its books in a ledger. Payloads are strings, which survive a crash."""

    on_stale = "wait"
    folder = ""

    def start(self, job):
        self.job, self.step, self.saves = job, 0, 0
        self.folder = Path(tempfile.mkdtemp())
        self.config = LedgerConfig(
            group_size=job.group_size,
            groups_per_version=job.groups_per_step,
            max_staleness=job.max_staleness,
            on_stale=self.on_stale,
            completeness=Completeness(max_attempts=job.max_attempts),
        )
        self.ledger = Ledger(self.config, Prompts(job.prompts, seed=0))
        self.ready = []
        self.save()

    def __del__(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def lease(self, count):
        return [Work(one.prompt, one.samples, one) for one in self.ledger.lease(count)]

    def finish(self, work, sample, payload):
        return self.ledger.finish(work.handle, sample, Ref(payload, durable=True))

    def fail(self, work, sample):
        self.ledger.fail(work.handle, [sample], reason="it broke")

    def claim(self):
        step = self.step + len(self.ready) + 1
        claim = self.ledger.claim(step, self.job.groups_per_step)
        if not isinstance(claim, Claim) and claim.reason == "exhausted" and claim.have:
            claim = self.ledger.claim(step, claim.have)
        return claim if isinstance(claim, Claim) else None

    def train(self, *, claim_only=False):
        if not self.ready and (claim := self.claim()):
            self.ready.append(claim)
        if claim_only or not self.ready:
            return None
        claim = self.ready.pop(0)
        self.step = claim.step
        self.ledger.advance(self.ledger.version + 1, trained=claim.step)
        samples = tuple((one.prompt_id, it.index, it.ref.value) for one in claim.groups for it in one.samples)
        return Step(samples, max(claim.version - one.oldest_version for one in claim.groups))

    def save(self):
        self.saves += 1
        self.saved = self.step, self.ledger.version, self.folder / str(self.saves)
        self.saved[2].mkdir()
        self.ledger.prepare(self.step, self.saved[2])

    def crash(self):
        self.ledger, self.ready = None, []

    def resume(self):
        self.step, version, directory = self.saved
        source = Prompts(self.job.prompts, seed=0)
        self.ledger = Ledger.restore(self.config, source, step=self.step, version=version, directory=directory)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ledger_passes(case):
    """A system over the ledger loses nothing, doubles nothing, and keeps the bound."""
    assert judge(case, OverLedger()) == []
