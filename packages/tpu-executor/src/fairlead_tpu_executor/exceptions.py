# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with runs on slices, one class per situation.

A user's own exception is not among them: it is raised as itself.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._accelerators.slices import SliceLack

__all__ = [
    "HeadUnreachableError",
    "InsufficientSlicesError",
    "JaxUnavailableError",
    "PoolBusyError",
    "PreemptedTooOftenError",
    "SliceLostError",
    "TpuExecutorError",
]


class TpuExecutorError(RuntimeError):
    """Base of everything this package raises once Ray has been asked for something.

    Misuse that can be seen without asking Ray is a ValueError or a TypeError instead.
    """


class InsufficientSlicesError(TpuExecutorError):
    """Too few whole slices were free within the scale timeout; nothing stays reserved.

    Attributes:
        kind: what was asked for, such as "v4-16".
        wanted: the allowed numbers of slices.
        found: how many could have been had.
        missing: what each of the others lacks.
        waited_s: for how long they were waited for, in seconds.
    """

    def __init__(
        self, kind: str, wanted: tuple[int, ...], found: int, missing: tuple["SliceLack", ...], waited_s: float
    ) -> None:
        super().__init__(kind, wanted, found, missing, waited_s)
        self.kind = kind
        self.wanted = wanted
        self.found = found
        self.missing = missing
        self.waited_s = waited_s

    def __str__(self) -> str:
        sizes = " or ".join(map(str, self.wanted))
        lacks = "".join(f"\n  {lack}" for lack in self.missing) or "\n  none other was seen"
        return (
            f"{sizes} whole slice(s) of {self.kind} were asked for, and {self.found} were free after "
            f"{self.waited_s:.1f} s. The others:{lacks}\nFree or add slices, allow smaller numbers "
            "(pod_count=[1, 2]), or wait longer (scale_timeout_s; replace_timeout_s for the replacement of a lost one)."
        )


class HeadUnreachableError(TpuExecutorError):
    """Ray's head (its GCS) has not answered for `head_timeout_s`.

    No host is taken to be lost because of that, and no budget is used. What the pool holds may still be held.

    Attributes:
        silent_s: for how long the head has not answered, in seconds.
    """

    def __init__(self, silent_s: float) -> None:
        super().__init__(silent_s)
        self.silent_s = silent_s

    def __str__(self) -> str:
        return (
            f"Ray's head (GCS) has not answered for {self.silent_s:.1f} s, so it is unknown which hosts are alive. "
            "Slices may still be reserved and functions may still run on them. Look at the head node and its "
            "gcs_server.out. Ray ends this process when it is without its head for "
            "RAY_gcs_rpc_server_reconnect_timeout_s (60 s). If the head comes back by then, close the pool and run "
            "again; to bridge longer outages raise head_timeout_s and that setting."
        )


class JaxUnavailableError(TpuExecutorError):
    """`initialize_jax` was called outside of a run, or jax is not installed where it was called.

    Attributes:
        reason: which of the two, and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class SliceLostError(TpuExecutorError):
    """Hosts of a slice were lost, or could not start their accelerators, while something ran on it.

    You get this as the `error` of a `JobPreempted`. A resumable run does not raise it: it is repeated as long as its
    budget lasts.

    Attributes:
        slices: names of the slices that were lost.
        reason: what is known, one line per host.
    """

    def __init__(self, slices: tuple[str, ...], reason: str) -> None:
        super().__init__(slices, reason)
        self.slices = slices
        self.reason = reason

    def __str__(self) -> str:
        return f"slice(s) {', '.join(self.slices)} were lost: {self.reason}. Run again to have them replaced."


class PreemptedTooOftenError(TpuExecutorError):
    """Slices were lost more often than `max_retries_preemption` allows.

    Attributes:
        name: of the function.
        preemptions: how often slices were lost.
        limit: how often it was allowed to be repeated after a loss.
        last: what happened the last time.
    """

    def __init__(self, name: str, preemptions: int, limit: int, last: str) -> None:
        super().__init__(name, preemptions, limit, last)
        self.name = name
        self.preemptions = preemptions
        self.limit = limit
        self.last = last

    def __str__(self) -> str:
        return (
            f"{self.name} was preempted {self.preemptions} time(s), {self.limit} were allowed. The last time: "
            f"{self.last} Allow more (max_retries_preemption), or use slices that are not preempted."
        )


class PoolBusyError(TpuExecutorError):
    """Something runs in the pool, and the time to queue for it is over.

    You do not get this with the default `queue_timeout_s=None`, which waits for as long as the run before takes.

    Attributes:
        running: what runs there.
        waited_s: for how long it was waited for, in seconds.
    """

    def __init__(self, running: str, waited_s: float) -> None:
        super().__init__(running, waited_s)
        self.running = running
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"{self.running} runs in this pool, waited {self.waited_s:.1f} s for it. Wait for its end, use a pool of "
            "your own, or queue longer (queue_timeout_s)."
        )
