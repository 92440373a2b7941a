# SPDX-License-Identifier: Apache-2.0
"""Ray's head (GCS) does not answer: a typed error in time, no host counts as lost, and nothing is left behind."""

import functools
import logging
import os
import threading
import time

import pytest

from fairlead_placement import HeadTimeoutError, extension
from fairlead_placement.testing import assert_no_leaks
from fairlead_tpu_executor import RayExecutor, SlicePool, TpuAcceleratorConfig, device_remote
from fairlead_tpu_executor import _attempt as attempt
from fairlead_tpu_executor.testing import PretendSlices


@pytest.fixture(scope="module")
def stop_head(stop_process):
    """Stop the head of a cluster with one slice, for the duration of a `with` statement."""
    with PretendSlices() as slices:
        slices.add_slice(kind="v4-8", topology="2x2x1", workers=[0])
        yield functools.partial(stop_process, slices.head_pid)


@pytest.fixture
def impatient(monkeypatch):
    """Return a function after which everything waits two seconds for a silent head, and not half a minute."""

    def shorten():
        deadline = extension.head_deadline
        monkeypatch.setattr(attempt, "SILENT_S", 2.0)
        monkeypatch.setattr(extension, "head_deadline", lambda timeout_s=2.0: deadline(min(2.0, timeout_s or 2.0)))

    return shorten


def until(path):
    """Run on a host until a file exists."""
    (path.parent / f"started-{os.getpid()}").touch()
    while not path.exists():
        time.sleep(0.05)
    return "done"


def pids(path):
    return [int(file.name.partition("-")[2]) for file in path.parent.glob("started-*")]


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
    """A run continues, and no loss is counted; results that arrive during an outage are returned after it."""
    with SlicePool("v4-8", max_retries_failure=0, max_retries_preemption=0) as pool:
        outcome = in_background(pool.run, until, tmp_path / "end")
        assert eventually(lambda: len(pids(tmp_path / "end")) == 1, 120)
        for _ in range(2):
            with stop_head():
                time.sleep(5)
            time.sleep(2)
        assert not outcome
        with stop_head():
            (tmp_path / "end").touch()
            time.sleep(2)
        assert eventually(lambda: outcome == [["done"]], 60)
        assert len(pids(tmp_path / "end")) == 1


@pytest.mark.nightly
def test_a_long_outage_ends_a_run(stop_head, impatient, tmp_path, caplog, eventually):
    """The run raises a typed error; `close()` returns, names what it held, which is returned when the head answers."""
    with assert_no_leaks(timeout_s=60):
        pool = SlicePool("v4-8").reserve()
        outcome = in_background(pool.run, until, tmp_path / "never")
        assert eventually(lambda: len(pids(tmp_path / "never")) == 1, 120)
        with caplog.at_level(logging.WARNING), stop_head():
            impatient()
            assert eventually(lambda: outcome, 40)
            assert isinstance(outcome[0], HeadTimeoutError), outcome
            # Ray has ended the function on its hosts, which it can do without its head.
            assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids(tmp_path / "never")), 30)
        pool.close()
        assert pool.slices == ()


@pytest.mark.nightly
def test_a_long_outage_ends_a_call(stop_head, impatient, tmp_path, eventually):
    """A call of `device_remote` raises the typed error."""
    config = TpuAcceleratorConfig("v4-8")
    with assert_no_leaks(timeout_s=60), device_remote(accelerator_config=config)(until) as function:
        outcome = in_background(function, tmp_path / "end")
        assert eventually(lambda: len(pids(tmp_path / "end")) == 1, 120)
        with stop_head():
            impatient()
            assert eventually(lambda: outcome, 40)
            assert isinstance(outcome[0], HeadTimeoutError), outcome
        (tmp_path / "end").touch()


class Device:
    """A class that a pool could start."""


CONFIG = TpuAcceleratorConfig("v4-8")
# How to use each public name of a pool that holds nothing, and of the executor, and whether that needs the head.
POOL = {
    "attempt": (lambda pool: pool.attempt(os.getpid), True),
    "close": (lambda pool: pool.close(), False),
    "reserve": (lambda pool: pool.reserve(), True),
    "run": (lambda pool: pool.run(os.getpid), True),
    "run_on_first_hosts": (lambda pool: pool.run_on_first_hosts(os.getpid), True),
    "scale": (lambda pool: pool.scale(1), True),
    "slices": (lambda pool: pool.slices, False),
    "slots": (lambda pool: pool.slots(), True),
    "start": (lambda pool: pool.start(Device, (), {}), True),
    "submit": (lambda pool: pool.submit(os.getpid), True),
}
EXECUTOR = {
    name: (lambda executor, name=name: getattr(executor, name)(os.getpid, CONFIG), True)
    for name in ("autoscale_execute", "autoscale_execute_resumable", "execute", "execute_resumable")
}


def test_every_public_method(stop_head, impatient, call_in_time):
    """Every public method of a pool and of the executor returns or raises in time."""
    calls = {}
    for made, uses in ((SlicePool, POOL), (RayExecutor, EXECUTOR)):
        assert {name for name in dir(made) if not name.startswith("_")} == uses.keys()
        for name, (function, _) in uses.items():
            calls[name] = functools.partial(function, SlicePool(CONFIG) if made is SlicePool else made)
    impatient()
    with stop_head():
        outcomes = call_in_time(calls, 3.0)
    wanted = {name: needs_head for name, (_, needs_head) in {**POOL, **EXECUTOR}.items()}
    assert {name: isinstance(outcome, HeadTimeoutError) for name, outcome in outcomes.items()} == wanted
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, BaseException)]
    assert {type(error) for error in errors} == {HeadTimeoutError}
