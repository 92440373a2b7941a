# SPDX-License-Identifier: Apache-2.0
"""The errors of this package, one class for each situation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class VenvError(Exception):
    """Base of the errors that this package raises while it resolves or builds.

    Misuse that can be detected before that is a ValueError or a TypeError.

    Attributes:
        node: the node where it happened; None on this machine.
    """

    node: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, name) for name in getattr(self, "__dataclass_fields__", ()))
        return type(self), values or self.args, vars(self)

    def _on_node(self) -> str:
        return "" if self.node is None else f" on node {self.node}"


@dataclass(eq=False, repr=False)
class VenvBuildError(VenvError):
    """An environment could not be built, or an interpreter does not run. Nothing incomplete is left in its place.

    Attributes:
        reason: one sentence, with the remedy if it is known.
        command: the command that failed; empty if no command failed.
        output: the last lines that it printed. Credentials are redacted, as in `command`.
    """

    reason: str
    command: str = ""
    output: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"The environment is not ready{self._on_node()}: {self.reason}"]
        lines += [f"  $ {self.command}"] if self.command else []
        return "\n".join(lines + [f"  {line}" for line in self.output])


@dataclass(eq=False, repr=False)
class VenvTimeoutError(VenvError, TimeoutError):
    """The deadline passed, and the build was stopped. A new call starts again and uses uv's cache.

    Attributes:
        doing: the step that was not finished.
        timeout_s: the time limit that was given, in seconds.
    """

    doing: str
    timeout_s: float

    def __str__(self) -> str:
        return (
            f"Not done within {self.timeout_s:g} s{self._on_node()}: {self.doing}. The first installation of large "
            "packages takes long: give more time (timeout_s), or check the network of the node."
        )


class UvUnavailableError(VenvBuildError):
    """uv is missing or too old. `reason` says what was missing, or what was found instead."""

    def __str__(self) -> str:
        return (
            f"uv is needed to build environments{self._on_node()}: {self.reason}. Install it next to Ray on every node "
            "(`pip install uv`), or give the path of a program (FAIRLEAD_VENV_UV)."
        )


@dataclass(eq=False, repr=False)
class VenvMismatchError(VenvError):
    """An environment has another version of Ray or Python, or another platform, than a worker of this cluster needs.

    Attributes:
        component: "ray", "python" or "platform".
        actual: the version that the environment has; "none" if it has none.
        required: the version that the cluster has.
        where: a description of the environment.
    """

    component: str
    actual: str
    required: str
    where: str

    def __str__(self) -> str:
        remedy = {
            "ray": f"Ask for 'ray=={self.required}' in its requirements, or in the dependencies of its project and "
            "lock it again (`uv add`)",
            "python": f"Give python={self.required!r}",
        }.get(self.component, "Choose nodes of one platform (nodes=...), and run a driver on each platform")
        return (
            f"{self.where}{self._on_node()} has {self.component} {self.actual}, but a worker of this cluster needs "
            f"{self.component} {self.required}. {remedy}."
        )


class VenvNodesError(ExceptionGroup[VenvError], VenvError):
    """Environments are not ready on some nodes. It has the error of each; the other nodes are ready.

    `except VenvError` catches the group, and `except*` its members.
    """

    def derive(self, excs: Sequence[VenvError], /) -> "VenvNodesError":  # type: ignore[override]
        """Return a group of some of the errors, for `split` and `except*`."""
        return VenvNodesError(self.message, excs)
