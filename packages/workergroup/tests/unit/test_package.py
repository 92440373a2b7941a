# SPDX-License-Identifier: Apache-2.0
"""The errors of the package, and its command line."""

import dataclasses
import pickle

import pytest
from ray.exceptions import RayTaskError

from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    LateWorker,
    RemoteError,
    ResizeTimeoutError,
    WorkerFailure,
    WorkerFailureError,
    WorkerGroupError,
    WorkerStartError,
)

FAILURE = WorkerFailure(3, "killed", {"dp": 1}, "abcdef0123", 77, "it was killed")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerGroupError("text"), "text"),
        (
            WorkerFailureError((FAILURE,), "do this"),
            "1 worker(s) lost:\n  rank 3 (dp=1) on node abcdef01, pid 77: killed: it was killed\ndo this",
        ),
        (
            WorkerStartError("it failed", 2, {"dp": 0}, "abcdef0123", "Traceback", "others waited"),
            "rank 2 (dp=0) on node abcdef01: it failed\nothers waited\nTraceback",
        ),
        (
            CallTimeoutError("step", 2.5, 8, (LateWorker(3, {"dp": 1}, "abcdef0123", 77, "load", 1.25),)),
            (
                "1 of 8 workers have not finished 'step', called 2.5 s ago:\n"
                "  rank 3 (dp=1) on node abcdef01, pid 77: in 'load' for 1.2 s\n"
                "The call continues: ask for its result again, cancel it, or end what never returns: `restart(ranks)`."
            ),
        ),
        (
            CallCancelledError("step", (1, 3)),
            "the call of 'step' was cancelled before rank(s) 1, 3 finished it",
        ),
        (
            WorkerFailureError((FAILURE,) * 2000, "do this"),
            "2000 worker(s) lost:"
            + "\n  rank 3 (dp=1) on node abcdef01, pid 77: killed: it was killed" * 16
            + "\n  and 1984 others\ndo this",
        ),
        (
            CallCancelledError("step", tuple(range(2000))),
            (
                "the call of 'step' was cancelled before rank(s) "
                "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 1984 others finished it"
            ),
        ),
        (RemoteError("pkg.Odd", "text", "Traceback", 4), "rank 4 raised pkg.Odd: text\nTraceback"),
    ],
)
def test_errors_pickle(error, text):
    """Each error survives pickling with its text."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), str(error)) == (type(error), text, text)
    assert isinstance(again, WorkerGroupError)


@pytest.mark.parametrize(
    "error",
    [
        WorkerFailureError((FAILURE,), "do this"),
        ResizeTimeoutError("it is late", 2.5, (LateWorker(3, {}, "", 77, "load", 1.25),), "because"),
        CallTimeoutError("step", 2.5, 8, (), "because"),
        RemoteError("pkg.Odd", "text", "Traceback", 4),
    ],
    ids=lambda error: type(error).__name__,
)
def test_fields_through_a_task(error):
    """The error that Ray raises for an error of a task has the fields of that error."""
    raised = RayTaskError("task", "Traceback", error).as_instanceof_cause()
    assert isinstance(raised, type(error))
    names = [one.name for one in dataclasses.fields(error)]
    assert [getattr(raised, name) for name in names] == [getattr(error, name) for name in names]


@pytest.mark.parametrize("kind", ["killed", "exited", "node-lost", "out-of-memory", "preempted"])
def test_remedies(kind):
    """The error of a loss says how the workers are started again, and how they load their state then."""
    text = str(WorkerFailureError((dataclasses.replace(FAILURE, kind=kind),)))
    assert "`restart_failed_workers()` starts them again" in text
    assert "of the method that `Restart(method=...)` names" in text
