# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while an environment is made, one class per situation."""

from collections.abc import Sequence

__all__ = [
    "UvUnavailableError",
    "VenvBuildError",
    "VenvError",
    "VenvMismatchError",
    "VenvNodesError",
    "VenvTimeoutError",
]


class VenvError(Exception):
    """Base of everything this package raises once it has begun to look, ask or build.

    Misuse that can be seen without that is a ValueError or a TypeError instead.
    """


def _where(node: str | None) -> str:
    return "" if node is None else f" on node {node}"


class VenvBuildError(VenvError):
    """An environment, or the wheel of a project, could not be built, or an interpreter does not run.

    Nothing half-built is left in its place.

    Attributes:
        reason: one sentence, with what to do if that is known.
        command: the command that failed, as it was run; empty if none did.
        output: the last lines of what it printed. Credentials are blotted out, here as in `command`.
        node: where; None on this machine, without a cluster.
    """

    def __init__(self, reason: str, command: str = "", output: Sequence[str] = (), node: str | None = None) -> None:
        super().__init__(reason, command, tuple(output), node)
        self.reason = reason
        self.command = command
        self.output: tuple[str, ...] = tuple(output)
        self.node = node

    def __str__(self) -> str:
        lines = [f"The environment is not ready{_where(self.node)}: {self.reason}"]
        if self.command:
            lines.append(f"  $ {self.command}")
        lines += [f"  {line}" for line in self.output]
        return "\n".join(lines)


class VenvTimeoutError(VenvError, TimeoutError):
    """The deadline passed. What was under way has been ended; asking again starts afresh, from what uv has cached.

    Attributes:
        doing: what was under way, or waited for.
        timeout_s: the deadline that was given, in seconds.
        node: where; None on this machine, without a cluster.
    """

    def __init__(self, doing: str, timeout_s: float, node: str | None = None) -> None:
        super().__init__(doing, timeout_s, node)
        self.doing = doing
        self.timeout_s = timeout_s
        self.node = node

    def __str__(self) -> str:
        return (
            f"Not done within {self.timeout_s:g} s{_where(self.node)}: {self.doing}. "
            "Large packages take long the first time: give more time (timeout_s), or look at the node's network."
        )


class UvUnavailableError(VenvError):
    """uv is not there, or too old.

    Attributes:
        reason: what was looked for, and what was found.
        node: where; None on this machine, without a cluster.
    """

    def __init__(self, reason: str, node: str | None = None) -> None:
        super().__init__(reason, node)
        self.reason = reason
        self.node = node

    def __str__(self) -> str:
        return (
            f"uv is needed to build environments{_where(self.node)}: {self.reason}. Install it next to Ray on every "
            "node (`pip install uv`), or name a program (FAIRLEAD_VENV_UV)."
        )


class VenvMismatchError(VenvError):
    """Something is there in another version or kind than a worker of this cluster needs.

    Attributes:
        what: "ray", "python" or "platform".
        found: what there is; "none" if there is none.
        wanted: what the cluster has.
        where: the environment.
        node: where; None on this machine, without a cluster.
    """

    def __init__(self, what: str, found: str, wanted: str, where: str, node: str | None = None) -> None:
        super().__init__(what, found, wanted, where, node)
        self.what = what
        self.found = found
        self.wanted = wanted
        self.where = where
        self.node = node

    def __str__(self) -> str:
        remedy = {
            "ray": f"Ask for 'ray=={self.wanted}' in its requirements, or in the dependencies of its project and lock "
            "it again (`uv add`)",
            "python": f"Ask for python={self.wanted!r}",
            "platform": "Choose nodes of one platform (nodes=...), and ask once for each platform from a driver there",
        }.get(self.what, "Make them equal")
        return (
            f"{self.where}{_where(self.node)} has {self.what} {self.found}, but a worker of this cluster needs "
            f"{self.what} {self.wanted}. {remedy}."
        )


class VenvNodesError(ExceptionGroup[VenvError], VenvError):
    """Nodes on which it went wrong, each with its error (`exceptions`); on the others the environment is ready.

    `except VenvError` catches it, and `except*` reaches what is in it.
    """

    def derive(self, excs: Sequence[VenvError], /) -> "VenvNodesError":  # type: ignore[override]
        """A group of some of the errors, as `split` and `except*` make it."""
        return VenvNodesError(self.message, excs)
