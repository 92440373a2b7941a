# SPDX-License-Identifier: Apache-2.0
"""A job and a model of what it must do, for random calls and for scenarios."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from invariants import check

from fairlead_rollouts import Claim, Completeness, Ledger, LedgerConfig, OldestFirst, ReadyFirst, Ref, Shortage
from fairlead_rollouts._snapshot import read_snapshot

PROMPTS = 30
# A folder in memory, where there is one: these tests do not cut the power.
FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None


@st.composite
def configs(draw):
    size, places, bound = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 2))
    on_stale = draw(st.sampled_from(["wait", "wait", "requeue", "drop"]))
    unbounded = on_stale != "wait" and draw(st.booleans())
    return LedgerConfig(
        group_size=size,
        groups_per_version=places,
        max_staleness=None if unbounded else bound,
        lookahead=bound,
        serving_lag=draw(st.integers(0, bound)),
        max_leased=draw(st.none() | st.integers(1, 6)),
        policy=draw(st.sampled_from([OldestFirst(), ReadyFirst()][: 1 + (on_stale != "wait")])),
        on_stale=on_stale,
        completeness=Completeness(
            min_samples=draw(st.integers(min(2, size), size)),
            retry=draw(st.sampled_from(["sample", "group"])),
            max_attempts=draw(st.integers(1, 3)),
        ),
    )


class Machine(RuleBasedStateMachine):
    """A job with generators that come late, fail and are cancelled, and a trainer that prefetches."""

    leases = Bundle("leases")

    @initialize(config=configs(), mode=st.sampled_from(["directory", "both", "file"]))
    def begin(self, config, mode):
        self.config, self.mode, self.time, self.step, self.version = config, mode, 0, 0, 0
        self.alive, self.final, self.steps, self.places, self.saved = {}, {}, {}, {}, []
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.file = None if mode == "directory" else self.folder / "ledger"
        self.ledger = Ledger(config, list(range(PROMPTS)), file=self.file, on_release=self.release)
        self.save(commit=False)

    # The model: the references that are alive, the final fates, the claims that are not trained.

    def release(self, ref, reason):
        assert self.alive.pop(ref.value, None) is not None, f"{ref} is released twice"

    def states(self):
        return {prompt_id: self.ledger.state(prompt_id) for prompt_id in range(len(self.ledger._book.fates))}

    def ref(self):
        value = f"ref {len(self.alive)} at {self.time}"
        self.time += 1
        ref = Ref(value, durable=bool(self.time % 2))
        self.alive[value] = ref
        return ref

    # The rollout side.

    @rule(target=leases, count=st.integers(1, 6), lag=st.integers(0, 2), within=st.none() | st.integers(1, 9))
    def lease(self, count, lag, within):
        room, lag = self.ledger.room(), min(lag, self.config.serving_lag, self.version)
        deadline = None if within is None else self.time + within
        leases = self.ledger.lease(count, serving_version=self.version - lag, deadline=deadline)
        assert len(leases) <= min(count, room)
        return multiple(*leases)

    @rule(lease=leases, sample=st.integers(0, 2))
    def finish_one(self, lease, sample):
        if sample < self.config.group_size:
            owed = self.owes(lease, sample)
            assert self.ledger.finish(lease, sample, self.ref()) is owed

    def finish_all_of(self, lease):
        for sample in lease.samples:
            self.ledger.finish(lease, sample, self.ref())
        assert not any(self.owes(lease, sample) for sample in lease.samples)

    @rule(data=st.data())
    def finish_leases(self, data):
        for lease in [record.lease for record in self.ledger._book.by_state["leased"].values()]:
            if data.draw(st.booleans()):
                self.finish_all_of(lease)

    @rule(lease=leases, sample=st.none() | st.integers(0, 2))
    def fail(self, lease, sample):
        if sample is None or sample < self.config.group_size:
            self.ledger.fail(lease, None if sample is None else [sample], reason="it broke")

    @rule(lease=leases)
    def cancel(self, lease):
        self.ledger.cancel(lease)

    @rule(after=st.integers(0, 9))
    def expire(self, after):
        self.time += after
        self.ledger.expire(self.time)

    def owes(self, lease, sample):
        record = self.ledger._book.records.get(lease.prompt_id)
        current = record is not None and record.lease is not None and record.lease.token == lease.token
        return current and bool(record.waiting >> sample & 1)

    # The trainer side.

    @rule(count=st.integers(1, 4), minimum=st.none() | st.just(1))
    def claim(self, count, minimum):
        left = self.ledger._book.next_place[1]
        count = min(count, left, self.config.most_open or count)
        found = self.ledger.claim(self.step + 1, count, minimum=minimum)
        if isinstance(found, Shortage):
            assert (found.reason == "wait") is bool(found.blocked_by)
            assert all(self.ledger.state(one) in ("leased", "pending") for one in found.blocked_by)
            return
        assert isinstance(found, Claim)
        assert (minimum or count) <= len(found.groups) <= count
        self.step += 1
        self.steps[self.step] = [group.prompt_id for group in found.groups]
        self.places[self.step] = found.version, count
        assert self.ledger.claim(self.step, count, minimum=minimum) == found
        for group in found.groups:
            assert len(group.samples) >= self.config.min_samples
            assert {sample.ref.value for sample in group.samples} <= set(self.alive)
            if self.config.max_staleness is not None:
                assert found.version - group.oldest_version <= self.config.max_staleness

    @rule(turns=st.integers(1, 4), late=st.booleans(), update=st.booleans())
    def train(self, turns, late, update):
        for _ in range(turns):
            leases = self.ledger.lease(6)
            for lease in leases[late:]:
                self.finish_all_of(lease)
            self.claim(4, 1)
            self.advance(update)

    @rule(data=st.data())
    def drop(self, data):
        some = [prompt_id for prompt_id, state in self.states().items() if state in ("finished", "claimed")]
        if some:
            prompt_id = data.draw(st.sampled_from(some))
            self.ledger.drop([prompt_id], "no_signal")
            for prompt_ids in self.steps.values():
                if prompt_id in prompt_ids:
                    prompt_ids.remove(prompt_id)
            self.steps = {step: prompt_ids for step, prompt_ids in self.steps.items() if prompt_ids}

    @rule(update=st.booleans())
    def advance(self, update):
        self.version += update
        trained = min(self.steps, default=None)
        self.ledger.advance(self.version, trained=trained)
        if trained is not None:
            assert {self.ledger.state(prompt_id) for prompt_id in self.steps.pop(trained)} <= {"trained"}

    @rule()
    def sweep(self):
        self.ledger.evict()
        assert self.ledger.evict() == 0

    # Checkpoints and crashes.

    @rule(commit=st.booleans())
    def save(self, commit):
        step = min(self.steps, default=self.step + 1) - 1
        if self.saved and step < self.saved[-1]["step"]:
            return
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        assert self.ledger.prepare(step, directory).parent == directory
        done = {"applied": "applied", "trained": "applied", "dropped": "dropped"}
        fates = {prompt_id: done[state] for prompt_id, state in self.states().items() if state in done}
        self.saved.append({"step": step, "version": self.version, "directory": directory, "fates": fates})
        if commit:
            self.ledger.commit(step)
            assert "trained" not in self.states().values()

    @rule()
    def flush(self):
        self.ledger.flush()

    @rule(back=st.integers(1, 2))
    def crash(self, back):
        """The process ends without a word, and another one restores one of the last checkpoints."""
        if len(self.saved) < back:
            return
        checkpoint = self.saved[-back]
        same_step = [saved for saved in self.saved if saved["step"] == checkpoint["step"]]
        self.saved = self.saved[: len(self.saved) - back + 1]
        covered = self.file is not None and read_snapshot(self.file).covers(checkpoint["step"])
        if self.mode == "file" and not covered:
            return
        if covered:  # the file knows the last checkpoint of a step only
            checkpoint |= {"fates": same_step[-1]["fates"], "version": same_step[-1]["version"]}
        self.kill()
        # Without a file the snapshot may list a payload that has been released since.
        exists = None if covered else lambda ref: ref.value in self.alive
        places = {"step": checkpoint["step"], "version": checkpoint["version"]}
        places["directory"] = None if self.mode == "file" else checkpoint["directory"]
        self.ledger = Ledger.restore(
            self.config, list(range(PROMPTS)), **places, file=self.file, exists=exists, on_release=self.release
        )
        self.step, self.version, self.steps = checkpoint["step"], checkpoint["version"], {}
        self.places = {step: place for step, place in self.places.items() if step <= self.step}
        # References that are not durable, or that only the dead process knew, are gone with it.
        records = self.ledger._book.records.values()
        held = {sample.ref.value for record in records for sample in record.samples.values()}
        assert held <= set(self.alive)
        assert all(self.alive[value].durable for value in held)
        self.alive = {value: self.alive[value] for value in held}
        # Nothing is skipped, and nothing that the checkpoint covers is open again.
        states = self.states()
        self.final = {one: state for one, state in states.items() if state in ("applied", "dropped")}
        assert self.final == checkpoint["fates"]
        assert set(states.values()) <= {"applied", "dropped", "pending", "finished"}
        newest = [sample.newest_version for record in records for sample in record.samples.values()]
        assert max(newest, default=0) <= self.version
        # Admission counts what the steps of the checkpoint took from the current version.
        for version in {version for version, _ in self.places.values() if version >= self.version}:
            places = sum(count for taken, count in self.places.values() if taken == version)
            assert self.ledger._book.count_places(version) == places

    def kill(self):
        """Unlock the file without a last write."""
        if self.file is not None:
            self.ledger._file.changed = False
            self.ledger.close()

    @invariant()
    def invariants_hold(self):
        check(self.ledger)
        held = self.ledger._book.records.values()
        refs = {sample.ref.value for record in held for sample in record.samples.values()}
        waiting = {call.args[0].value for _, call in self.ledger._book.callbacks._listed}
        assert refs | waiting == set(self.alive)
        assert not refs & waiting
        states = self.states()
        assert states | self.final == states, "a final fate has changed"
        self.final = {one: state for one, state in states.items() if state in ("applied", "dropped")}
        for prompt_id, state in states.items():
            assert f"Prompt {prompt_id} is {state}" in self.ledger.explain(prompt_id)

    def teardown(self):
        """Every prompt is trained or dropped, in so many rounds: no claim waits for itself."""
        if not hasattr(self, "ledger"):
            return
        try:
            self.finish_everything()
        finally:
            self.kill()
            shutil.rmtree(self.folder)

    def finish_everything(self):
        for _ in range(200):
            for lease in [record.lease for record in self.ledger._book.by_state["leased"].values()]:
                self.finish_all_of(lease)
            while leases := self.ledger.lease(10):
                for lease in leases:
                    self.finish_all_of(lease)
            left = self.ledger._book.next_place[1]
            claim = self.ledger.claim(self.step + 1, min(left, self.config.most_open or left), minimum=1)
            self.step += 1
            assert isinstance(claim, Claim) or claim.reason != "wait"
            self.version += 1
            self.ledger.advance(self.version, trained=self.step)
            self.ledger.prepare(self.step, self.folder)
            self.ledger.commit(self.step)
            if len(self.ledger._book.fates) == PROMPTS and not self.ledger._book.records:
                break
        self.ledger.flush()
        self.invariants_hold()
        assert len(self.final) == PROMPTS
        assert self.alive == {}
