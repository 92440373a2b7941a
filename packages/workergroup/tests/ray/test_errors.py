# SPDX-License-Identifier: Apache-2.0
"""Tests of the display of errors: short tracebacks."""

import asyncio
from collections.abc import Iterator

import pytest

from fairlead_workergroup import CallTimeoutError, WorkerGroupError

from ..calling import wait_for


def chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and the errors that a traceback shows before it."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def internal_frames(error: BaseException) -> list[str]:
    """Return the functions of Fairlead and Ray that a traceback shows."""
    found = []
    for one in chain(error):
        traceback = one.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if frame.f_globals["__name__"].partition(".")[0] in ("ray", "fairlead_workergroup"):
                found.append(frame.f_code.co_qualname)
            traceback = traceback.tb_next
    return found


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda group: group.call("fail", [3]).result(), 1),
        (lambda group: asyncio.run(wait_for(group.call("fail", [3]))), 2),
        (lambda group: group.get_all_worker_results(group.run_all_workers_single_data("fail", [3])), 1),
        (lambda group: list(group.call("items_then_fail", 1).stream()), 2),
        (lambda group: list(group.map("fail", [[0, 5]])), 2),
        (lambda group: group.call("sleep", 0.5).result(timeout=0), 1),
    ],
)
def test_tracebacks_are_short(group, make, most):
    """A worker's error and a timeout show the user's frames and the call, without the frames of Fairlead and Ray."""
    with pytest.raises((ValueError, KeyError, CallTimeoutError)) as caught:
        make(group)
    assert len(internal_frames(caught.value)) <= most


def test_the_users_frames_stay(group):
    """The frames of the user's own code that Fairlead calls are kept; so are all frames of an unexpected error."""

    def items():
        yield [3]
        raise WorkerGroupError("mine")

    with pytest.raises(WorkerGroupError, match="mine") as caught:
        list(group.map("fail", items(), max_in_flight=1))
    assert caught.traceback[-1].name == "items"

    def break_down():
        yield 1 / 0

    with pytest.raises(ZeroDivisionError) as unexpected:
        list(group.map("fail", break_down(), max_in_flight=1))
    assert len(internal_frames(unexpected.value)) > len(internal_frames(caught.value))
