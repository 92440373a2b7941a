# SPDX-License-Identifier: Apache-2.0
"""Runs uv and the other commands of a build: without a shell, until a deadline, without credentials in their output."""

import contextlib
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..exceptions import UvUnavailableError, VenvBuildError, VenvTimeoutError

logger = logging.getLogger("fairlead_venvs")

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
REDACTED = "***"
# A user without a password may be a token, so `git` in `git+ssh://git@host` is redacted, too. A password may have an @.
USERINFO = re.compile(r"([a-z][a-z0-9+.-]*://)([^/\s?#\"']+)@", re.IGNORECASE)
PARAMETER = re.compile(r"([?&]([^=&\s]+)=)([^&\s#\"']+)")
# Whole words: TOKENIZERS_PARALLELISM and MAX_TOKENS are settings.
SECRET_NAME = re.compile(
    r"(?<![A-Z0-9])(API_?KEY|(AWS)?(ACCESS|PRIVATE)_?KEY(ID)?|CREDENTIALS?|PASS(WORD|PHRASE|WD)|SECRET|SIG(NATURE)?"
    r"|TOKEN|USERNAME|AUTH$)(?![A-Z0-9])"
)
# The last lines of output that are kept, and the bytes in which they are looked for.
LINES = 50
TAIL_BYTES = 1 << 16
# Seconds of one wait for a command. Python looks more and more rarely within a wait.
WAIT_S = 0.05


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a parameter of a URL of this name holds a credential."""
    return SECRET_NAME.search(name.upper().replace("-", "_")) is not None


def replace_credentials(text: str, replace: Callable[[str], str]) -> str:
    """Replace what is secret in the URLs of a text: users with passwords, and the values of parameters."""
    text = USERINFO.sub(lambda match: f"{match[1]}{replace(match[2])}@", text)
    return PARAMETER.sub(lambda match: match[1] + replace(match[3]) if is_secret_name(match[2]) else match[0], text)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the credentials in its URLs, and without the given secrets."""
    text = replace_credentials(text, lambda _: REDACTED)
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be a part of another
        text = text.replace(secret, REDACTED)
    return text


class Deadline:
    """A moment by which several commands have to be done; a ValueError if that is no positive, finite time from now."""

    def __init__(self, timeout_s: float) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a number of seconds, more than 0 and finite, got {timeout_s!r}")
        self.timeout_s = float(timeout_s)
        self._end = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the remaining seconds; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())


def locate_uv() -> str:
    """Return the path of uv: `FAIRLEAD_VENV_UV`, the one beside this Python, or one on the path. Starts no process."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    uv = os.environ.get("FAIRLEAD_VENV_UV") or shutil.which("uv", path=path)
    if not uv:
        raise UvUnavailableError(f"there is no program uv beside {sys.executable}, nor on the path")
    return uv


def find_uv(deadline: Deadline) -> str:
    """Return the path of uv, after a check of its version."""
    uv = locate_uv()
    try:
        done = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=max(1.0, deadline.left()))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UvUnavailableError(f"{uv} does not run: {error}") from None
    version = re.match(r"uv (\d+)\.(\d+)\.(\d+)", done.stdout)
    if not version or tuple(map(int, version.groups())) < MINIMUM:
        oldest, output = ".".join(map(str, MINIMUM)), (done.stdout + done.stderr).strip()[-200:]
        raise UvUnavailableError(f"the oldest supported version is {oldest}, and `{uv} --version` prints {output!r}")
    return uv


class Runner:
    """Runs commands until a common deadline, logs them, and redacts secrets in what they print."""

    def __init__(self, deadline: Deadline, env: Mapping[str, str], *, no_index: bool = False) -> None:
        self._deadline = deadline
        self._no_index = ["--no-index"] if no_index else []
        self._uv = ""
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        # `uv pip sync pylock.toml` is marked as a preview.
        ours = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PREVIEW_FEATURES": "pylock"}
        self.env = {**inherited, **ours, **env}
        named = [name for name in self.env if (name in env or name.startswith("UV_")) and is_secret_name(name)]
        self._secrets = [self.env[name] for name in named if len(self.env[name]) > 3]

    def uv(self, *arguments: str, cwd: Path, failed: str) -> None:
        """Run a command of uv, as `run` does."""
        self._uv = self._uv or find_uv(self._deadline)
        self.run([self._uv, *arguments, *self._no_index], cwd=cwd, failed=failed)

    def run(self, command: Sequence[str], *, cwd: Path, failed: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command and return the last lines that it printed. At the deadline, it is killed with its children."""
        shown = redact(shlex.join(command), self._secrets)
        logger.info("%s", shown)
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
                while process.returncode is None:
                    if not self._deadline.left():
                        raise VenvTimeoutError(shown, self._deadline.timeout_s)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(min(WAIT_S, self._deadline.left()))
            finally:
                if process.returncode is None:  # else its id may be that of another process by now
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - TAIL_BYTES))
            text = redact(output.read().decode(errors="replace"), self._secrets)
        lines = text.splitlines()[-LINES:]
        if process.returncode:
            raise VenvBuildError(f"{failed} (exit status {process.returncode}).", shown, tuple(lines))
        return "\n".join(lines)
