# SPDX-License-Identifier: Apache-2.0
"""The test's side of a driver: a function that runs in a process of its own, step by step."""

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

__all__ = ["Driver", "DriverError"]

_MAIN = Path(__file__).with_name("driver_main.py")


class DriverError(AssertionError):
    """A driver missed a deadline or died; with the end of what it printed."""


class Driver:
    """A function in a process of its own; if it is a generator, each `yield` is an answer.

    It attaches to `address`, unless that is None, and at its end asserts that the cluster is as it was before.

        with hosts.driver(function) as driver:
            address = driver.step()   # runs to the first `yield address`
            hosts.kill(...)
            driver.step("go on")      # the value of that `yield`; runs to the next
                                      # leaving the block runs it to its end
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
        # Tests are not importable in the driver, nor on the nodes: their functions and classes travel by value.
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
        """Let it run on, to its next `yield`."""
        self._send(ray.cloudpickle.dumps(value))

    def answer(self, timeout_s: float = 60.0) -> Any:
        """What it yields next, or returns; raises what it raises."""
        kind, value = self._receive(timeout_s)
        if kind == "ended":
            raise DriverError("the driver has no further step")
        return value

    def step(self, value: Any = None, *, timeout_s: float = 60.0) -> Any:
        """`resume` and `answer`."""
        self.resume(value)
        return self.answer(timeout_s)

    def finish(self, timeout_s: float = 60.0) -> None:
        """Run it to its end, leaks looked for."""
        self.resume()
        kind, value = self._receive(timeout_s)
        if kind != "ended":
            raise DriverError(f"the driver has a further step, and yielded {value!r}")
        self._process.wait(timeout_s)

    def close(self) -> None:
        """End it, wherever it is."""
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
        with contextlib.suppress(ConnectionError):  # it has ended: what it said last tells why
            self._channel.send_bytes(message)

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        try:
            if not self._channel.poll(timeout_s):
                os.kill(self._process.pid, signal.SIGUSR1)  # it prints the stacks of its threads
                time.sleep(1)
                raise DriverError(f"the driver did not answer within {timeout_s:g} s\n{self._printed()}")
            kind, value = ray.cloudpickle.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError):
            raise DriverError(f"the driver died: {self._process.wait()}\n{self._printed()}") from None
        if kind == "raised":
            raise value
        return kind, value

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]
