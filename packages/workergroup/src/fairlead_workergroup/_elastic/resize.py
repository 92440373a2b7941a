# SPDX-License-Identifier: Apache-2.0
"""The resize of a group: new members start completely, then all members get the facts of the new epoch."""

import logging
import sys
from collections.abc import Mapping, Sequence

from fairlead_placement import RayVirtualCluster, Slot
from fairlead_placement.spi import head_deadline

from .._calls.sender import Sender
from .._deadline import Deadline, Operation
from .._lifecycle.delivery import deliver, drain, wait_for, wait_until_idle
from .._lifecycle.launcher import Launcher
from .._membership.model import Change, Member, Resize, Snapshot
from .._start.layout import choose_slots, resize_places
from ..exceptions import BrokenEpochError, WorkerGroupError
from .axis import check_sizes, check_tied_groups, find_elastic_axis, resize_mesh

logger = logging.getLogger(__name__)


class Resizer:
    """Change the size of a group along its slowest-varying axis."""

    def __init__(self, sender: Sender, launcher: Launcher) -> None:
        self._sender = sender
        self._launcher = launcher
        self._restarter = sender.restarter
        self._roster = sender.roster
        self._resources = launcher.resources
        # Of the mesh that the group was made with: with size 1, another axis would look as slow.
        self._axis = find_elastic_axis(sender.roster.snapshot().sharding)

    def resize(self, sizes: Mapping[str, int], slots: Sequence[Slot] | None, timeout_s: float | None) -> int:
        """Resize the group; see `RayWorkerGroup.resize`."""
        deadline = Deadline.after(self._launcher.spec.start_timeout_s if timeout_s is None else timeout_s)
        self._check_caller()
        resize = self._check(self._roster.check_alive(), sizes, slots)
        operation = Operation(f"The resize to {resize.axis}={resize.after}", deadline)
        with self._restarter.change(operation), head_deadline(deadline.left()):
            # Again: another thread may have resized the group meanwhile.
            resize = self._check(self._roster.check_alive(), sizes, slots)
            lost = self._restarter.find_lost()
            if resize.before != resize.after:
                self._resize(resize, slots, operation)
            elif lost:
                self._sender.restart()
            return self._roster.snapshot().epoch

    def _check_caller(self) -> None:
        """Refuse a resize from inside a worker of the group, which could not take part in it."""
        facts = getattr(sys.modules.get("_fairlead_worker"), "facts", {})
        if facts.get("tree", "").startswith(f"{self._launcher.spec.token}-"):
            raise WorkerGroupError(
                "A worker cannot resize its own group, because it has to take part in that between two of its calls. "
                "Return the wish to the driver, and call resize there."
            )

    def _check(self, now: Snapshot, sizes: Mapping[str, int], slots: Sequence[Slot] | None) -> Resize:
        """Return the requested resize, or refuse it."""
        axis, size = check_sizes(now.sharding, self._axis, sizes)
        before = now.sharding.get_axis_size(axis)
        each = now.sharding.size // before
        check_tied_groups(now.places, each, each * size)
        if slots is not None and not (isinstance(slots, Sequence) and all(isinstance(slot, Slot) for slot in slots)):
            raise TypeError(f"slots must be a sequence of slots, such as cluster.slots()[4:], got {slots!r}")
        if slots is not None and len(slots) != max(0, each * (size - before)):
            raise ValueError(
                f"a resize from {axis}={before} to {axis}={size} needs {max(0, each * (size - before))} slots, got "
                f"{len(slots)}"
            )
        return Resize(now.epoch + 1, axis, before, size)

    def _resize(self, resize: Resize, slots: Sequence[Slot] | None, operation: Operation) -> None:
        """Resize, with the lock of changes held."""
        launcher, roster, deadline = self._launcher, self._roster, operation.deadline
        before = roster.snapshot()
        sharding = resize_mesh(before.sharding, resize.axis, resize.after)
        size = sharding.size
        again = [rank for rank in before.lost if rank < size]
        if again:
            self._restarter.prepare_lost(again, deadline)
        now = roster.snapshot()
        added = self._claim(now, size - len(now.members), slots)
        # A resize that finds no room does not count as a restart.
        roster.record_relaunch(again, counted=again)
        now = roster.snapshot()
        ranks = [*again, *range(len(now.members), size)]
        is_begun = is_delivered = False
        try:
            places = resize_places(now.places, size, added, prefix=roster.name_prefix)
            plan = launcher.plan(places, sharding, deadline=deadline)
            started = launcher.start_next(plan, ranks, epoch=resize.epoch, deadline=deadline)
            with self._restarter.take_turn(operation):
                staying = [member for member in now.members[:size] if member.rank not in again]
                # A worker that leaves may hang in a call, so half of the time is for the others.
                self._sender.overlapping.wait(Deadline.after((deadline.left() or 0.0) / 2))
                wait_until_idle(operation, staying, concurrent=launcher.spec.concurrent)
                roster.record_resize(resize, sharding, places, started)
                is_begun = True
                try:
                    launcher.begin(plan)
                    self._deliver(ranks, again, deadline)
                    is_delivered = True
                finally:
                    self._end(now.members[size:], deadline)
        except BaseException as error:
            if not is_begun:
                self._undo(now, ranks)
            elif roster.ending and isinstance(error, Exception):  # a shutdown of another thread
                raise roster.ended_error() from error
            elif not is_delivered and not isinstance(error, BrokenEpochError):  # such as KeyboardInterrupt
                facts = roster.snapshot().processes
                roster.mark_broken([one.failure("resize-failed", "the resize was interrupted") for one in facts])
            raise
        logger.info("Resized %r %s.", roster.name_prefix, resize)
        roster.report(Change("resized", -1, f"resized {resize}"))
        self._restarter.note_slots()

    def _claim(self, now: Snapshot, count: int, slots: Sequence[Slot] | None) -> list[Slot]:
        """Claim the slots of new ranks.

        Raises:
            ValueError: there are not enough free slots, or a given slot is one of the group already.
            ResourceInsufficientError: a given slot cannot take a process.
        """
        if count <= 0:
            return []
        tied = len(now.places[0].tied_bundles[1])
        used = {slot.key for slot in (*(place.slot for place in now.places), *self._resources.standby_slots())}
        if slots is not None:
            if taken := [slot for slot in slots if slot.key in used]:
                raise ValueError(
                    f"bundle {taken[0].bundle_index} of logical node {taken[0].node_idx} has a worker of this group "
                    "already; give slots that it does not use"
                )
            if choose_slots(slots, count, tied=tied) != list(slots):
                raise ValueError(f"slots must be in whole tied groups of {tied}, each on one logical node")
            self._resources.claim_slots(slots)
            return list(slots)
        cluster = self._launcher.spec.cluster
        if not isinstance(cluster, RayVirtualCluster):
            raise ValueError(f"this group was made from slots, so give the {count} new ones: resize(..., slots=...)")
        chosen = self._resources.claim_free(cluster.slots(), count, tied=tied)
        if len(chosen) < count:
            raise ValueError(
                f"{count} more workers need {count} free slots{f' in tied groups of {tied}' if tied > 1 else ''}, and "
                f"the cluster has {len(chosen)}. Reserve more with cluster.extend(), or give other slots."
            )
        return chosen

    def _deliver(self, started: Sequence[int], again: list[int], deadline: Deadline) -> None:
        """Send the facts of the new epoch, and run the user's methods.

        Raises:
            BrokenEpochError: a worker failed or was late.
        """
        methods, now = self._restarter.methods, self._roster.snapshot()
        try:
            if again:
                methods.on_restart(again, {}, deadline)
        except Exception as error:
            cause = f"on_restart failed: {error}"
            failures = self._roster.mark_broken([now[rank].process.failure("resize-failed", cause) for rank in again])
            raise BrokenEpochError(failures, epoch=now.epoch) from error
        deliver(self._launcher, deadline, skip=started, send_on_resize=methods.send_on_resize)

    def _end(self, leaving: Sequence[Member], deadline: Deadline) -> None:
        """Let leaving workers finish their calls until the deadline, then end them."""
        members = [member for member in leaving if member.failure is None]
        refs = drain(members, deadline, concurrent=self._launcher.spec.concurrent)
        ranks = [member.rank for member in leaving]
        try:
            _, late = wait_for(refs, deadline, f"Resizing {self._roster.name_prefix}", patient=True)
            if late:
                shown = ", ".join(map(str, late))
                logger.warning("Rank(s) %s were ended before they had finished their calls.", shown)
        finally:  # also after Ctrl-C
            self._resources.discard(ranks)

    def _undo(self, now: Snapshot, ranks: Sequence[int]) -> None:
        """End what has been started for an epoch that did not begin."""
        self._resources.end(ranks)
        self._resources.forget([rank for rank in ranks if rank >= len(now.members)])
        self._resources.drop_next_port()
