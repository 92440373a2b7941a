# SPDX-License-Identifier: Apache-2.0
"""The errors of the ledger, one class per situation. Misuse of arguments is a `ValueError` instead."""

__all__ = ["OldWeightsError", "RolloutError", "SnapshotError"]


class RolloutError(Exception):
    """The base class of the ledger's errors.

    You do not get this for wrong arguments, which are a `ValueError`, or for a late result, which returns False.
    """


class SnapshotError(RolloutError):
    """A snapshot cannot be read or written now. No ledger has been made, and nothing has been released for it.

    Attributes:
        path: the snapshot.
        found: the fault.
        remedy: what to do.

    >>> print(SnapshotError("ckpt/rollouts.ledger", "its step is 7, not 8", "Pass step=7."))
    The snapshot 'ckpt/rollouts.ledger' cannot be used: its step is 7, not 8. Pass step=7.
    """

    def __init__(self, path: str, found: str, remedy: str) -> None:
        super().__init__(path, found, remedy)
        self.path = path
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return f"The snapshot {self.path!r} cannot be used: {self.found}. {self.remedy}"


class OldWeightsError(RolloutError, ValueError):
    """A generator requested a lease, and the trainer is too far past its weights. It may have advanced in the wait.

    Attributes:
        serving_version: the weights of the generator.
        oldest: the oldest weights that a lease may start with.
        version: the weights of the trainer.

    >>> OldWeightsError(3, oldest=4, version=5).oldest
    4
    """

    def __init__(self, serving_version: int, oldest: int, version: int) -> None:
        super().__init__(serving_version, oldest, version)
        self.serving_version = serving_version
        self.oldest = oldest
        self.version = version

    def __str__(self) -> str:
        return (
            f"serving_version is {self.serving_version}, and with the trainer at version {self.version} a generator "
            f"needs version {self.oldest} or later. Load newer weights into it, and lease again."
        )
