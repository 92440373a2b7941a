# SPDX-License-Identifier: Apache-2.0
"""What an object held that the program dropped: returned by a background thread, with a warning."""

import logging
import threading

import pytest
import ray

from fairlead_placement._reserve.finalizers import wait_for_dropped
from fairlead_placement.spi import block_shutdown, release_when_dropped


class Owner:
    pass


def test_in_the_background(recwarn):
    """The drop returns at once; a background thread warns and releases, one object after the other."""
    free, released = threading.Event(), []

    def release(name):
        free.wait(30)
        released.append((name, threading.current_thread()))

    for name in ("first", "second"):
        owner = Owner()
        release_when_dropped(owner, lambda name=name: f"{name} is held", lambda name=name: release(name))
        del owner
    assert released == []
    assert not wait_for_dropped(0.0)
    free.set()
    assert wait_for_dropped(30)
    assert [name for name, _ in released] == ["first", "second"]
    assert threading.current_thread() not in {thread for _, thread in released}
    assert [str(one.message) for one in recwarn] == ["first is held", "second is held"]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_an_object_that_was_closed():
    """No warning is emitted for an object that holds nothing; its release can be repeated."""
    released = []
    release_when_dropped(Owner(), lambda: "", lambda: released.append("again"))
    assert wait_for_dropped(30)
    assert released == ["again"]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_release_that_fails(caplog):
    """A release that fails, or a warning that is an error, is logged; the next object is served."""
    released = []
    with caplog.at_level(logging.WARNING, logger="fairlead_placement"):
        release_when_dropped(Owner(), lambda: "held", lambda: 1 // 0)
        release_when_dropped(Owner(), lambda: "held", lambda: released.append("next"))
        assert wait_for_dropped(30)
    assert released == ["next"]
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "ZeroDivisionError: integer division or modulo by zero",
        "ResourceWarning: held",
    ]


def test_at_exit(run_script):
    """At interpreter exit nothing is released, and an object that is dropped then is not waited for."""
    out = run_script(
        """
        from fairlead_placement.spi import release_when_dropped

        class Owner:
            pass

        kept = Owner()
        release_when_dropped(kept, lambda: "held", lambda: print("released"))
        """,
        PYTHONWARNINGS="always::ResourceWarning",
    )
    assert out == ""


def test_ray_is_shut_down_meanwhile(run_script):
    """`ray.shutdown()` waits for a release that frees references; without that Ray ends the process."""
    out = run_script(
        """
        import threading
        import time

        import ray

        from fairlead_placement.spi import release_when_dropped

        ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")
        refs = [ray.put(number) for number in range(1000)]
        releasing = threading.Event()

        class Owner:
            pass

        def release():
            releasing.set()
            while refs:
                refs.pop()
                time.sleep(0.001)

        release_when_dropped(Owner(), lambda: "", release)
        releasing.wait(30)
        ray.shutdown()
        print(f"{len(refs)} references are left")
        """
    )
    assert out == "0 references are left\n"


def test_without_a_lock_of_ray(monkeypatch):
    """A Ray that has no lock for this blocks nothing."""
    monkeypatch.delattr(ray._private.worker, "_connect_or_shutdown_lock")
    with block_shutdown():
        assert not ray.is_initialized()
