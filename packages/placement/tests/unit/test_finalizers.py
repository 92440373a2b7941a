# SPDX-License-Identifier: Apache-2.0
"""A background thread releases what a dropped object held, with a warning."""

import logging
import threading

import pytest

from fairlead_placement.extension import release_when_dropped


class Owner:
    pass


def test_in_the_background(recwarn, eventually):
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
    free.set()
    assert eventually(lambda: {name for name, _ in released} == {"first", "second"})
    assert threading.current_thread() not in {thread for _, thread in released}
    assert {str(warning.message) for warning in recwarn} == {"first is held", "second is held"}


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_an_object_that_was_closed(eventually):
    """No warning is emitted for an object that holds nothing; its release can be repeated."""
    released = []
    release_when_dropped(Owner(), lambda: "", lambda: released.append("again"))
    assert eventually(lambda: released == ["again"])


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_release_that_fails(caplog, eventually):
    """A release that fails, or a warning that is an error, is logged, and the object is released nevertheless."""
    released = []
    with caplog.at_level(logging.WARNING, logger="fairlead_placement"):
        release_when_dropped(Owner(), lambda: "held", lambda: 1 // 0)
        release_when_dropped(Owner(), lambda: "held", lambda: released.append("next"))
        assert eventually(lambda: len(caplog.records) == 2)
    assert released == ["next"]
    assert {record.getMessage().split(": ", 1)[1] for record in caplog.records} == {
        "ZeroDivisionError: integer division or modulo by zero",
        "ResourceWarning: held",
    }
