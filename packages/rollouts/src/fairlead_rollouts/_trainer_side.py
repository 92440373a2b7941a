# SPDX-License-Identifier: Apache-2.0
"""The part of a ledger that a trainer uses: versions, the claims of steps, and groups that have become too old."""

from collections.abc import Iterable

from ._admission import find_blockers
from ._callbacks import changes
from ._model import Claim, Shortage, State
from ._policies import View
from ._record import StepClaim
from ._rollout_side import RolloutSide

__all__ = ["TrainerSide"]


class TrainerSide(RolloutSide):
    """The methods of a ledger for the trainer."""

    _checkpoints: bool

    def state(self, prompt_id: int) -> State:
        """Return the state of a group."""
        if prompt_id < 0:
            raise ValueError(f"prompt_id is {prompt_id}; it must be at least 0.")
        record = self._book.records.get(prompt_id)
        if record is not None:
            return record.state
        if prompt_id >= self._book.next:
            return "unseen"
        return "dropped" if self._book.settled.is_dropped(prompt_id) else "applied"

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
        book.consumed = {number: places for number, places in book.consumed.items() if number >= version}
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
            left = config.groups_per_version - book.consumed.get(version, 0)
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
        waiting = [*book.by_state["leased"].values(), *book.list_held()]
        finished = book.by_state["finished"].values()
        view = View(version, config.max_staleness, tuple([record.as_open() for record in [*finished, *waiting]]))
        chosen = config.policy.select(view, count - had)
        have = had + len(chosen)
        if have < least:
            open_groups = had + len(finished) + len(book.by_state["leased"]) + len(book.by_state["pending"])
            return Shortage("exhausted" if self._exhausted and open_groups < least else "not_enough", have, least)
        if config.on_stale == "wait" and places:
            blocked_by = find_blockers(view, chosen, left - places, config.groups_per_version)
            if blocked_by:
                book.counters.waits += 1
                book.counters.blocked_by = blocked_by
                return Shortage("wait", have, least, blocked_by)
        self._take(step, claim, chosen, places)
        return self._as_claim(step, claim)

    def _take(self, step: int, claim: StepClaim, prompt_ids: tuple[int, ...], places: int) -> None:
        book = self._book
        for prompt_id in prompt_ids:
            record = book.records[prompt_id]
            record.step, record.version = step, claim.version
            book.move(record, "claimed")
            book.counters.staleness[claim.version - record.oldest] += 1
        claim.prompt_ids.extend(prompt_ids)
        claim.places += places
        claim.unfilled = max(0, claim.unfilled - len(prompt_ids))
        book.consume(claim.version, places)
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
            book.return_to_pending(record, "stale")
        return len(stale)
