# SPDX-License-Identifier: Apache-2.0
"""Faults in the middle of a transfer, made on purpose: for tests of code that has to live with them.

`fairlead_workergroup.testing.resume(group, rank)` continues a worker that has been stopped.
"""

from typing import Literal, get_args

import ray

from fairlead_workergroup import RayWorkerGroup
from fairlead_workergroup.spi import collect, read_members, send_function

from ._remote.faults import plan_fault
from .exceptions import TransferError

__all__ = ["fail_at"]

Side = Literal["source", "target"]
Phase = Literal["collect", "stage", "feed", "move", "verify", "commit", "committing"]
PHASES: dict[str, tuple[Phase, ...]] = {
    "source": ("collect", "stage", "feed"),
    "target": ("collect", "move", "verify", "commit", "committing"),
}


def fail_at(
    group: RayWorkerGroup,
    rank: int,
    side: Side,
    phase: Phase,
    how: Literal["kill", "stop"] = "kill",
    *,
    timeout_s: float = 30.0,
) -> None:
    """Have a worker be killed or stopped when its next transfer reaches a phase.

    Args:
        group: the worker's.
        rank: its number in the group.
        side: whether it counts as a source or a target: it may be both.
        phase: of a source, "collect" or "stage", and with `max_bytes_in_flight` "feed", which is when targets have read
            its first bucket; of a target, "collect", "move", "verify", "commit" or "committing", which is after the
            first tensor has been overwritten. "verify" is reached only when digests are compared.
        how: "kill" (SIGKILL) or "stop" (SIGSTOP).
        timeout_s: seconds to wait until the worker has finished what it is doing.

    Raises:
        ValueError: there is no such rank, side or phase.
        TransferError: the worker is dead, or did not reply in time.
        WorkerGroupError: the group has been shut down.
    """
    if side not in get_args(Side) or phase not in PHASES[side]:
        raise ValueError(f"a {side} has the phases {', '.join(PHASES.get(side, ()))}, not {phase!r}")
    if how not in ("kill", "stop"):
        raise ValueError(f"how must be 'kill' or 'stop', got {how!r}")
    members = read_members(group).members
    if not 0 <= rank < len(members):
        raise ValueError(f"rank {rank} does not exist: the group has ranks 0 to {len(members) - 1}")
    pickled = ray.cloudpickle.dumps(plan_fault)
    ref = send_function(members[rank], "fairlead_transfer fail_at", pickled, side, phase, how)
    reply = collect(group, {rank: (members[rank].process, ref)}, timeout_s)[rank]
    if not reply.is_good:
        text = f"The fault was not planned: {reply.failure or reply.late or reply.error}"
        raise TransferError("collect", 0, (), {}, text)
