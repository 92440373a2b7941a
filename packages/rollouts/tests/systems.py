# SPDX-License-Identifier: Apache-2.0
"""A system over the ledger, which passes every case, and deliberately wrong ones, of which each fails its case."""

import shutil
import tempfile
from pathlib import Path

from conformance import Step, Work

from fairlead_rollouts import Claim, Completeness, IndexStream, Ledger, LedgerConfig, Ref


class Prompts(IndexStream):
    """The prompts in their order."""

    def get(self, ordinal):
        if ordinal >= self._size:
            raise IndexError
        return ordinal


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
        return [Work(one.prompt, one.siblings, one) for one in self.ledger.lease(count)]

    def finish(self, work, sibling, payload):
        return self.ledger.seal(work.handle, sibling, Ref(payload, durable=True))

    def fail(self, work, sibling):
        self.ledger.fail(work.handle, [sibling], reason="it broke")

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
        samples = tuple((one.ordinal, it.sibling, it.ref.value) for one in claim.groups for it in one.samples)
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


class Buffer:
    """A buffer such as many loops have: a cursor, a list of finished groups, and the cursor in the checkpoint.

    Its flaws are switches, and each wrong system below has one.
    """

    keeps_open = True  # the checkpoint lists the prompts that are open
    keeps_claimed = True  # and those that are claimed for a later step
    keeps_buffer = True  # and the finished ones
    fenced = True

    def start(self, job):
        self.job, self.cursor, self.version, self.step = job, 0, 0, 0
        self.open, self.finished, self.claimed, self.again = {}, [], [], []
        self.token = 0
        self.save()

    def lease(self, count):
        works = []
        limit = (self.job.max_staleness + 1) * self.job.groups_per_step
        while len(works) < count and len(self.open) + len(self.finished) + len(self.claimed) < limit:
            if self.again:
                prompt = self.again.pop(0)
            elif self.cursor < self.job.prompts:
                prompt, self.cursor = self.cursor, self.cursor + 1
            else:
                break
            self.token += 1
            self.open[prompt] = self.token, self.version, {}
            works.append(Work(prompt, tuple(range(self.job.group_size)), self.token))
        return works

    def finish(self, work, sibling, payload):
        if work.prompt not in self.open:
            return False
        token, start, samples = self.open[work.prompt]
        if (self.fenced and token != work.handle) or sibling in samples:
            return False
        samples[sibling] = payload
        if len(samples) == self.job.group_size:
            self.finished.append((work.prompt, start, self.open.pop(work.prompt)[2]))
        return True

    def fail(self, work, sibling):
        if work.prompt in self.open and self.open[work.prompt][0] == work.handle:
            del self.open[work.prompt]
            if self.job.max_attempts > 1:
                self.again.append(work.prompt)

    def train(self, *, claim_only=False):
        if not self.claimed and self.finished:
            slowest = min((start for _, start, _ in self.open.values()), default=self.version)
            finished_first = any(start <= slowest for _, start, _ in self.finished)
            if slowest + self.job.max_staleness <= self.version and not finished_first:
                return None
            self.finished.sort(key=lambda one: one[1])
            size = self.job.groups_per_step
            if len(self.finished) < size and (self.open or self.again or self.cursor < self.job.prompts):
                return None
            self.claimed, self.finished = self.finished[:size], self.finished[size:]
        if claim_only or not self.claimed:
            return None
        batch, self.claimed = self.claimed, []
        staleness = max(self.version - start for _, start, _ in batch)
        self.version += 1
        return Step(tuple((prompt, *one) for prompt, _, samples in batch for one in samples.items()), staleness)

    def save(self):
        again = [*self.again, *(self.open if self.keeps_open else ())]
        again += [one for one, *_ in (self.finished if self.keeps_buffer else ())]
        again += [one for one, *_ in (self.claimed if self.keeps_claimed else ())]
        self.saved = self.cursor, self.version, sorted(again)

    def crash(self):
        self.open, self.finished, self.claimed = {}, [], []

    def resume(self):
        self.cursor, self.version, again = self.saved
        self.again = list(again)


class LosesOpen(Buffer):
    keeps_open = False


class LosesClaimed(Buffer):
    keeps_claimed = False


class LosesFinished(Buffer):
    keeps_buffer = False


class KeepsTheCursor(Buffer):
    """Resumes with the cursor of the process that ended."""

    def resume(self):
        cursor = self.cursor
        super().resume()
        self.cursor = cursor


class LosesTail(OverLedger):
    """Drops what does not fill a batch."""

    def claim(self):
        claim = self.ledger.claim(self.step + len(self.ready) + 1, self.job.groups_per_step)
        return claim if isinstance(claim, Claim) else None


class StartsAgain(OverLedger):
    """Begins another epoch when it resumes at the end of one."""

    def resume(self):
        super().resume()
        if self.ledger.statistics().applied == self.job.prompts:
            self.step = 0
            self.ledger = Ledger(self.config, Prompts(self.job.prompts, seed=0))


class TrainsFailures(OverLedger):
    """Takes a failed sibling as a sample with the reward 0."""

    def fail(self, work, sibling):
        self.ledger.seal(work.handle, sibling, Ref("reward 0", durable=True))


class Regenerates(OverLedger):
    """Forgets finished groups, although they survive."""

    def finish(self, work, sibling, payload):
        return self.ledger.seal(work.handle, sibling, Ref(payload))


class MatchesByOrder(OverLedger):
    """Counts the siblings of a group, whoever they are."""

    def fail(self, work, sibling):
        self.lost = work.prompt
        super().fail(work, sibling)

    def train(self, *, claim_only=False):
        step = super().train(claim_only=claim_only)
        if step is None:
            return None
        samples = [(one, 1 if one == getattr(self, "lost", None) else sibling, it) for one, sibling, it in step.samples]
        return Step(tuple(samples), step.staleness)


class ForgetsCancelled(OverLedger):
    """Never dispatches a group again that was cancelled."""

    def lease(self, count):
        return [work for work in super().lease(count) if work.handle.attempt == 1]


class OverAdmits(OverLedger):
    """Submits its first batches on top of those that it has restored."""

    def resume(self):
        super().resume()
        self.extra = [Work(prompt, (), None) for prompt in range(self.job.prompts - 4, self.job.prompts)]

    def lease(self, count):
        return super().lease(count) + (self.__dict__.pop("extra", []))


class PinsTheCursor(OverLedger):
    """Resumes at the first prompt that was not trained, and trains those after it again."""

    def resume(self):
        super().resume()
        if self.ledger.state(0) != "applied":
            self.step = 0
            self.ledger = Ledger(self.config, Prompts(self.job.prompts, seed=0))


class Unbounded(OverLedger):
    """Bounds admission, and not the claim."""

    def start(self, job):
        super().start(job)
        self.config = LedgerConfig(
            group_size=job.group_size,
            groups_per_version=job.groups_per_step,
            max_staleness=None,
            lookahead=job.max_staleness,
            on_stale="requeue",
        )
        self.ledger = Ledger(self.config, Prompts(job.prompts, seed=0))


class DropsSlow(OverLedger):
    """Gives up what becomes too old."""

    on_stale = "drop"


class AcceptsLate(Buffer):
    fenced = False


class TrustsLostWeights(OverLedger):
    """Keeps samples of weights that the checkpoint has erased."""

    def crash(self):
        records = self.ledger._book.records.values()
        self.kept = {one.ordinal: dict(one.samples) for one in records if one.state == "sealed"}
        super().crash()

    def resume(self):
        super().resume()
        for lease in self.ledger.lease(100):
            for sibling, sample in self.kept.get(lease.ordinal, {}).items():
                self.ledger.seal(lease, sibling, sample.ref)
            self.ledger.cancel(lease)


WRONG = {
    "checkpoint_ahead_of_training": LosesOpen,
    "one_step_prefetch": LosesClaimed,
    "gap_fill_tail": LosesTail,
    "surplus_is_kept": LosesFinished,
    "oversampled_buffer": LosesFinished,
    "exhausted_at_boundary": StartsAgain,
    "failure_is_not_a_sample": TrainsFailures,
    "resume_keeps_next_batch": Regenerates,
    "sibling_ids_survive_retry": MatchesByOrder,
    "partial_dispatch_cancelled": ForgetsCancelled,
    "resume_does_not_over_admit": OverAdmits,
    "drop_moves_the_cursor": PinsTheCursor,
    "bound_includes_queue_time": Unbounded,
    "slow_rollouts_are_trained": DropsSlow,
    "late_result_is_fenced": AcceptsLate,
    "version_from_lost_branch": TrustsLostWeights,
    "work_between_checkpoints": KeepsTheCursor,
}
