# SPDX-License-Identifier: Apache-2.0
"""Ray's head (GCS) does not answer: a typed error in time, no host counts as lost, and nothing is left behind."""

import contextlib
import functools
import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from fairlead_placement import extension
from fairlead_placement.testing import assert_no_leaks
from fairlead_tpu_executor import (
    HeadUnreachableError,
    RayExecutor,
    SlicePool,
    TpuAcceleratorConfig,
    __main__,
    _health,
    device_remote,
)
from fairlead_tpu_executor._health import Head
from fairlead_tpu_executor.testing import PretendSlices

TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def stop_head(stop_process):
    """Stop the head of a cluster with one slice, for the duration of a `with` statement."""
    with PretendSlices() as slices:
        slices.add_slice(kind="v4-8", topology="2x2x1", workers=[0])
        yield functools.partial(stop_process, slices.head_pid)


@contextlib.contextmanager
def impatient(pool):
    """Let a pool wait no longer than `TIMEOUT_S` for the head. On a busy machine it may always be silent so long."""
    head = pool._reservation.head
    before, head.timeout_s = head.timeout_s, TIMEOUT_S
    try:
        yield
    finally:
        head.timeout_s = before


def until(path):
    """Run on a host until a file exists."""
    (path.parent / f"started-{os.getpid()}").touch()
    while not path.exists():
        time.sleep(0.05)
    return "done"


def started(path):
    return list(path.parent.glob("started-*"))


def pids(path):
    return [int(file.name.partition("-")[2]) for file in started(path)]


def in_background(function, *args):
    """Call a function on a thread; return a list that receives its result or exception."""
    outcome = []

    def call():
        try:
            value = function(*args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            value = error
        outcome.append(value)

    threading.Thread(target=call, daemon=True).start()
    return outcome


@pytest.mark.nightly
def test_a_short_outage_is_survived(stop_head, tmp_path, eventually):
    """A run continues, and no loss is counted; results that arrive during an outage are returned."""
    # Ray itself ends a process that cannot reach its head for 60 s.
    with SlicePool("v4-8", head_timeout_s=55, max_retries_failure=0, max_retries_preemption=0) as pool:
        head = pool._reservation.head
        outcome = in_background(pool.run, until, tmp_path / "end")
        assert eventually(lambda: len(started(tmp_path / "end")) == 1, 120)
        with stop_head():
            assert eventually(lambda: head.silent_s > 0, 50)
        assert eventually(lambda: head.silent_s == 0, 50)
        assert not outcome
        with stop_head():
            (tmp_path / "end").touch()
            assert eventually(lambda: outcome, 50)
        assert outcome == [["done"]]
        assert (pool.statistics().attempts, pool.statistics().preemptions) == (1, 0)


@pytest.mark.nightly
def test_a_long_outage_ends_a_run(stop_head, tmp_path, caplog, eventually):
    """The run raises a typed error; `close()` returns, names what it holds, and returns it when the head answers."""
    with assert_no_leaks(timeout_s=60):
        pool = SlicePool("v4-8").reserve()
        outcome = in_background(pool.run, until, tmp_path / "never")
        assert eventually(lambda: len(started(tmp_path / "never")) == 1, 120)
        with caplog.at_level(logging.WARNING), stop_head(), impatient(pool):
            assert eventually(lambda: outcome, 50)
            (error,) = outcome
            assert isinstance(error, HeadUnreachableError), error
            assert error.silent_s >= TIMEOUT_S
            assert (pool.statistics().preemptions, pool.statistics().failures) == (0, 0)
            assert not pool.close()
            assert "still holds slice-1 and their ports" in caplog.text
            # Ray has ended the function on its hosts, which it can do without its head.
            assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids(tmp_path / "never")), 30)
        assert pool.close()
        assert pool.slices == ()


@pytest.mark.nightly
def test_a_long_outage_ends_a_call(stop_head, tmp_path, eventually):
    """A call of `device_remote` raises the typed error, and so does a run that has to reserve slices first."""
    config = TpuAcceleratorConfig("v4-8")
    with assert_no_leaks(timeout_s=60), device_remote(accelerator_config=config)(until) as function:
        outcome = in_background(function, tmp_path / "end")
        assert eventually(lambda: len(started(tmp_path / "end")) == 1, 120)
        with stop_head(), impatient(function.pool):
            assert eventually(lambda: outcome, 50)
            assert isinstance(outcome[0], HeadUnreachableError), outcome
            with pytest.raises(HeadUnreachableError):
                SlicePool(config, head_timeout_s=TIMEOUT_S).run(os.getpid)
        (tmp_path / "end").touch()


def test_no_request_to_a_silent_head(stop_head, monkeypatch):
    """No request is made during an outage: Ray aborts a process if a head without its old state answers."""
    monkeypatch.setattr(_health, "_PROBE_S", 0.05)
    with pytest.raises(HeadUnreachableError):
        Head(0.1, probe=lambda _: False).call(pytest.fail, "asked")
    later = iter([False, False, True])
    assert Head(20, probe=lambda _: next(later)).call(lambda: "asked") == "asked"


def test_late_results_are_reversed(stop_head, monkeypatch, eventually):
    """A request that ends after its deadline is reversed as soon as it ends."""
    monkeypatch.setattr(_health, "_PROBE_S", 0.05)
    come, undone = threading.Event(), []
    head = Head(0.1, probe=lambda _: answers)
    answers = True

    def ask():
        nonlocal answers
        answers = False  # the outage begins during the request
        assert come.wait(60)
        return "taken"

    with pytest.raises(HeadUnreachableError):
        head.call(ask, undo=undone.append)
    assert undone == []
    come.set()
    assert eventually(lambda: undone == ["taken"], 60)
    assert ray.is_initialized()


def test_errors_of_the_function_during_an_outage(stop_head):
    """The function's own exception is raised as it is, even if the head is silent at that time."""
    head = Head(0.1, probe=lambda _: False)

    def fails():
        raise ray.exceptions.RayTaskError("f", "", ray.exceptions.GetTimeoutError("mine"))

    with pytest.raises(ray.exceptions.RayTaskError):
        head.result(extension.run_in_thread(fails))

    def times_out():
        raise ray.exceptions.GetTimeoutError("Ray's own deadline for the removal of a placement group")

    with pytest.raises(HeadUnreachableError) as caught:
        head.result(extension.run_in_thread(times_out))
    assert isinstance(caught.value.__cause__, ray.exceptions.GetTimeoutError)


class Device:
    """A class that a pool could start."""


CONFIG = TpuAcceleratorConfig("v4-8", head_timeout_s=TIMEOUT_S)
# How to use each public name of a pool that holds nothing, and of the executor, and whether that needs the head.
POOL = {
    "attempt": (lambda pool: pool.attempt(os.getpid), True),
    "checked": (lambda pool: pool.checked(os.getpid), False),
    "close": (lambda pool: pool.close(), False),  # a pool that holds slices has a test of its own
    "get": (lambda pool: pool.get([[ray.put(1)]]), True),
    "reserve": (lambda pool: pool.reserve(), True),
    "run": (lambda pool: pool.run(os.getpid), True),
    "run_on_first_hosts": (lambda pool: pool.run_on_first_hosts(os.getpid), True),
    "scale": (lambda pool: pool.scale(1), True),
    "slices": (lambda pool: pool.slices, False),
    "slots": (lambda pool: pool.slots(), True),
    "start": (lambda pool: pool.start(Device, (), {}), True),
    "statistics": (lambda pool: pool.statistics(), False),
    "submit": (lambda pool: pool.submit(os.getpid), True),
}
EXECUTOR = {
    name: (lambda executor, name=name: getattr(executor, name)(os.getpid, CONFIG), True)
    for name in ("autoscale_execute", "autoscale_execute_resumable", "execute", "execute_resumable")
}


def test_every_public_method(stop_head, call_in_time, monkeypatch, capsys):
    """Every public method of a pool and of the executor, and the command, returns or raises in time."""
    calls = {}
    for made, uses in ((SlicePool, POOL), (RayExecutor, EXECUTOR)):
        assert {name for name in dir(made) if not name.startswith("_")} == uses.keys()
        for name, (function, _) in uses.items():
            calls[name] = functools.partial(function, SlicePool(CONFIG) if made is SlicePool else made)
    calls["command"] = lambda: __main__.main(["status"])
    monkeypatch.setattr(__main__, "attach", lambda address: extension.head_deadline(TIMEOUT_S))
    monkeypatch.setattr("fairlead_placement._terminal.os", SimpleNamespace(_exit=lambda status: None))
    with stop_head():
        outcomes = call_in_time(calls, TIMEOUT_S)
    assert outcomes.pop("command") == 3
    assert "Ray's head (GCS) did not answer a request to" in capsys.readouterr().err
    wanted = {name: needs_head for name, (_, needs_head) in {**POOL, **EXECUTOR}.items()}
    assert {name: isinstance(outcome, HeadUnreachableError) for name, outcome in outcomes.items()} == wanted
    assert not [
        one for one in outcomes.values() if isinstance(one, BaseException) and type(one) is not HeadUnreachableError
    ]
