# SPDX-License-Identifier: Apache-2.0
"""The test's side of a driver: run a function in another process, step by step."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

__all__ = ["PATIENCE_S", "Driver", "DriverError"]

_MAIN = Path(__file__).with_name("driver_main.py")
# A step that takes longer will not end. On a busy machine the start of a group takes a minute.
PATIENCE_S = 300.0


class DriverError(AssertionError):
    """A driver missed a deadline or died. The message contains the end of its output."""


class Driver:
    """A function that runs in its own process. If it is a generator, the test receives the value of each `yield`.

    The driver attaches to `address`, unless that is None, and checks at its end that it left no resources behind.

        with hosts.driver(function) as driver:
            address = driver.step()   # runs to the first `yield address`
            hosts.kill(...)
            driver.step("continue")   # sends "continue" as the value of that `yield`, and runs to the next one
                                      # leaving the block runs the function to its end
    """

    def __init__(
        self,
        prefix: Sequence[str],
        function: Callable[..., Any],
        *args: Any,
        address: str | None,
        env: Mapping[str, str],
        log: Path,
    ) -> None:
        # The driver and the nodes cannot import the tests, so functions and classes are pickled by value.
        module = sys.modules[function.__module__]
        ray.cloudpickle.register_pickle_by_value(module)
        message = ray.cloudpickle.dumps((function, args, address))
        self._log = log
        self._channel, theirs = multiprocessing.Pipe()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(_MAIN), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._send(message)

    def resume(self, value: Any = None) -> None:
        """Let the function run to its next `yield`."""
        self._send(ray.cloudpickle.dumps(value))

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        """Return the next value that the function yields or returns, or raise its exception."""
        kind, value = self._receive(timeout_s)
        if kind == "ended":
            raise DriverError("the driver has no further step")
        return value

    def step(self, value: Any = None, *, timeout_s: float = PATIENCE_S) -> Any:
        """Resume the function, and return its next value."""
        self.resume(value)
        return self.receive(timeout_s)

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Run the function to its end, which includes the check for leaks."""
        self.resume()
        kind, value = self._receive(timeout_s)
        if kind != "ended":
            raise DriverError(f"the driver has a further step, and yielded {value!r}")
        self._process.wait(timeout_s)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # The process has ended. Its last message contains the reason.
            self._channel.send_bytes(message)

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        try:
            if not self._channel.poll(timeout_s):
                self._print_stacks()
                raise DriverError(f"the driver did not answer within {timeout_s:g} s\n{self._read_output()}")
            kind, value = ray.cloudpickle.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError):
            raise DriverError(f"the driver died: {self._process.wait()}\n{self._read_output()}") from None
        if kind == "raised":
            raise value
        return kind, value

    def _print_stacks(self) -> None:
        """Let the driver print the stacks of its threads, and wait until it has."""
        before, size = self._log.stat().st_size, -1
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while (now := self._log.stat().st_size) == before or now != size:
            size = now
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)

    def _read_output(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]
