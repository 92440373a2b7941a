# SPDX-License-Identifier: Apache-2.0
"""Runs uv and the other commands of a build: without a shell, until a deadline, keeping the last lines of output."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..exceptions import UvUnavailableError, VenvBuildError, VenvTimeoutError
from .redact import ambient_secrets, redact

# Variables that describe the environment and the Ray worker of the caller, and settings that uv gets in another way, as
# the project, its groups and the interpreter.
NOT_INHERITED = (
    *("CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
    *("RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV"),
    *("UV_FROZEN", "UV_ISOLATED", "UV_LOCKED", "UV_NO_PROJECT", "UV_NO_SYNC", "UV_PROJECT", "UV_WORKING_DIR"),
    *("UV_NO_DEFAULT_GROUPS", "UV_NO_DEV", "UV_NO_EDITABLE", "UV_NO_GROUP"),
    *("UV_NO_INSTALL_LOCAL", "UV_NO_INSTALL_PROJECT", "UV_NO_INSTALL_WORKSPACE"),
    *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT", "UV_VENV_RELOCATABLE", "UV_VENV_SEED"),
)
# Since then, the paths in an exported lock are relative to its file.
MINIMUM = (0, 13, 0)
# The last lines of output that are kept, and the bytes in which they are looked for.
LINES = 50
TAIL_BYTES = 1 << 16
# Seconds between two looks at the output of a command that runs.
SHOW_S = 0.05


class Deadline:
    """A moment by which several commands have to be done, and who sees what they print meanwhile."""

    def __init__(self, timeout_s: float, show: Callable[[str], None] | None = None) -> None:
        self.timeout_s = timeout_s
        self.show = show
        self._end = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the remaining seconds; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())


def start_deadline(timeout_s: Any, show: Callable[[str], None] | None = None) -> Deadline:
    """Return a deadline that begins now; a ValueError if this is not a positive, finite number of seconds."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a number of seconds, more than 0 and finite, got {timeout_s!r}")
    return Deadline(float(timeout_s), show)


def locate_uv() -> str:
    """Return the path of uv: `FAIRLEAD_VENV_UV`, the one of the PyPI package, or one on the path. Starts no process."""
    uv = os.environ.get("FAIRLEAD_VENV_UV") or _find_packaged_uv() or shutil.which("uv")
    if not uv:
        raise UvUnavailableError("found neither the package uv nor a program of that name")
    return uv


def find_uv(deadline: Deadline) -> str:
    """Return the path of uv, after a check of its version."""
    uv = locate_uv()
    try:
        done = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=max(1.0, deadline.left()))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UvUnavailableError(f"{uv} does not run: {error}") from None
    version = re.match(r"uv (\d+)\.(\d+)\.(\d+)", done.stdout)
    if done.returncode or not version:
        output = (done.stdout + done.stderr).strip()[-200:]
        raise UvUnavailableError(f"{uv} does not report its version, but exits with {done.returncode}: {output!r}")
    if tuple(map(int, version.groups())) < MINIMUM:
        oldest = ".".join(map(str, MINIMUM))
        raise UvUnavailableError(f"{uv} has version {'.'.join(version.groups())}, and the oldest supported is {oldest}")
    return uv


# The path of the PyPI package's uv, once it was found: the search takes longer than all else that finds an environment.
packaged: list[str] = []


def _find_packaged_uv() -> str | None:
    # TypeError: sysconfig answers None while another thread is the first to use it
    # (https://github.com/python/cpython/issues/92452).
    with contextlib.suppress(ImportError, FileNotFoundError, TypeError):
        if not packaged:
            from uv import find_uv_bin

            packaged.append(str(find_uv_bin()))
    return packaged[0] if packaged else None


class Runner:
    """Runs commands until a common deadline, shows what they print, and redacts secrets in it."""

    def __init__(
        self, deadline: Deadline, *, env: Mapping[str, str], secrets: Iterable[str] = (), no_index: bool = False
    ) -> None:
        self.deadline = deadline
        self._secrets = frozenset(secrets) | ambient_secrets()
        self._no_index = ["--no-index"] if no_index else []
        self._uv = ""
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        # `uv pip sync pylock.toml` is marked as a preview.
        ours = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PREVIEW_FEATURES": "pylock"}
        self.env = {**inherited, **ours, **env}

    def uv(self, *arguments: str, cwd: Path, failed: str) -> None:
        """Run a command of uv, as `run` does."""
        self._uv = self._uv or find_uv(self.deadline)
        self.run([self._uv, *arguments, *self._no_index], cwd=cwd, failed=failed)

    def run(self, command: Sequence[str], *, cwd: Path, failed: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command and return the last lines that it printed. At the deadline, it is killed with its children."""
        shown = redact(shlex.join(command), self._secrets)
        # A file, as a process that outlives the command may hold a pipe open.
        with tempfile.TemporaryFile() as output:
            try:
                # A group of its own, so that its children are killed with it.
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**self.env, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise VenvBuildError(redact(f"{failed}: {error}", self._secrets), shown) from None
            try:
                while (code := self._poll(process)) is None:
                    if not self.deadline.left():
                        raise VenvTimeoutError(shown, self.deadline.timeout_s)
                    if self.deadline.show is not None and (lines := self._read_lines(output.fileno())):
                        self.deadline.show(lines[-1])
            finally:
                if process.returncode is None:  # else its id may be that of another process by now
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            lines = self._read_lines(output.fileno())
        if code:
            raise VenvBuildError(f"{failed} (exit status {code}).", shown, tuple(lines))
        return "\n".join(lines)

    def _poll(self, process: "subprocess.Popen[bytes]") -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(SHOW_S, self.deadline.left()))
        return None

    def _read_lines(self, file: int) -> list[str]:
        """Return the last lines of the output. The position in the file is that of the command's next write."""
        size = os.fstat(file).st_size
        text = os.pread(file, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        return [redact(line, self._secrets) for line in text.splitlines()[-LINES:]]
