# SPDX-License-Identifier: Apache-2.0
"""The ledger: every transition of every group, on one thread and without a clock."""

import os
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from ._audit import check_book, explain_group
from ._model import Claim, Event, LedgerConfig, Ref, Shortage, State
from ._rollout_side import RolloutSide
from ._show import Picture, draw_ledger
from ._sources import PromptSource
from ._statistics import Statistics
from ._store.journal import Journal
from ._store.restore import restore_book
from ._store.snapshot import Snapshot, read_snapshot, take_snapshot, write_snapshot
from .exceptions import IllegalTransitionError, SnapshotError

__all__ = ["Ledger"]

# The methods that change a group in each state.
LEGAL: dict[State, tuple[str, ...]] = {
    "unseen": ("offer", "lease"),
    "pending": ("lease", "sweep"),
    "leased": ("seal", "fail", "cancel", "expire"),
    "sealed": ("claim", "drop", "sweep"),
    "claimed": ("advance", "unclaim", "drop", "commit"),
    "trained": ("commit",),
    "applied": (),
    "dropped": (),
}


class Ledger(RolloutSide):
    """Record who generates every prompt, with which weights, and which step trained on it.

    It has no clock and no thread, and every method is deterministic in its arguments. Methods that refuse a call change
    nothing. Call it from one thread.

    Args:
        config: the rules.
        source: where prompts come from, or a sequence of them; None if the caller offers prompts.
        journal: where durable samples are kept between checkpoints; None for nowhere.
        checkpoints: whether trained groups wait for `commit`. Without, they are applied when they are trained.
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
    'trained'
    """

    def __init__(
        self,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any] | None = None,
        *,
        journal: Journal | None = None,
        checkpoints: bool = True,
        run: int | None = None,
        on_release: Callable[[Ref, str], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> None:
        super().__init__(config, source, run, on_release, on_event)
        self._checkpoints, self._prepared = checkpoints, set[int]()
        self._id = uuid.UUID(int=random.SystemRandom().getrandbits(128)).hex
        self._runs: tuple[int, ...] = (self._leases.run,)
        if journal is not None:
            journal.load(self._id, self._runs)
            self._use(journal)

    def _use(self, journal: Journal | None) -> None:
        """Store what the ledger holds in a journal, and from now on every change."""
        step = self._book.last_trained or 0
        if journal is not None:
            journal.reset(self._id, self._runs, self._book.records.values(), step)
            if journal.keep_steps:
                journal.keep(self._take_snapshot(step))
        self._book.journal = journal

    # The trainer side.

    def advance(self, version: int, *, trained: int | None = None) -> None:
        """Report the trainer's version, and the last step that it has trained.

        Args:
            version: the number of updates of the weights so far; it never falls.
            trained: the claims up to this step are trained. References that are not durable are released.
        """
        book = self._book
        if version < book.version:
            raise ValueError(f"version is {version}, below {book.version}. Versions never fall; use restore().")
        book.version, book.changed = version, True
        book.consumed = {one: count for one, count in book.consumed.items() if one >= version}
        if trained is not None:
            self._train(trained)
        book.run_callbacks()

    def _train(self, step: int) -> None:
        book = self._book
        for one in sorted(one for one in book.claims if one <= step):
            for record in map(book.records.__getitem__, book.claims[one]):
                if record.state == "claimed":
                    book.train(record)
        book.last_trained = step if book.last_trained is None else max(step, book.last_trained)
        if not self._checkpoints:
            book.apply(step)
        journal = book.journal
        if journal is not None and journal.keep_steps and journal.kept_step != book.last_trained:
            journal.keep(self._take_snapshot(book.last_trained))

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
            raise ValueError(f"step is {step}; steps {sorted(self._book.claims)} are claimed.")
        for ordinal in self._book.claims[step]:
            if self.state(ordinal) == "trained":
                raise IllegalTransitionError(ordinal, "trained", "unclaim", LEGAL["trained"])
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
        found = self._claims.sweep(self._claims.next_place()[0])
        self._book.run_callbacks()
        return found

    # Checkpoints.

    def prepare(self, step: int, directory: str | os.PathLike[str]) -> Path:
        """Write a snapshot into the directory of the trainer's checkpoint, before the checkpoint is complete.

        The snapshot counts the claims of steps up to `step` as applied, and everything else as open.

        Args:
            step: the last step that the checkpoint contains.
            directory: of the checkpoint. It must exist.

        Returns:
            The file, which has been synced.
        """
        book = self._book
        if book.last_applied is not None and step < book.last_applied:
            raise ValueError(f"step is {step}, and step {book.last_applied} has been committed. Prepare a later step.")
        if not Path(directory).is_dir():
            raise ValueError(f"directory is {str(directory)!r}, which is no directory. Make the checkpoint's first.")
        self.flush()
        path = write_snapshot(Path(directory), self._take_snapshot(step))
        self._prepared.add(step)
        return path

    def _take_snapshot(self, step: int) -> Snapshot:
        source = b"" if self._source is None else self._source.state()
        return take_snapshot(self._book, self._id, self._runs, step, source)

    def commit(self, step: int) -> None:
        """Report that the checkpoint of a prepared step is durable: its groups are applied for good.

        It does nothing if a later step has been committed, as when checkpoints are completed out of order.
        """
        applied = self._book.last_applied
        if applied is not None and step <= applied:
            return
        if step not in self._prepared:
            raise ValueError(f"step is {step}, and steps {sorted(self._prepared)} are prepared. Call prepare() first.")
        self._train(step)
        self._book.apply(step)
        self._prepared = {one for one in self._prepared if one > step}
        self._book.run_callbacks()

    def flush(self) -> None:
        """Write the buffered rows of the journal. Samples that a crash takes are generated again.

        Call it every second, unless an `AsyncLedger` does.
        """
        self._book.flush()
        self._book.run_callbacks()

    @classmethod
    def restore(
        cls,
        config: LedgerConfig,
        source: PromptSource | Sequence[Any] | None = None,
        *,
        step: int,
        version: int,
        directory: str | os.PathLike[str] | None = None,
        journal: Journal | None = None,
        exists: Callable[[Ref], bool] | None = None,
        checkpoints: bool = True,
        run: int | None = None,
        on_release: Callable[[Ref, str], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> Self:
        """Return a ledger that continues after a checkpoint.

        Applied and dropped groups stay so. Every other group is open again. A durable sample is kept if its weights
        exist in the checkpoint: versions after `version` are lost, and their numbers will mean other weights.

        Args:
            config: the rules; `group_size` must be as before.
            source: the same source as before. Its state is restored.
            step: the last step that the checkpoint contains.
            version: the version of its weights.
            directory: of the checkpoint; None for the snapshot of `step` in the journal, which was made with
                `keep_steps`.
            journal: the journal of the process that ended, or a new one.
            exists: tells whether a durable payload can still be read. Without a journal it is needed if payloads are
                deleted when they are released, because the snapshot may list some of them.
            checkpoints, run, on_release, on_event: as for a new ledger.

        Raises:
            SnapshotError: The snapshot is missing or damaged, or it is of another step or group size.
        """
        if directory is not None:
            path, snapshot = str(directory), read_snapshot(Path(directory))
        elif journal is not None:
            path, snapshot = str(journal.path), journal.read_step(step)
        else:
            raise ValueError("restore() needs the directory of the checkpoint, or a journal that has kept its step.")
        for name, found, wanted in (
            ("step", snapshot.step, step),
            ("group_size", snapshot.group_size, config.group_size),
        ):
            if found != wanted:
                remedy = f"Pass {name}={found}, or the directory of another checkpoint."
                raise SnapshotError(path, f"its {name} is {found}, not {wanted}", remedy)
        ledger = cls(config, source, checkpoints=checkpoints, run=run, on_release=on_release, on_event=on_event)
        ledger._id, ledger._runs = snapshot.ledger, (*snapshot.runs, *ledger._runs)
        ledger._salvage = restore_book(ledger._book, snapshot, journal, version=version, exists=exists)
        if ledger._source is not None:
            ledger._source.restore(snapshot.source, snapshot.next)
            ledger._pull(ledger._salvage.last + 1 - snapshot.next)
        ledger._use(journal)
        ledger._book.run_callbacks()
        return ledger

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
        """Return the state of the ledger in numbers. Another thread may call it, such as an exporter of metrics."""
        book = self._book
        # A list, because a dictionary that changes in the thread of the ledger cannot be iterated.
        oldest = min([record.oldest for record in list(book.records.values())], default=book.version)
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

    def show(self) -> None:
        """Print the groups in each state, the staleness of claims and the three oldest groups.

        It uses rich if rich is installed.
        """
        self._draw().print()

    def __rich__(self) -> Picture:
        return self._draw()

    def _draw(self) -> Picture:
        return draw_ledger(self._book, self.statistics(), self._claims.next_place()[0])

    def check(self) -> None:
        """Raise an `InvariantError` if the records contradict each other."""
        check_book(self._book, self._leases.run)
