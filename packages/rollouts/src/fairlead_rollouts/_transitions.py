# SPDX-License-Identifier: Apache-2.0
"""Every transition of a group: leases and results on the rollout side, versions and claims on the trainer's."""

import json
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ._book import DROPPED, Book, Record, StepClaim
from ._callbacks import Callbacks, changes
from ._model import Claim, Lease, LedgerConfig, OldestFirst, Ref, Sample, Shortage, State
from ._sources import PromptSource, SequenceStream
from .exceptions import OldWeightsError

__all__ = ["Transitions"]

PROMPT_BYTES = 4096


class Transitions:
    """The records of a ledger, and the methods that change them."""

    def __init__(
        self,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any],
        callbacks: Callbacks,
        run: int,
        checkpoints: bool,
    ) -> None:
        self._book, self._config, self._run, self._checkpoints = Book(config, callbacks), config, run, checkpoints
        self._source: PromptSource = SequenceStream(source) if isinstance(source, Sequence) else source
        self._sequence = 0
        self._samples = tuple(range(config.group_size))
        self._lock = threading.RLock()

    @property
    def config(self) -> LedgerConfig:
        """The rules."""
        return self._config

    @property
    def version(self) -> int:
        """The trainer's version."""
        return self._book.version

    @property
    def last_trained(self) -> int | None:
        """The last step that was trained, in this process or before the checkpoint; None without one."""
        return self._book.last_trained

    @property
    def exhausted(self) -> bool:
        """Whether the source has ended and no open group can be leased again."""
        states = self._book.by_state
        return self._book.source_ended and not any(
            states[state] for state in ("pending", "leased", "finished", "claimed")
        )

    def state(self, prompt_id: int) -> State:
        """Return the state of a group."""
        if prompt_id < 0:
            raise ValueError(f"prompt_id is {prompt_id}; it must be at least 0.")
        record = self._book.records.get(prompt_id)
        if record is not None:
            return record.state
        if prompt_id >= len(self._book.fates):
            return "unseen"
        return "dropped" if self._book.fates[prompt_id] == DROPPED else "applied"

    def room(self) -> int:
        """Return how many groups may be leased now, including pending groups that hold samples."""
        return self._book.room + len(self._book.list_held())

    @changes
    def lease(self, count: int, *, serving_version: int | None = None, deadline: float | None = None) -> list[Lease]:
        """Lease up to `count` groups for generation: pending ones first, then new ones from the source.

        Args:
            count: the groups that the caller can start.
            serving_version: the weights of the generator; by default the oldest that `serving_lag` allows.
            deadline: when `expire` takes the leases back, on the caller's clock.

        Returns:
            Fewer leases without room, or if the source has ended.

        Raises:
            OldWeightsError: the trainer has advanced too far past `serving_version`. Nothing is leased.
        """
        book = self._book
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1.")
        oldest = max(0, book.version - self._config.serving_lag)
        start = oldest if serving_version is None else serving_version
        if start < oldest:
            raise OldWeightsError(start, oldest, book.version)
        if start > book.version:
            raise ValueError(f"serving_version is {start}, and the trainer is at {book.version}. Call advance() first.")
        room = book.room
        self._pull(min(count, room + len(book.list_held())) - len(book.by_state["pending"]))
        pending = [record for _, record in sorted(book.by_state["pending"].items())]
        # A group that holds samples has its room already.
        chosen = [record for record in pending if record.samples or (room := room - 1) >= 0][:count]
        return [self._make_lease(record, start, deadline) for record in chosen]

    def _pull(self, count: int) -> None:
        """Make prompts of the source pending. An error leaves those before it pending."""
        while count > 0 and not self._book.source_ended:
            try:
                prompt = self._source.get(len(self._book.fates))
            except IndexError:
                self._book.source_ended = self._book.callbacks.changed = True
                return
            self._book.open(_check_prompt(prompt))
            count -= 1

    def _make_lease(self, record: Record, start_version: int, deadline: float | None) -> Lease:
        self._sequence += 1
        self._book.move(record, "leased")
        owed = self._samples
        if record.samples:
            owed = tuple([sample for sample in owed if sample not in record.samples])
        token = self._run << 32 | self._sequence
        record.lease = Lease(record.prompt_id, owed, token, start_version, record.prompt, record.attempt)
        record.deadline, record.failed = deadline, False
        record.waiting = sum([1 << sample for sample in owed])
        record.oldest = min(record.oldest, start_version)
        return record.lease

    def _find(self, lease: Lease) -> Record | None:
        """Return the record of a lease that has not ended."""
        record = self._book.records.get(lease.prompt_id)
        return record if record and record.lease and record.lease.token == lease.token else None

    @changes
    def finish(
        self,
        lease: Lease,
        sample: int,
        ref: Ref,
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> bool:
        """Record one finished rollout.

        Args:
            lease: the lease under which it was generated.
            sample: its number in the group.
            ref: its payload.
            oldest_version: the oldest weights of tokens that carry loss; by default the start version of the lease.
            newest_version: the newest weights; by default the trainer's version.

        Returns:
            False if the result is late: the lease has ended, or this sample is finished. Then `ref` is released.
        """
        return self._accept(lease, self._make_sample(lease, sample, ref, oldest_version, newest_version))

    @changes
    def finish_many(
        self,
        results: Iterable[tuple[Lease, int, Ref]],
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> list[bool]:
        """Record finished rollouts, each as in `finish`, all with the same versions.

        Returns:
            For each result whether it was accepted.
        """
        samples = [
            (lease, self._make_sample(lease, sample, ref, oldest_version, newest_version))
            for lease, sample, ref in results
        ]
        return [self._accept(lease, sample) for lease, sample in samples]

    def _make_sample(self, lease: Lease, sample: int, ref: Ref, oldest: int | None, newest: int | None) -> Sample:
        if not 0 <= sample < self._config.group_size:
            raise ValueError(f"sample is {sample}; a group has {self._config.group_size} samples, counted from 0.")
        version = self._book.version
        newest = version if newest is None else newest
        oldest = lease.start_version if oldest is None else oldest
        # A late result may be of versions that a restore has erased; it is refused for its token.
        if not 0 <= oldest <= newest <= version and self._find(lease) is not None:
            raise ValueError(
                f"oldest_version is {oldest} and newest_version is {newest}; they must be in ascending order, from 0 "
                f"to the trainer's version, which is {version}."
            )
        return Sample(sample, ref, oldest, newest)

    def _accept(self, lease: Lease, sample: Sample) -> bool:
        """Store a finished sample, or release its reference if the lease does not owe it any more."""
        book, index = self._book, sample.index
        record = self._find(lease)
        if record is None or not record.waiting >> index & 1:
            book.counters.fenced += 1
            record = book.records.get(lease.prompt_id)
            held = record and record.samples.get(index)
            # The same call again has the payload of the sample.
            if not (held and (held.ref.value is sample.ref.value or (held.ref.durable and held.ref == sample.ref))):
                book.callbacks.release(sample.ref, "fenced")
            return False
        record.samples[index] = sample
        if book.callbacks.file is not None:
            book.callbacks.file.changed = True
        record.oldest = min(record.oldest, sample.oldest_version)
        record.waiting &= ~(1 << index)
        if not record.waiting:
            self._end(record)
        return True

    @changes
    def fail(self, lease: Lease, samples: Iterable[int] | None = None, *, reason: str) -> bool:
        """Give up samples of a lease; a failure never becomes a sample.

        Args:
            lease: the lease.
            samples: the numbers of the samples that failed; None for all that are not finished.
            reason: what `explain` says of it. `statistics` counts a group that it drops as "failed".

        Returns:
            False if the lease has ended, or all of these samples are finished.
        """
        named = self._samples if samples is None else tuple(samples)
        if wrong := [sample for sample in named if sample not in self._samples]:
            size = self._config.group_size
            raise ValueError(f"samples has {wrong}; a group has {size} samples, counted from 0.")
        record = self._find(lease)
        failed = record is not None and any(record.waiting >> sample & 1 for sample in named)
        if record is not None and failed:
            self._give_up(record, named, reason)
        return failed

    def _give_up(self, record: Record, samples: Iterable[int], reason: str) -> None:
        for sample in samples:
            record.waiting &= ~(1 << sample)
        record.failed, record.failure = True, reason
        if not record.waiting:
            self._end(record)

    @changes
    def cancel(self, lease: Lease) -> bool:
        """Take a lease back, for example for an update of the weights. This costs no attempt.

        Returns:
            False if the lease has ended.
        """
        record = self._find(lease)
        if record is not None:
            record.waiting = 0
            self._end(record)
        return record is not None

    @changes
    def expire(self, now: float) -> list[Lease]:
        """Let all leases fail whose deadline has passed.

        Returns:
            These leases, so that the caller can abort their generation.
        """
        leased = self._book.by_state["leased"].values()
        late = [record for record in leased if record.deadline is not None and record.deadline <= now]
        leases = [record.lease for record in late if record.lease is not None]
        for record in late:
            self._give_up(record, self._samples, "expired")
        return leases

    def _end(self, record: Record) -> None:
        """Decide what becomes of a group whose lease owes no more results."""
        book, completeness = self._book, self._config.completeness
        complete = len(record.samples) == self._config.group_size
        if not complete and record.failed:
            if record.attempt < completeness.max_attempts:
                record.attempt += 1
            elif len(record.samples) < self._config.min_samples:
                book.drop(record, "failed")
                return
            else:
                complete = True
        if complete:
            book.end_lease(record, "finished")
            return
        if completeness.retry == "group":
            book.discard(record, "retried")
        book.end_lease(record, "pending")

    @changes
    def advance(self, version: int, *, trained: int | None = None) -> None:
        """Report the trainer's version, and the last step that it has trained.

        Args:
            version: the number of updates of the weights so far; it never falls.
            trained: the claims up to this step are trained. References that are not durable are released.
        """
        book = self._book
        if version < book.version:
            raise ValueError(f"version is {version}, below {book.version}. Versions never fall; use restore().")
        book.version, book.callbacks.changed = version, True
        if trained is not None:
            book.train(trained)
            if not self._checkpoints:
                book.apply(trained)
        if book.callbacks.file is not None:
            book.callbacks.file.hurry()

    @changes
    def claim(self, step: int, count: int, *, minimum: int | None = None) -> Claim | Shortage:
        """Let a step have `count` finished groups, or change nothing but groups that are too old.

        The same call can be repeated: a step that has its groups gets the same ones again, and one that has lost some
        to `drop` gets others for them. Groups that are too old are requeued or dropped first. A claim never has a group
        whose oldest version is more than `max_staleness` below the version that the step updates.

        Args:
            step: the step that trains them.
            count: the groups of the step. It uses up so many of the `groups_per_version`, even if it takes fewer.
            minimum: take fewer groups, down to this number.

        Returns:
            A `Claim` with all groups of the step, or a `Shortage`.
        """
        book, config = self._book, self._config
        least = count if minimum is None else minimum
        if not 1 <= least <= count:
            raise ValueError(f"count is {count} and minimum is {least}; it must be 1 <= minimum <= count.")
        if book.last_trained is not None and step <= book.last_trained:
            raise ValueError(f"step is {step}, and step {book.last_trained} has been trained. Claim for a later step.")
        if config.most_open is not None and count > config.most_open:
            raise ValueError(
                f"count is {count}, but at most {config.most_open} groups can be open. Raise max_open or lookahead."
            )
        claim = book.steps.get(step)
        if claim is None:
            version, left = book.next_place
            claim = StepClaim(version, 0)
        else:
            version = claim.version
            left = config.groups_per_version - book.count_places(version)
        places = max(0, count - claim.places)  # of the version, beyond what the step has
        if places > left:
            raise ValueError(
                f"count is {count}, but {left + claim.places} of the {config.groups_per_version} groups of version "
                f"{version} are left. A claim belongs to one version: claim fewer groups, or raise groups_per_version."
            )
        had = len(claim.prompt_ids)
        if had >= least:
            return self._as_claim(step, claim)
        self._evict(version)
        oldest_first = isinstance(config.policy, OldestFirst)
        finished = sorted(
            book.by_state["finished"].values(),
            key=lambda record: (record.oldest if oldest_first else 0, record.prompt_id),
        )
        chosen, others = finished[: count - had], finished[count - had :]
        have = had + len(chosen)
        if have < least:
            open_groups = had + len(finished) + len(book.by_state["leased"]) + len(book.by_state["pending"])
            return Shortage("exhausted" if book.source_ended and open_groups < least else "not_enough", have, least)
        if config.on_stale == "wait" and places:
            others += [*book.by_state["leased"].values(), *book.list_held()]
            if blocked_by := find_blockers(others, config, version=version, left=left - places):
                book.counters.waits += 1
                book.counters.blocked_by = blocked_by
                return Shortage("wait", have, least, blocked_by)
        self._take(step, claim, chosen, places)
        return self._as_claim(step, claim)

    def _take(self, step: int, claim: StepClaim, records: list[Record], places: int) -> None:
        book = self._book
        for record in records:
            record.step, record.version = step, claim.version
            book.move(record, "claimed")
            book.counters.staleness[claim.version - record.oldest] += 1
        claim.prompt_ids.extend([record.prompt_id for record in records])
        claim.places += places
        claim.unfilled = max(0, claim.unfilled - len(records))
        book.steps[step] = claim

    def _as_claim(self, step: int, claim: StepClaim) -> Claim:
        groups = [self._book.records[prompt_id].as_group() for prompt_id in claim.prompt_ids]
        return Claim(step, claim.version, tuple(groups))

    @changes
    def drop(self, prompt_ids: Iterable[int], reason: str) -> None:
        """Drop finished or claimed groups, for example groups without a signal. Their prompts are not generated again.

        A step whose groups are dropped can claim others for them.
        """
        prompt_ids = list(dict.fromkeys(prompt_ids))
        for prompt_id in prompt_ids:
            state = self.state(prompt_id)
            if state not in ("finished", "claimed"):
                raise ValueError(f"Prompt {prompt_id} is {state!r}; only finished and claimed groups can be dropped.")
        for prompt_id in prompt_ids:
            record = self._book.records[prompt_id]
            if record.step is not None:
                claim = self._book.steps[record.step]
                claim.prompt_ids.remove(prompt_id)
                claim.unfilled += 1
                record.step = None
            self._book.drop(record, reason)

    @changes
    def evict(self) -> int:
        """Requeue or drop the groups that the next claim finds too old, as `on_stale` says.

        Returns:
            The number of groups.
        """
        return self._evict(self._book.next_place[0])

    def _evict(self, version: int) -> int:
        bound, book = self._config.max_staleness, self._book
        limit = -1 if bound is None else version - bound
        finished = book.by_state["finished"].values()
        stale = [record for record in [*finished, *book.list_held()] if record.oldest < limit]
        for record in stale:
            if self._config.on_stale == "drop":
                book.drop(record, "stale")
                continue
            book.counters.requeued[record.attempt] += 1
            book.discard(record, "stale")
            book.end_lease(record, "pending")
        return len(stale)


def _check_prompt(prompt: Any) -> Any:
    try:
        text = json.dumps(prompt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"A prompt must be a JSON value, such as an index of a dataset: {error}") from None
    if len(text) > PROMPT_BYTES:
        raise ValueError(
            f"A prompt has {len(text)} bytes of JSON; at most {PROMPT_BYTES} are kept. Use a reference to it."
        )
    # As the next process reads it: a tuple has become a list.
    return json.loads(text)


def find_blockers(records: Sequence[Record], config: LedgerConfig, *, version: int, left: int) -> tuple[int, ...]:
    """Return the unfinished groups that must end before a claim, so that no group misses its deadline.

    A group must be trained at its oldest version plus K. After the claim, `left` places remain in its `version` and
    `groups_per_version` in each later one. If more of the groups that it leaves behind are due by some version than
    there are places up to it, the unfinished ones among them block the claim. If all of them are finished, waiting does
    not help, and the claim is not blocked.
    """
    bound = config.max_staleness
    assert bound is not None
    due = [0] * (bound + 1)  # the groups by their last version, counted from that of the claim
    for record in records:
        later = record.oldest + bound - version
        if 0 <= later <= bound:
            due[later] += 1
    total = 0
    for later, count in enumerate(due):
        total += count
        if total > left + later * config.groups_per_version:
            last = version + later - bound
            unfinished = [record for record in records if record.state != "finished"]
            blockers = [record.prompt_id for record in unfinished if version - bound <= record.oldest <= last]
            if blockers:
                return tuple(sorted(blockers))
    return ()
