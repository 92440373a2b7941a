# SPDX-License-Identifier: Apache-2.0
"""A ledger that follows the buffer of a framework, which submits prompts itself and lists their groups by key."""

from collections.abc import Collection, Mapping
from typing import Any

from ._ledger import Ledger
from ._model import Claim, Completeness, Event, Lease, LedgerConfig, Ref

__all__ = ["MirrorLedger"]


class MirrorLedger(Ledger):
    """Record the groups of another buffer. Each group is one sample, and its reference is its key.

    Args:
        groups_per_version: groups that are trained between two updates of the weights.
        bound: the bound K in versions, or None.
        options: further options of `LedgerConfig`.
    """

    def __init__(self, groups_per_version: int, bound: int | None, **options: Any) -> None:
        once = Completeness(max_attempts=1)
        given = {"groups_per_version": groups_per_version, "max_staleness": bound, "completeness": once, **options}
        super().__init__(LedgerConfig(group_size=1, **given), checkpoints=False, on_event=self._note)
        self.ordinals: dict[str, int] = {}  # of the open groups
        self.closed: dict[str, str] = {}  # the reason for each group that is closed here, and still listed there
        self._given: dict[str, Lease] = {}
        self._keys: dict[int, str] = {}
        self._step = 0

    def _note(self, event: Event) -> None:
        key, final = self._keys.get(event.ordinal), event.after in ("applied", "dropped")
        if key is not None and (final or event.reason == "stale"):
            self.closed.setdefault(key, event.reason or "applied")
        if key is not None and final:
            del self._keys[event.ordinal], self.ordinals[key]

    def follow(self, version: int) -> None:
        """Report the version of the trainer. Earlier batches are trained."""
        if version > self.version:
            self.advance(version, trained=self._step or None)

    def update(self, listed: Mapping[str, int], finished: Collection[str], failed: Collection[str]) -> None:
        """Bring the ledger up to date.

        Args:
            listed: the version of the weights at which each group started.
            finished: the groups that are finished.
            failed: the groups that failed. A group that is not listed any more has failed too.
        """
        self.closed = {key: reason for key, reason in self.closed.items() if key in listed}
        known = self.ordinals | self.closed
        for key in sorted((one for one in listed if one not in known), key=listed.__getitem__):
            self.follow(listed[key])
            (ordinal,) = self.offer([key])
            self.ordinals[key], self._keys[ordinal] = ordinal, key
            self._lease_listed()
        self._lease_listed()
        for key, lease in list(self._given.items()):
            if key in finished and key not in self.closed:
                self.seal(lease, 0, Ref(key), oldest_version=listed[key])
            elif key in failed or key not in listed or key in self.closed:
                self.fail(lease, reason="failed")
            else:
                continue
            del self._given[key]
        self.drop([self.ordinals[key] for key in self.find_sealed() if key not in listed], "failed")

    def _lease_listed(self) -> None:
        """Lease the groups in generation. Without room they wait, although the framework generates them."""
        for lease in self.lease(max(1, len(self.ordinals))):
            self._given[lease.prompt] = lease

    def find_sealed(self) -> set[str]:
        """Return the finished groups that no batch has claimed."""
        return {record.prompt for record in self._book.by_state["sealed"].values()}

    def find_stale(self) -> set[str]:
        """Return the groups that became too old for the next batch, and are still listed."""
        self.sweep()
        return {key for key, reason in self.closed.items() if reason == "stale"}

    def take(self, count: int, minimum: int | None = None) -> list[str] | None:
        """Claim the next batch, and return its groups in order; None if it has to wait."""
        claim = self.claim(self._step + 1, count, minimum=minimum)
        if not isinstance(claim, Claim):
            return None
        self._step = claim.step
        return [sample.ref.value for group in claim.groups for sample in group.samples]

    def give_back(self) -> None:
        """Return the groups of the last batch, which the framework did not get."""
        self.unclaim(self._step)
        self._step -= 1
