# SPDX-License-Identifier: Apache-2.0
"""The ledger: every transition of every group, on one thread and without a clock."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._audit import check_book, explain_group
from ._book import Book
from ._claims import Claims
from ._leases import Leases
from ._model import Claim, Event, Lease, LedgerConfig, Ref, Sample, Shortage, State
from ._sources import PromptSource, SequenceStream
from ._statistics import Statistics
from .exceptions import IllegalTransitionError

__all__ = ["Ledger"]

PROMPT_BYTES = 4096
# The methods that change a group in each state.
LEGAL: dict[State, tuple[str, ...]] = {
    "unseen": ("offer", "lease"),
    "pending": ("lease", "sweep"),
    "leased": ("seal", "park", "fail", "cancel", "expire"),
    "sealed": ("claim", "drop", "sweep"),
    "claimed": ("advance", "unclaim", "drop"),
    "trained": ("advance",),
    "applied": (),
    "dropped": (),
}


class Ledger:
    """Record who generates every prompt, with which weights, and which step trained on it.

    It has no clock and no thread, and every method is deterministic in its arguments. Methods that refuse a call change
    nothing. Call it from one thread.

    Args:
        config: the rules.
        source: where prompts come from, or a sequence of them; None if the caller offers prompts.
        run: 48 bits that no other run of the same job shares; random by default.
        on_release: called once with each reference that is no longer needed, and the reason.
        on_event: called with each transition of a group.

    >>> ledger = Ledger(LedgerConfig(group_size=2, groups_per_version=1, max_staleness=0), ["1+1=", "2*3="])
    >>> [lease] = ledger.lease(1)
    >>> [ledger.seal(lease, sibling, Ref(f"tokens {sibling}")) for sibling in lease.siblings]
    [True, True]
    >>> claim = ledger.claim(step=1, count=1)
    >>> claim.version, [sample.ref.value for sample in claim.groups[0].samples]
    (0, ['tokens 0', 'tokens 1'])
    >>> ledger.advance(1, trained=1)
    >>> ledger.state(0)
    'applied'
    """

    def __init__(
        self,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any] | None = None,
        *,
        run: int | None = None,
        on_release: Callable[[Ref, str], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        run = random.SystemRandom().getrandbits(48) if run is None else run
        if not 0 <= run < 1 << 48:
            raise ValueError(f"run is {run}; it must be a number of 48 bits.")
        self._config = config
        self._book = Book(config, on_release, on_event)
        self._source = SequenceStream(source) if isinstance(source, Sequence) else source
        self._exhausted = False
        self._leases, self._claims = Leases(self._book, run), Claims(self._book)

    @property
    def config(self) -> LedgerConfig:
        """The rules."""
        return self._config

    @property
    def version(self) -> int:
        """The trainer's version."""
        return self._book.version

    # The rollout side.

    def room(self) -> int:
        """Return how many groups may be leased now, including pending groups that hold samples."""
        return self._book.room

    def offer(self, prompts: Iterable[Any]) -> list[int]:
        """Append prompts to the stream, if the ledger has no source.

        Returns:
            Their ordinals.
        """
        if self._source is not None:
            raise ValueError("This ledger reads prompts from its source. Make it without one to offer prompts.")
        checked = [_check_prompt(prompt) for prompt in prompts]
        ordinals = [self._book.open(prompt).ordinal for prompt in checked]
        self._book.run_callbacks()
        return ordinals

    def lease(self, count: int, *, serving_version: int | None = None, deadline: float | None = None) -> list[Lease]:
        """Lease up to `count` groups for generation: pending ones first, then new ones from the source.

        Args:
            count: the groups that the caller can start.
            serving_version: the weights of the generator; by default the oldest that `serving_lag` allows.
            deadline: when `expire` takes the leases back, on the caller's clock.

        Returns:
            Fewer leases without room, or if the source has ended.
        """
        book = self._book
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1.")
        oldest = max(0, book.version - self._config.serving_lag)
        start = oldest if serving_version is None else serving_version
        if not oldest <= start <= book.version:
            raise ValueError(
                f"serving_version is {start}; with trainer version {book.version} and serving_lag "
                f"{self._config.serving_lag} it must be between {oldest} and {book.version}."
            )
        room = book.room - book.held
        self._pull(min(count, book.room) - len(book.by_state["pending"]))
        leases = [self._leases.make(record, start, deadline) for record in book.take_pending(count, room)]
        book.run_callbacks()
        return leases

    def _pull(self, count: int) -> None:
        """Make prompts of the source pending. An error leaves those before it pending."""
        while count > 0 and self._source is not None and not self._exhausted:
            try:
                prompt = self._source.get(self._book.next)
            except IndexError:
                self._exhausted = True
                return
            self._book.open(_check_prompt(prompt))
            count -= 1

    def seal(
        self,
        lease: Lease,
        sibling: int,
        ref: Ref,
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> bool:
        """Record the finished rollout of one sibling.

        Args:
            lease: the lease under which it was generated.
            sibling: its number.
            ref: its payload.
            oldest_version: the oldest weights of tokens that carry loss; by default that of the partial rollout that
                was continued, or else the start version of the lease.
            newest_version: the newest weights; by default the trainer's version.

        Returns:
            False if the result is late: the lease has ended, or this sibling has. Then `ref` is released.
        """
        sealed = self._leases.accept(lease, self._make_sample(lease, sibling, ref, oldest_version, newest_version))
        self._book.run_callbacks()
        return sealed

    def seal_many(
        self,
        results: Iterable[tuple[Lease, int, Ref]],
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> list[bool]:
        """Record finished rollouts, each as in `seal`, all with the same versions.

        Returns:
            For each result whether it was accepted.
        """
        samples = [
            (lease, self._make_sample(lease, sibling, ref, oldest_version, newest_version))
            for lease, sibling, ref in results
        ]
        accepted = [self._leases.accept(lease, sample) for lease, sample in samples]
        self._book.run_callbacks()
        return accepted

    def _make_sample(self, lease: Lease, sibling: int, ref: Ref, oldest: int | None, newest: int | None) -> Sample:
        if not 0 <= sibling < self._config.group_size:
            raise ValueError(f"sibling is {sibling}; a group has {self._config.group_size} siblings, counted from 0.")
        version = self._book.version
        newest = version if newest is None else newest
        if oldest is None:
            oldest = lease.carry[sibling].oldest_version if sibling in lease.carry else lease.start_version
        if not 0 <= oldest <= newest <= version:
            raise ValueError(
                f"oldest_version is {oldest} and newest_version is {newest}; they must be in ascending order, from 0 "
                f"to the trainer's version, which is {version}."
            )
        return Sample(sibling, ref, oldest, newest)

    def park(
        self,
        lease: Lease,
        sibling: int,
        ref: Ref,
        *,
        oldest_version: int | None = None,
        newest_version: int | None = None,
    ) -> bool:
        """Keep the partial rollout of one sibling, which the next lease of the group continues.

        Args:
            lease: the lease under which it was generated.
            sibling: its number.
            ref: the payload so far.
            oldest_version: as in `seal`.
            newest_version: as in `seal`.

        Returns:
            False if the lease or this sibling has ended. Then `ref` is released.
        """
        sample = self._make_sample(lease, sibling, ref, oldest_version, newest_version)
        parked = self._leases.accept(lease, sample, partial=True)
        self._book.run_callbacks()
        return parked

    def fail(self, lease: Lease, siblings: Iterable[int] | None = None, *, reason: str) -> bool:
        """Give up siblings of a lease; a failure never becomes a sample.

        Args:
            lease: the lease.
            siblings: the siblings that failed; None for all that are not finished.
            reason: shown if the group is dropped.

        Returns:
            False if the lease has ended, or all of these siblings have.
        """
        every = self._leases.siblings
        named = every if siblings is None else tuple(siblings)
        if wrong := [one for one in named if one not in every]:
            raise ValueError(f"siblings has {wrong}; a group has {len(every)} siblings, counted from 0.")
        record = self._leases.find(lease)
        failed = [one for one in self._leases.owed(record) if one in named] if record else []
        if record and failed:
            self._leases.give_up(record, failed, reason)
        self._book.run_callbacks()
        return bool(failed)

    def cancel(self, lease: Lease) -> bool:
        """Take a lease back, for example for an update of the weights. This costs no attempt.

        Returns:
            False if the lease has ended.
        """
        record = self._leases.find(lease)
        if record is not None:
            self._leases.cancel(record)
        self._book.run_callbacks()
        return record is not None

    def expire(self, now: float) -> list[Lease]:
        """Let all leases fail whose deadline has passed.

        Returns:
            These leases, so that the caller can abort their generation.
        """
        leased = self._book.by_state["leased"].values()
        late = [record for record in leased if record.deadline is not None and record.deadline <= now]
        leases = [record.lease for record in late if record.lease is not None]
        for record in late:
            self._leases.give_up(record, self._leases.owed(record), "expired")
        self._book.run_callbacks()
        return leases

    def to_abort(self) -> list[Lease]:
        """Return the leases that no claim can accept any more, because their weights are too old."""
        bound = self._config.max_staleness
        if bound is None:
            return []
        limit = self._claims.next_place()[0] - bound
        leased = self._book.by_state["leased"].values()
        return [record.lease for record in leased if record.oldest < limit and record.lease is not None]

    # The trainer side.

    def advance(self, version: int, *, trained: int | None = None) -> None:
        """Report the trainer's version, and the last step that it has trained.

        Args:
            version: the number of updates of the weights so far; it never falls.
            trained: all claims up to this step become applied, and their references are released.
        """
        book = self._book
        if version < book.version:
            raise ValueError(f"version is {version}, below {book.version}. Versions never fall; use restore().")
        book.version = version
        book.consumed = {one: count for one, count in book.consumed.items() if one >= version}
        if trained is not None:
            self._train(trained)
        book.run_callbacks()

    def _train(self, step: int) -> None:
        book = self._book
        for one in sorted(one for one in book.claims if one <= step):
            for ordinal in book.claims.pop(one):
                book.apply(book.records[ordinal])
        book.last_trained = step if book.last_trained is None else max(step, book.last_trained)
        book.forget_targets(book.last_trained)

    def claim(self, step: int, count: int, *, minimum: int | None = None) -> Claim | Shortage:
        """Take finished groups for a step, all or none.

        Groups that are too old are requeued or dropped first. A claim never takes a group whose oldest version is more
        than `max_staleness` below the version that the step updates.

        Args:
            step: the step that trains them.
            count: the groups to take.
            minimum: take fewer groups, down to this number.

        Returns:
            A `Claim`, or a `Shortage` if it took nothing.
        """
        book, config = self._book, self._config
        at, left = self._claims.next_place()
        least = count if minimum is None else minimum
        if not 1 <= least <= count:
            raise ValueError(f"count is {count} and minimum is {least}; it must be 1 <= minimum <= count.")
        if book.last_trained is not None and step <= book.last_trained:
            raise ValueError(f"step is {step}, and step {book.last_trained} has been trained. Claim for a later step.")
        if config.most_open is not None and count > config.most_open:
            raise ValueError(
                f"count is {count}, but at most {config.most_open} groups can be open. Raise max_open or lookahead."
            )
        if count > left:
            raise ValueError(
                f"count is {count}, but {left} of the {config.groups_per_version} groups of version {at} are left. A "
                "claim belongs to one version: claim fewer groups, or raise groups_per_version."
            )
        claim = self._claims.claim(step, count, least, exhausted=self._exhausted)
        book.run_callbacks()
        return claim

    def unclaim(self, step: int) -> None:
        """Return the groups of a step that did not happen. They are sealed again, as before the claim."""
        if step not in self._book.claims:
            raise ValueError(f"step is {step}; steps {sorted(self._book.claims)} are claimed and not trained.")
        for ordinal in self._book.claims.pop(step):
            self._claims.give_back(self._book.records[ordinal])
        self._book.run_callbacks()

    def drop(self, ordinals: Iterable[int], reason: str) -> None:
        """Drop sealed or claimed groups, for example groups without a signal. Their prompts are not generated again."""
        ordinals = list(dict.fromkeys(ordinals))
        for ordinal in ordinals:
            state = self.state(ordinal)
            if state not in ("sealed", "claimed"):
                raise IllegalTransitionError(ordinal, state, "drop", LEGAL[state])
        for ordinal in ordinals:
            record = self._book.records[ordinal]
            if record.step is not None:
                self._book.claims[record.step].remove(ordinal)
                self._claims.give_back(record, None)
            self._book.drop(record, reason)
        self._book.run_callbacks()

    def sweep(self) -> int:
        """Requeue or drop the groups that the next claim finds too old, as `on_stale` says.

        Returns:
            The number of groups.
        """
        found = self._claims.sweep(self._claims.next_place()[0], None)
        self._book.run_callbacks()
        return found

    # What people and tests look at.

    def state(self, ordinal: int) -> State:
        """Return the state of a group."""
        if ordinal < 0:
            raise ValueError(f"ordinal is {ordinal}; it must be at least 0.")
        record = self._book.records.get(ordinal)
        if record is not None:
            return record.state
        if ordinal >= self._book.next:
            return "unseen"
        return "dropped" if self._book.settled.is_dropped(ordinal) else "applied"

    def explain(self, ordinal: int) -> str:
        """Return what the ledger knows of a group, in a sentence or two."""
        return explain_group(self._book, ordinal, self.state(ordinal), self._claims.next_place()[0])

    def statistics(self) -> Statistics:
        """Return the state of the ledger in numbers."""
        book = self._book
        oldest = min((record.oldest for record in book.records.values()), default=book.version)
        counted: dict[str, Any] = {state: len(records) for state, records in book.by_state.items()}
        for name, one in vars(book.counters).items():
            if name in Statistics.__slots__:
                counted[name] = dict(sorted(one.items())) if isinstance(one, dict) else one
        return Statistics(
            version=book.version,
            applied=book.settled.applied,
            dropped=book.settled.dropped,
            room=book.room,
            oldest_open=book.version - min(oldest, book.version) if book.records else None,
            **counted,
        )

    def check(self) -> None:
        """Raise an `InvariantError` if the records contradict each other."""
        check_book(self._book, self._leases.run)


def _check_prompt(prompt: Any) -> Any:
    try:
        size = len(json.dumps(prompt))
    except (TypeError, ValueError) as error:
        raise ValueError(f"A prompt must be a JSON value, such as an index of a dataset: {error}") from None
    if size > PROMPT_BYTES:
        raise ValueError(f"A prompt has {size} bytes of JSON; at most {PROMPT_BYTES} are kept. Use a reference to it.")
    return prompt
