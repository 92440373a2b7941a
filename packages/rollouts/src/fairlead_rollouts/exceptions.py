# SPDX-License-Identifier: Apache-2.0
"""The errors of the ledger, one class per situation. Misuse of arguments is a `ValueError` instead."""

__all__ = [
    "IllegalTransitionError",
    "InvariantError",
    "JournalError",
    "JournalLockedError",
    "OldWeightsError",
    "RolloutError",
    "SnapshotError",
]


class RolloutError(Exception):
    """The base class of the ledger's errors.

    You do not get this for wrong arguments, which are a `ValueError`, or for a late result, which returns False.
    """


class IllegalTransitionError(RolloutError):
    """A method was called for a group whose state does not allow it. The ledger is unchanged.

    Attributes:
        ordinal: the group.
        state: its state.
        method: the method that was called.
        legal: the methods that change a group in this state.

    >>> print(IllegalTransitionError(5, "pending", "drop", ("lease", "sweep")))
    Ordinal 5 is 'pending', so drop() does not apply to it. In this state these methods do: lease(), sweep().
    """

    def __init__(self, ordinal: int, state: str, method: str, legal: tuple[str, ...]) -> None:
        super().__init__(ordinal, state, method, legal)
        self.ordinal = ordinal
        self.state = state
        self.method = method
        self.legal = legal

    def __str__(self) -> str:
        calls = ", ".join(f"{name}()" for name in self.legal)
        others = f"In this state these methods do: {calls}." if calls else "This state is final."
        return f"Ordinal {self.ordinal} is {self.state!r}, so {self.method}() does not apply to it. {others}"


class InvariantError(RolloutError):
    """The records of a ledger contradict each other, which is a defect of this package.

    Attributes:
        invariant: the rule that does not hold, such as "I1".
        found: the contradiction.
        ordinals: the groups that break the rule.

    >>> print(InvariantError("I1", "open and settled", (3, 4)))
    Invariant I1 does not hold: open and settled (ordinals 3, 4). This is a defect of fairlead-rollouts: report it.
    """

    def __init__(self, invariant: str, found: str, ordinals: tuple[int, ...]) -> None:
        super().__init__(invariant, found, ordinals)
        self.invariant = invariant
        self.found = found
        self.ordinals = ordinals

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ordinals[:8])) + (", ..." if len(self.ordinals) > 8 else "")
        which = f" (ordinals {shown})" if self.ordinals else ""
        return (
            f"Invariant {self.invariant} does not hold: {self.found}{which}. "
            "This is a defect of fairlead-rollouts: report it."
        )


class _FileError(RolloutError):
    """The base of errors about a file, which say what was found and what to do."""

    def __init__(self, path: str, found: str, remedy: str) -> None:
        super().__init__(path, found, remedy)
        self.path = path
        self.found = found
        self.remedy = remedy


class SnapshotError(_FileError):
    """A snapshot cannot be restored. No ledger has been made, and nothing has been released.

    Attributes:
        path: the snapshot.
        found: why it cannot be restored.
        remedy: what to do.

    >>> print(SnapshotError("ckpt/rollouts.ledger", "its step is 7, not 8", "Pass step=7."))
    The snapshot 'ckpt/rollouts.ledger' cannot be restored: its step is 7, not 8. Pass step=7.
    """

    def __str__(self) -> str:
        return f"The snapshot {self.path!r} cannot be restored: {self.found}. {self.remedy}"


class JournalError(_FileError):
    """A journal cannot be opened or written now. Rows that are not written stay in memory until the next attempt.

    Attributes:
        path: the journal.
        found: what was tried, and what SQLite says.
        remedy: what to do.

    >>> print(JournalError("/local/journal", "opened: unable to open database file", "Make its folder."))
    The journal '/local/journal' cannot be opened: unable to open database file. Make its folder.
    """

    def __str__(self) -> str:
        return f"The journal {self.path!r} cannot be {self.found}. {self.remedy}"


class JournalLockedError(RolloutError):
    """Another process uses the journal.

    Attributes:
        path: the journal.
        holder: the process that opened it last.

    >>> print(JournalLockedError("/local/journal", "process 7 on node-3"))
    The journal '/local/journal' is in use by process 7 on node-3. Stop that process, or use another path.
    """

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(path, holder)
        self.path = path
        self.holder = holder

    def __str__(self) -> str:
        return f"The journal {self.path!r} is in use by {self.holder}. Stop that process, or use another path."


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
