# SPDX-License-Identifier: Apache-2.0
"""Random calls in random order: the invariants hold after each, and the job can always be brought to its end."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from fairlead_rollouts import (
    Claim,
    Completeness,
    Journal,
    Ledger,
    LedgerConfig,
    OldestFirst,
    ReadyFirst,
    Ref,
    Shortage,
)

PROMPTS = 30
# A folder in memory, where there is one: these tests do not cut the power.
FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None
EXAMPLES = int(os.environ.get("FAIRLEAD_EXAMPLES", "150"))


@st.composite
def configs(draw):
    size, places, bound = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    on_stale = draw(st.sampled_from(["wait", "wait", "requeue", "drop"]))
    policies = [OldestFirst()] if on_stale == "wait" else [OldestFirst(), ReadyFirst()]
    unbounded = on_stale != "wait" and draw(st.booleans())
    return LedgerConfig(
        group_size=size,
        groups_per_version=places,
        max_staleness=None if unbounded else bound,
        lookahead=bound,
        serving_lag=draw(st.integers(0, bound)),
        max_leased=draw(st.none() | st.integers(1, 6)),
        policy=draw(st.sampled_from(policies)),
        on_stale=on_stale,
        completeness=Completeness(
            min_samples=draw(st.integers(min(2, size), size)),
            retry=draw(st.sampled_from(["sibling", "group"])),
            max_attempts=draw(st.integers(1, 3)),
        ),
    )


class Machine(RuleBasedStateMachine):
    """A job with generators that come late, fail and are cancelled, and a trainer that prefetches."""

    leases = Bundle("leases")

    @initialize(config=configs(), keep_steps=st.sampled_from([None, 0, 100]))
    def begin(self, config, keep_steps):
        self.config, self.time, self.step, self.version = config, 0, 0, 0
        self.alive, self.fates, self.steps, self.claimed_at = {}, {}, {}, {}
        self.saved, self.crashes = [], 0
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.keep_steps = keep_steps
        self.journal = None if keep_steps is None else Journal(self.folder / "journal", keep_steps=keep_steps)
        self.ledger = Ledger(config, list(range(PROMPTS)), journal=self.journal, **self.callbacks())
        self.save_to_disk(commit=False)

    def callbacks(self):
        return {"on_release": self.release, "on_event": self.record}

    # The model: the references that are alive, the fate of each ordinal, the claims that are not trained.

    def release(self, ref, reason):
        assert self.alive.pop(ref.value, None) is not None, f"{ref} is released twice"

    def record(self, event):
        assert self.fates.get(event.ordinal, "unseen") == event.before
        assert event.before not in ("applied", "dropped")
        self.fates[event.ordinal] = event.after
        if event.after == "applied":
            assert event.before == "trained"

    def ref(self):
        value = f"ref {len(self.alive)} at {self.time}"
        self.time += 1
        ref = Ref(value, durable=bool(self.time % 2))
        self.alive[value] = ref
        return ref

    # The rollout side.

    @rule(target=leases, count=st.integers(1, 6), lag=st.integers(0, 2), within=st.none() | st.integers(1, 9))
    def lease(self, count, lag, within):
        room = self.ledger.room()
        lag = min(lag, self.config.serving_lag, self.version)
        deadline = None if within is None else self.time + within
        leases = self.ledger.lease(count, serving_version=self.version - lag, deadline=deadline)
        assert len(leases) <= min(count, room)
        return multiple(*leases)

    @rule(lease=leases, sibling=st.integers(0, 2), lag=st.integers(0, 2))
    def seal(self, lease, sibling, lag):
        if sibling < self.config.group_size:
            owed = self.owes(lease, sibling)
            assert self.ledger.seal(lease, sibling, self.ref()) is owed

    @rule(lease=leases)
    def seal_all(self, lease):
        self.seal_all_of(lease)

    def seal_all_of(self, lease):
        for sibling in lease.siblings:
            self.ledger.seal(lease, sibling, self.ref())
        assert not any(self.owes(lease, sibling) for sibling in lease.siblings)

    @rule(count=st.integers(1, 6))
    def generate(self, count):
        for lease in self.ledger.lease(count):
            self.seal_all_of(lease)

    @rule(data=st.data())
    def finish_leases(self, data):
        for lease in [record.lease for record in self.ledger._book.by_state["leased"].values()]:
            if data.draw(st.booleans()):
                self.seal_all_of(lease)

    @rule(lease=leases, sibling=st.none() | st.integers(0, 2))
    def fail(self, lease, sibling):
        if sibling is None or sibling < self.config.group_size:
            self.ledger.fail(lease, None if sibling is None else [sibling], reason="it broke")

    @rule(lease=leases)
    def cancel(self, lease):
        self.ledger.cancel(lease)

    @rule(after=st.integers(0, 9))
    def expire(self, after):
        self.time += after
        self.ledger.expire(self.time)

    @rule()
    def abort(self):
        for lease in self.ledger.to_abort():
            assert self.ledger.cancel(lease)

    def owes(self, lease, sibling):
        record = self.ledger._book.records.get(lease.ordinal)
        current = record is not None and record.lease is not None and record.lease.token == lease.token
        return current and bool(record.waiting >> sibling & 1)

    # The trainer side.

    @rule(count=st.integers(1, 4), minimum=st.none() | st.just(1))
    def claim(self, count, minimum):
        self.claim_some(count, minimum)

    def claim_some(self, count, minimum):
        left = self.ledger._claims.next_place()[1]
        count = min(count, left, self.config.most_open or count)
        found = self.ledger.claim(self.step + 1, count, minimum=minimum)
        if isinstance(found, Shortage):
            assert (found.reason == "wait") is bool(found.blocked_by)
            assert all(self.ledger.state(one) in ("leased", "pending") for one in found.blocked_by)
            return
        assert isinstance(found, Claim)
        assert (minimum or count) <= len(found.groups) <= count
        self.step += 1
        self.steps[self.step] = [group.ordinal for group in found.groups]
        for group in found.groups:
            self.claimed_at[group.ordinal] = found.version
            assert len(group.samples) >= self.config.min_samples
            assert {sample.ref.value for sample in group.samples} <= set(self.alive)
            if self.config.max_staleness is not None:
                assert found.version - group.oldest_version <= self.config.max_staleness

    @rule(turns=st.integers(1, 4), late=st.booleans(), update=st.booleans())
    def train(self, turns, late, update):
        for _ in range(turns):
            leases = self.ledger.lease(6)
            for lease in leases[late:]:
                self.seal_all_of(lease)
            self.claim_some(4, 1)
            self.advance_by(update)

    @rule()
    def unclaim(self):
        if self.steps:
            step, ordinals = self.steps.popitem()
            self.step = step - 1
            self.ledger.unclaim(step)
            assert {self.ledger.state(ordinal) for ordinal in ordinals} <= {"sealed"}

    @rule(data=st.data())
    def drop(self, data):
        some = [one for one in self.fates if self.fates[one] in ("sealed", "claimed")]
        if some:
            ordinal = data.draw(st.sampled_from(some))
            self.ledger.drop([ordinal], "no_signal")
            for ordinals in self.steps.values():
                if ordinal in ordinals:
                    ordinals.remove(ordinal)
            self.steps = {step: ordinals for step, ordinals in self.steps.items() if ordinals}

    @rule(update=st.booleans())
    def advance(self, update):
        self.advance_by(update)

    def advance_by(self, update):
        self.version += update
        trained = min(self.steps, default=None)
        self.ledger.advance(self.version, trained=trained)
        if trained is not None:
            assert {self.ledger.state(ordinal) for ordinal in self.steps.pop(trained)} <= {"trained"}
            if self.keep_steps:
                self.note_checkpoint(trained, None)

    @rule()
    def sweep(self):
        self.ledger.sweep()
        assert self.ledger.sweep() == 0

    # Checkpoints and crashes.

    @rule(commit=st.booleans())
    def save(self, commit):
        self.save_to_disk(commit)

    def save_to_disk(self, commit):
        step = min(self.steps, default=self.step + 1) - 1
        if self.saved and step < self.saved[-1]["step"]:
            return
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        assert self.ledger.prepare(step, directory).parent == directory
        self.note_checkpoint(step, directory)
        if commit:
            self.ledger.commit(step)
            assert "trained" not in self.fates.values()

    def note_checkpoint(self, step, directory):
        """Note what a restore of a step has to bring back; without a directory the journal has its snapshot."""
        done = {"applied": "applied", "trained": "applied", "dropped": "dropped"}
        fates = {ordinal: done[fate] for ordinal, fate in self.fates.items() if fate in done}
        self.saved.append({"step": step, "version": self.version, "directory": directory, "fates": fates})

    @rule(back=st.integers(1, 2))
    def crash(self, back):
        """The process ends without a word, and another one restores one of the last checkpoints."""
        if len(self.saved) < back:
            return
        self.saved = self.saved[: len(self.saved) - back + 1]
        checkpoint = self.saved[-1]
        # The journal's snapshot of this step is the restored one from now on.
        self.saved = [one for one in self.saved if one["directory"] or one["step"] != checkpoint["step"]]
        self.saved += [checkpoint] if checkpoint not in self.saved else []
        if self.journal is not None:
            self.journal._database.close()
            self.journal = Journal(self.journal.path, keep_steps=self.keep_steps)
        self.crashes += 1
        self.fates = {}
        # Without a journal the snapshot may list a payload that has been released since.
        exists = None if self.journal is not None else lambda ref: ref.value in self.alive
        places = {"step": checkpoint["step"], "version": checkpoint["version"], "directory": checkpoint["directory"]}
        self.ledger = Ledger.restore(
            self.config, list(range(PROMPTS)), **places, journal=self.journal, exists=exists, **self.callbacks()
        )
        self.step, self.version, self.steps = checkpoint["step"], checkpoint["version"], {}
        # References that are not durable, or that only the dead process knew, are gone with it.
        records = self.ledger._book.records.values()
        held = {one.ref.value for record in records for one in record.samples.values()}
        assert held <= set(self.alive)
        assert all(self.alive[value].durable for value in held)
        self.alive = {value: self.alive[value] for value in held}
        # Nothing is skipped, and nothing that the checkpoint covers is open again.
        seen = range(self.ledger._book.next)
        states = {ordinal: self.ledger.state(ordinal) for ordinal in seen}
        assert {one: state for one, state in states.items() if state in ("applied", "dropped")} == checkpoint["fates"]
        assert set(states.values()) <= {"applied", "dropped", "pending", "sealed"}
        newest = [one.newest_version for record in records for one in record.samples.values()]
        assert max(newest, default=0) <= self.version
        # Admission counts what the steps of the checkpoint took from the current version.
        taken = [self.claimed_at[one] for one, fate in checkpoint["fates"].items() if fate == "applied"]
        assert self.ledger._book.consumed == Counter(one for one in taken if one >= self.version)
        self.fates = states

    @invariant()
    def invariants_hold(self):
        self.ledger.check()
        held = self.ledger._book.records.values()
        refs = {one.ref.value for record in held for one in record.samples.values()}
        assert refs == set(self.alive)
        for ordinal in range(PROMPTS):
            assert self.ledger.state(ordinal) == self.fates.get(ordinal, "unseen")
            assert f"Ordinal {ordinal} is {self.ledger.state(ordinal)}" in self.ledger.explain(ordinal)

    def teardown(self):
        """Every prompt is trained or dropped, in so many rounds: no claim waits for itself."""
        if not hasattr(self, "ledger"):
            return
        try:
            self.finish_everything()
        finally:
            if self.journal is not None:
                self.journal.close()
            shutil.rmtree(self.folder)

    def finish_everything(self):
        for _ in range(200):
            for lease in [record.lease for record in self.ledger._book.by_state["leased"].values()]:
                for sibling in range(self.config.group_size):
                    self.ledger.seal(lease, sibling, self.ref())
            while self.ledger.room() and (leases := self.ledger.lease(min(self.ledger.room(), 10))):
                for lease in leases:
                    for sibling in lease.siblings:
                        assert self.ledger.seal(lease, sibling, self.ref())
            left = self.ledger._claims.next_place()[1]
            claim = self.ledger.claim(self.step + 1, min(left, self.config.most_open or left), minimum=1)
            self.step += 1
            assert isinstance(claim, Claim) or claim.reason != "wait"
            self.version += 1
            self.ledger.advance(self.version, trained=self.step)
            self.ledger.prepare(self.step, self.folder)
            self.ledger.commit(self.step)
            if self.ledger._book.settled.frontier == PROMPTS:
                break
        self.invariants_hold()
        assert set(self.fates.values()) <= {"applied", "dropped"}
        assert len(self.fates) == PROMPTS
        assert self.alive == {}


Machine.TestCase.settings = settings(max_examples=EXAMPLES * 4, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
