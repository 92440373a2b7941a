# SPDX-License-Identifier: Apache-2.0
"""The part of a ledger that generators use: leases and their results."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._book import Book
from ._claims import Claims
from ._leases import Leases
from ._model import Event, Lease, LedgerConfig, Ref, Sample
from ._sources import PromptSource, SequenceStream
from ._store.restore import Salvage
from .exceptions import OldWeightsError

__all__ = ["RolloutSide"]

PROMPT_BYTES = 4096


class RolloutSide:
    """The records of a ledger, and the methods of its rollout side."""

    def __init__(
        self,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any] | None,
        run: int | None,
        on_release: Callable[[Ref, str], object] | None,
        on_event: Callable[[Event], object] | None,
    ) -> None:
        run = random.SystemRandom().getrandbits(48) if run is None else run
        if not 0 <= run < 1 << 48:
            raise ValueError(f"run is {run}; it must be a number of 48 bits.")
        self._config = config
        self._book = Book(config, on_release, on_event)
        self._source = SequenceStream(source) if isinstance(source, Sequence) else source
        self._exhausted = False
        self._leases, self._claims = Leases(self._book, run), Claims(self._book)
        self._salvage = Salvage()

    @property
    def config(self) -> LedgerConfig:
        """The rules."""
        return self._config

    @property
    def version(self) -> int:
        """The trainer's version."""
        return self._book.version

    @property
    def exhausted(self) -> bool:
        """Whether the source has ended and no open group can be leased again."""
        states = self._book.by_state
        return self._exhausted and not any(states[state] for state in ("pending", "leased", "sealed", "claimed"))

    def subscribe(self, callback: Callable[[], object]) -> None:
        """Call a function after each call that has changed the ledger."""
        self._book.subscribers.append(callback)

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
        ordinals = [self._open(prompt) for prompt in checked]
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
                self._exhausted = self._book.changed = True
                return
            self._open(_check_prompt(prompt))
            count -= 1

    def _open(self, prompt: Any) -> int:
        record = self._book.open(prompt)
        self._salvage.attach(self._book, record)
        return record.ordinal

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
            oldest_version: the oldest weights of tokens that carry loss; by default the start version of the lease.
            newest_version: the newest weights; by default the trainer's version.

        Returns:
            False if the result is late: the lease has ended, or this sibling has. Then `ref` is released.
        """
        self._make_room()
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
        self._make_room()
        accepted = [self._leases.accept(lease, sample) for lease, sample in samples]
        self._book.run_callbacks()
        return accepted

    def _make_room(self) -> None:
        """Let the journal write what waits, so that it refuses a sample before anything has changed."""
        if self._book.journal is not None:
            self._book.journal.make_room()

    def _make_sample(self, lease: Lease, sibling: int, ref: Ref, oldest: int | None, newest: int | None) -> Sample:
        if not 0 <= sibling < self._config.group_size:
            raise ValueError(f"sibling is {sibling}; a group has {self._config.group_size} siblings, counted from 0.")
        version = self._book.version
        newest = version if newest is None else newest
        oldest = lease.start_version if oldest is None else oldest
        # A late result may be of versions that a restore has erased; it is refused for its token.
        if not 0 <= oldest <= newest <= version and self._leases.find(lease) is not None:
            raise ValueError(
                f"oldest_version is {oldest} and newest_version is {newest}; they must be in ascending order, from 0 "
                f"to the trainer's version, which is {version}."
            )
        return Sample(sibling, ref, oldest, newest)

    def fail(self, lease: Lease, siblings: Iterable[int] | None = None, *, reason: str) -> bool:
        """Give up siblings of a lease; a failure never becomes a sample.

        Args:
            lease: the lease.
            siblings: the siblings that failed; None for all that are not finished.
            reason: what `on_event` and `explain` say of it. `statistics` counts a group that it drops as "failed".

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
