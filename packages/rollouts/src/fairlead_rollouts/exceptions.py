# SPDX-License-Identifier: Apache-2.0
"""The errors of the ledger, one class per situation. Misuse of arguments is a `ValueError` instead."""

__all__ = ["IllegalTransitionError", "InvariantError", "RolloutError"]


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
