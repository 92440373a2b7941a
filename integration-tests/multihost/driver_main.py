# SPDX-License-Identifier: Apache-2.0
"""The main program of a driver's process. It receives a function, runs it step by step and sends its values."""

import contextlib
import faulthandler
import inspect
import signal
import sys
import traceback
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import ray

from fairlead_placement import init_ray
from fairlead_placement.testing import assert_no_leaks


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    channel = Connection(int(sys.argv[1]))
    try:
        function, args, address = ray.cloudpickle.loads(channel.recv_bytes())
        with attach(address):
            run(channel, steps(function, args))
    except BaseException as error:  # noqa: BLE001 - pytest.fail() is no Exception
        traceback.print_exc()
        error.add_note("In the driver:\n" + traceback.format_exc())
        send(channel, "raised", error)
    else:
        send(channel, "ended", None)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def attach(address: str | None):
    if address is None:
        yield
        return
    init_ray(address=address)
    with assert_no_leaks():
        yield


def steps(function: Any, args: Any) -> Generator[Any, Any, None]:
    """Run a generator function, or a plain function as a generator of one value."""
    if inspect.isgeneratorfunction(function):
        yield from function(*args)
    else:
        yield function(*args)


def run(channel: Connection, generator: Generator[Any, Any, None]) -> None:
    with contextlib.closing(generator), contextlib.suppress(StopIteration):
        while True:
            value = ray.cloudpickle.loads(channel.recv_bytes())
            send(channel, "value", generator.send(value))


def send(channel: Connection, kind: str, value: Any) -> None:
    try:
        message = ray.cloudpickle.dumps((kind, value))
        ray.cloudpickle.loads(message)
    except Exception as error:  # noqa: BLE001 - pickling a value may raise anything
        message = ray.cloudpickle.dumps(
            ("raised", RuntimeError(f"{value!r} cannot be pickled and unpickled: {error!r}"))
        )
    channel.send_bytes(message)


if __name__ == "__main__":
    main()
