# SPDX-License-Identifier: Apache-2.0
"""Running uv, and what else a build runs: no shell, a deadline, the end of what was said."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..exceptions import UvUnavailableError, VenvBuildError, VenvTimeoutError
from .redact import redacted
from .variables import DECIDING, NOT_INHERITED

__all__ = ["Deadline", "Runner", "find_uv"]

MINIMUM = (0, 8, 0)
LINES = 50


class Deadline:
    """A moment until which something has to be done."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds, 0 if it has passed."""
        return max(0.0, self._end - time.monotonic())


def find_uv(deadline: Deadline) -> str:
    """The uv to build with: `FAIRLEAD_VENV_UV`, that of the PyPI package, or one on the path; new enough."""
    uv = os.environ.get("FAIRLEAD_VENV_UV") or _packaged() or shutil.which("uv")
    if not uv:
        raise UvUnavailableError("neither the package uv nor a program of that name is there")
    try:
        done = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=max(1.0, deadline.left()))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UvUnavailableError(f"{uv} does not run: {error}") from None
    found = re.match(r"uv (\d+)\.(\d+)\.(\d+)", done.stdout)
    if done.returncode or not found:
        said = (done.stdout + done.stderr).strip()[-200:]
        raise UvUnavailableError(f"{uv} does not tell its version, but exits with {done.returncode}: {said!r}")
    if tuple(map(int, found.groups())) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise UvUnavailableError(
            f"{uv} has version {'.'.join(found.groups())}, and {wanted} is the oldest that will do"
        )
    return uv


def _packaged() -> str | None:
    try:
        from uv import find_uv_bin
    except ImportError:
        return None
    for _ in range(100):
        try:
            return str(find_uv_bin())
        except FileNotFoundError:
            break
        except TypeError:
            # sysconfig answers None while another thread is the first to use it
            # (https://github.com/python/cpython/issues/92452).
            time.sleep(0.01)
    return None


class Runner:
    """Runs commands one after another until a common deadline, and shows what they print.

    Args:
        deadline: of all of them together.
        env: variables in addition to those of this process, of which uv's settings count only here: what the driver
            says holds on every node.
        secrets: what must not be seen.
        show: is called with each line that is printed.
    """

    def __init__(
        self,
        deadline: Deadline,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Iterable[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._deadline = deadline
        self._secrets = tuple(secrets)
        self._show = show
        left_out = {*NOT_INHERITED, *DECIDING}
        inherited = {name: value for name, value in os.environ.items() if name not in left_out}
        self.env = {**inherited, "UV_NO_PROGRESS": "1", "NO_COLOR": "1", **(env or {})}

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | Path,
        failed: str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> str:
        """What the command prints.

        Raises:
            VenvBuildError: it failed (`failed` says what that means), or there is no such program.
            VenvTimeoutError: the deadline has passed; the command and what it started has been killed.
        """
        shown = redacted(shlex.join(command), self._secrets)
        try:
            # A group of its own: what it starts is ended with it.
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**self.env, **(env or {})},
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
        except OSError as error:
            raise VenvBuildError(redacted(f"{failed}: {error}", self._secrets), shown) from None
        lines: deque[str] = deque(maxlen=LINES)
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        if stdin:
            # Not here: what is not read does not fit into the pipe, and nothing would look at the deadline.
            threading.Thread(target=_write, args=(process, stdin), daemon=True).start()
        try:
            code = process.wait(self._deadline.left())
        except subprocess.TimeoutExpired:
            raise VenvTimeoutError(shown, self._deadline.timeout_s) from None
        finally:
            if process.returncode is None:  # else its number may be another's by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            # Something that outlives the command may hold the pipe: then its end is not waited for.
            reader.join(1)
        if code:
            raise VenvBuildError(f"{failed} (exit status {code}).", shown, list(lines))
        return "\n".join(lines)

    def _read(self, process: "subprocess.Popen[str]", lines: "deque[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(redacted(line.rstrip("\n"), self._secrets))
                if self._show is not None:
                    self._show(lines[-1])


def _write(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text)
