# SPDX-License-Identifier: Apache-2.0
"""The errors of runs on slices, one class per situation, besides those of a user's function and of placement."""

from dataclasses import dataclass

from fairlead_placement import extension


class TpuExecutorError(extension.ErrorWithFields, RuntimeError):
    """Base of all errors that this package raises after its first request to Ray.

    Misuse that is found without Ray is a ValueError or a TypeError instead.
    """


@dataclass(eq=False, repr=False)
class InsufficientSlicesError(TpuExecutorError):
    """Too few whole slices were free within the scale timeout; nothing stays reserved.

    Attributes:
        kind: the requested type, such as "v4-16".
        requested: the allowed numbers of slices.
        available: how many slices were available.
        missing: why each of the other slices was not available, by name.
        waited_s: how long the pool waited, in seconds.
    """

    kind: str
    requested: tuple[int, ...]
    available: int
    missing: dict[str, str]
    waited_s: float

    def __str__(self) -> str:
        sizes = " or ".join(map(str, self.requested))
        lacks = "".join(f"\n  {name}: {lack}" for name, lack in self.missing.items()) or "\n  there are no others"
        return (
            f"{sizes} whole slice(s) of {self.kind} were requested, and {self.available} were free after "
            f"{self.waited_s:.1f} s. The others:{lacks}\nFree or add slices, allow smaller numbers "
            "(pod_count=[1, 2]), or wait longer (scale_timeout_s; replace_timeout_s for the replacement of a lost one)."
        )


@dataclass(eq=False, repr=False)
class JaxUnavailableError(TpuExecutorError):
    """`initialize_jax` was called outside of a run, or jax is not installed there: the `reason` says which."""

    reason: str


@dataclass(eq=False, repr=False)
class SliceLostError(TpuExecutorError):
    """Hosts of `slices` were lost, or could not start their accelerators, with the errors of the hosts as the `reason`.

    You get this as the `error` of a `JobPreempted`.
    """

    slices: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"Slice(s) {', '.join(self.slices)} were lost: {self.reason}. Run again on replacements."


@dataclass(eq=False, repr=False)
class PreemptionLimitError(TpuExecutorError):
    """Slices were lost more often (`preemptions`) than `max_retries_preemption` allows (`limit`).

    `name` is the function, and `last` describes the last loss.
    """

    name: str
    preemptions: int
    limit: int
    last: str

    def __str__(self) -> str:
        return (
            f"{self.name} was preempted {self.preemptions} time(s), {self.limit} were allowed. The last time: "
            f"{self.last} Allow more (max_retries_preemption), or use slices that are not preemptible."
        )


@dataclass(eq=False, repr=False)
class OpenInstancesError(TpuExecutorError):
    """Instances of a class under `device_remote` were to be made while others of them, of this `name`, are open."""

    name: str

    def __str__(self) -> str:
        return (
            f"Instances of {self.name} are open, and use its slices. Close them first, by close() of the instances or "
            "of the class. To have more instances at a time, decorate the class again, which reserves other slices."
        )
