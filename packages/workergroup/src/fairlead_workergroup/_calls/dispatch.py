# SPDX-License-Identifier: Apache-2.0
"""From a method and columns of arguments to a call on its way."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._arguments import Arguments
from .._deadline import Deadline
from .._start.worker_class import Method
from .execution import Execution, Repeats
from .plan import Column
from .sender import Order, Sender, is_on_event_loop, make_requests


def dispatch(
    sender: Sender,
    owner: object,
    method: str | Callable[..., Any] | Method,
    called: list[int],
    args: Sequence[Column],
    kwargs: Mapping[str, Column],
    *,
    returned: list[int],
    answers: list[bool] | None = None,
    timeout_s: float | None = None,
    single: bool = False,
    discard: bool = False,
    retries: int = 0,
    may_wait: bool = True,
) -> Execution:
    """Store what has to be stored, and send a call.

    Args:
        sender: of the group.
        owner: the group, which must live as long as somebody waits for the call.
        method: its name, or a function, or a method that was looked up before.
        called: the ranks of the workers.
        args: positional arguments.
        kwargs: keyword arguments.
        returned: the ranks that answer, in the order their results are wanted.
        answers: whether each called worker answers; None: all do.
        timeout_s: seconds from now; None: the group's `call_timeout_s`.
        single: whether there is one answer, which is not in a list.
        discard: whether nobody answers.
        retries: how often it is repeated on workers that were lost.
        may_wait: on an event loop, send it later instead of blocking the loop.

    Raises:
        AttributeError, TypeError, ValueError: the method or its arguments are wrong.
        CallTimeoutError, WorkerFailureError, WorkerGroupError: it could not be sent.
    """
    began = time.monotonic()
    sender.check_retries(retries)
    found = sender.method(method)
    timeout_s = sender.call_timeout_s if timeout_s is None else timeout_s
    sender.check_callable(called)
    stored = Arguments()
    # Before this call's turn: storing a large value must not hold up the calls of other threads.
    requests = make_requests(len(called), found, args, kwargs, answers=answers, arguments=stored)
    kept = list(requests) if retries else None
    order = Order(
        found.name,
        called,
        kept or requests,
        began,
        Deadline(None if timeout_s is None else began + timeout_s),
        {"calls": 1, "puts": stored.puts, "bytes_put": stored.bytes_put},
    )
    return Execution(
        sender.send_or_queue(order) if may_wait and is_on_event_loop() else sender.send(order),
        order,
        returned,
        sender=sender,
        owner=owner,
        method=found,
        single=single,
        discard=discard,
        repeats=None if kept is None else Repeats(retries, kept),
        sources=stored.sources,
    )
