# SPDX-License-Identifier: Apache-2.0
"""The replacement of workers: their ranks move to standbys, or to new processes in other slots."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence

from ray.exceptions import RayError

from fairlead_placement.spi import head_deadline

from .._calls.sender import Sender
from .._deadline import NEVER, Deadline, Operation
from .._lifecycle.delivery import wait_until_idle
from .._lifecycle.launcher import Launcher
from .._lifecycle.standbys import Standby, Standbys
from .._membership.model import Change, Member, Snapshot
from ..exceptions import BrokenEpochError, ResizeTimeoutError, WorkerStartError

logger = logging.getLogger(__name__)

# An idle worker answers within this time, also when the notice of the end of its node has passed.
IDLE_S = 2.0


class Replacer:
    """Move ranks of a group to other processes."""

    def __init__(self, sender: Sender, launcher: Launcher, standbys: Standbys) -> None:
        self._launcher = launcher
        self._standbys = standbys
        self._restarter = sender.restarter
        self._roster = sender.roster
        self._resources = launcher.resources

    def evacuate(self, ranks: Sequence[int], notice_s: float | None) -> int:
        """Replace workers whose nodes end after a number of seconds; None if nobody knows when.

        The start of their processes may take `start_timeout_s`, because a rank needs one also after the end of its
        node. Their calls may take half of what is then left of the notice, and `on_handover` has the other half.
        """
        return self.replace(ranks, None, end=Deadline.after(notice_s), partly=True)

    def replace(
        self, ranks: Sequence[int], timeout_s: float | None, *, end: Deadline = NEVER, partly: bool = False
    ) -> int:
        """Replace workers; see `RayWorkerGroup.replace`, and `evacuate` for the end of their nodes.

        With `partly`, the first ranks move if there is not room for all.
        """
        deadline = Deadline.after(self._launcher.spec.start_timeout_s if timeout_s is None else timeout_s)
        wanted = self._check(self._roster.check_alive(), ranks)
        operation = Operation(f"The replacement of rank(s) {', '.join(map(str, wanted))}", deadline)
        with self._restarter.change(operation), head_deadline(deadline.left()):
            now = self._roster.check_alive()
            self._check(now, wanted)
            if now.is_broken:
                raise BrokenEpochError(tuple(now.lost.values()), epoch=now.epoch)
            targets = self._find_targets([now[rank] for rank in wanted], deadline, partly=partly)
            self._move(sorted(targets), targets, operation, end)
            return self._roster.snapshot().epoch

    def _check(self, now: Snapshot, ranks: object) -> list[int]:
        """Return the ranks in ascending order, or refuse them."""
        given = None if isinstance(ranks, str) or not isinstance(ranks, Iterable) else list(ranks)
        if given is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in given):
            raise TypeError(f"replace takes a list of ranks such as [3], got {ranks!r}")
        if not given or len(set(given)) != len(given):
            raise ValueError(f"replace takes at least one rank, and each rank once, got {given}")
        if wrong := [rank for rank in given if not 0 <= rank < len(now.members)]:
            raise IndexError(f"rank {wrong[0]} is out of range: the group has ranks 0 to {len(now.members) - 1}")
        self._standbys.check_alike("replace")
        return sorted(given)

    def _find_targets(self, members: Sequence[Member], deadline: Deadline, *, partly: bool) -> dict[int, Standby]:
        """Return the process that each rank moves to: standbys, then new ones in free slots of the cluster.

        With `partly`, the ranks for which there is no room are left out, unless there is room for none.

        Raises:
            ValueError: there are not enough standbys and free slots.
            WorkerStartError: a new process did not start. Nothing has changed.
        """
        targets = self._standbys.take([member.place for member in members])
        rest = [member for member in members if member.rank not in targets]
        try:
            free = self._resources.claim_free(self._launcher.spec.slots(), len(rest), partly=partly)
            if len(free) < len(rest) and not (partly and (targets or free)):
                raise ValueError(
                    f"{len(members)} rank(s) need as many standbys or free slots, and there are "
                    f"{len(targets) + len(free)} that can be used. Reserve more with cluster.extend(), or create the "
                    "group with standby=."
                )
            self._standbys.check_slots(free)
            try:
                started = self._standbys.start_in(free, deadline)
            except TimeoutError as error:
                raise WorkerStartError(
                    "a process that a rank was to move to had not imported the class's module at the deadline "
                    "(start_timeout_s, or the timeout of the replacement)"
                ) from error
            except RayError as error:
                raise WorkerStartError(f"a process that a rank was to move to did not start: {error}") from error
        except BaseException:
            self._standbys.give_back(targets.values())
            raise
        return targets | {member.rank: one for member, one in zip(rest, started, strict=False)}

    def _move(self, ranks: Sequence[int], targets: Mapping[int, Standby], operation: Operation, end: Deadline) -> None:
        """Let the old workers hand over, and start the new ones in the processes that were found."""
        unused = dict(targets)

        def use() -> Mapping[int, Standby]:
            unused.clear()
            return targets

        before = self._roster.snapshot()
        try:
            with self._restarter.take_turn(operation):
                lost = self._restarter.find_lost()
                living = [before[rank] for rank in ranks if rank not in lost]
                if (left := end.left()) is not None:
                    operation = dataclasses.replace(operation, deadline=Deadline.after(max(IDLE_S, left / 2)))
                try:
                    wait_until_idle(operation, living, concurrent=self._launcher.spec.concurrent)
                except ResizeTimeoutError as error:
                    late = {worker.rank for worker in error.late}
                    logger.warning("Rank(s) %s are replaced without a handover: they are busy.", sorted(late))
                    living = [member for member in living if member.rank not in late]
                values = self._restarter.methods.on_handover([member.rank for member in living])
                self._restarter.replace(ranks, use, values)
        finally:
            if unused:
                self._give_back(list(unused.values()))
        after = self._roster.snapshot()
        for rank in ranks:
            old, new = before[rank].slot, after[rank].slot
            self._roster.report(
                Change(
                    "replaced",
                    rank,
                    f"rank {rank} moved from bundle {old.bundle_index} of logical node {old.node_idx} to bundle "
                    f"{new.bundle_index} of logical node {new.node_idx} in epoch {after.epoch}",
                )
            )
        logger.warning("Replaced rank(s) %s of %r.", ", ".join(map(str, ranks)), self._roster.name_prefix)

    def _give_back(self, unused: Sequence[Standby]) -> None:
        """Keep as many unused processes as the group wants as standbys, and end the others."""
        spare = max(0, self._standbys.count - len(self._standbys.slots))
        self._standbys.give_back(unused[:spare])
        if ended := [standby.number for standby in unused[spare:]]:
            self._resources.discard(ended)
