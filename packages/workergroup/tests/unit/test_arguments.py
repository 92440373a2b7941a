# SPDX-License-Identifier: Apache-2.0
"""Tests of the arguments that travel with a call, that are stored, and that are refused."""

import threading

import pytest
import ray

from fairlead_workergroup import PerWorker, Shard
from fairlead_workergroup.testing import LocalGroup


class Worker:
    def take(self, value):
        pass


class Holder:
    """An object with a part that cannot be pickled."""

    def __init__(self):
        self.name = "holder"
        self.lock = threading.Lock()


class Raising:
    def __reduce__(self):
        raise OSError("this value is bound to its process")


@pytest.fixture(scope="module")
def group():
    """A group of two workers, which are threads of the test."""
    with LocalGroup(Worker, workers=2) as group:
        yield group


@pytest.mark.parametrize(
    ("value", "inlined"),
    [
        ([1.5, None, True, "x" * 9_000], True),
        (["x" * 10_000] * 16, False),
        (["x" * 6_000, "x" * 6_000], False),
        (("x" * 5_000, b"x" * 5_001), False),
        ({"x" * 6_000: 1, "y": "x" * 6_000}, False),
        ({"x" * 4_000: 1, "y": "x" * 4_000}, True),
        ("é" * 6_000, False),
        ("é" * 4_000, True),
        ("\ud800", True),
        (1 << 100_000, False),
        (list(range(17)), False),
    ],
    ids=type,
)
def test_a_whole_argument_is_inlined_up_to_10_kb(group, value, inlined):
    """The total of a container's values counts, in bytes."""
    assert group.call("take", value).statistics().puts == (not inlined)


@pytest.mark.parametrize("mark", [Shard([1, 2], "dp"), PerWorker([1, 2])])
@pytest.mark.parametrize(
    ("nest", "path"),
    [
        (lambda mark: [mark], "[0]"),
        (lambda mark: [*range(1000), mark], "[1000]"),
        (lambda mark: {"batch": {"x": (1, mark)}}, "['batch']['x'][1]"),
    ],
)
def test_a_nested_mark_is_refused(group, mark, nest, path):
    """A mark inside an argument is refused at any depth, and the message has its place."""
    with pytest.raises(TypeError) as caught:
        group.call("take", nest(mark))
    assert path in str(caught.value)
    assert f"make the whole argument the {type(mark).__name__}" in str(caught.value)


@pytest.mark.parametrize("mark", [Shard([1, 2], "dp", "tp"), PerWorker([1, 2])])
def test_marks_can_be_pickled(group, mark):
    """A program may send a mark to the process that makes the call."""
    with pytest.raises(TypeError, match="is not split"):
        group.call("take", [mark])
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(mark)) == mark


def test_the_part_that_cannot_be_pickled(group):
    """The message has the path to the innermost part and the innermost reason, in one line."""
    lock, holder = threading.Lock(), Holder()
    for value, part in [
        ({"model": [0, holder]}, "its part ['model'][1].lock of type lock cannot"),
        (lambda: lock, "its part .lock of type lock cannot"),
        (Raising(), "a Raising cannot be pickled: OSError: this value is bound to its process"),
    ]:
        with pytest.raises(TypeError, match="argument 'value' of 'take'") as caught:
            group.call("take", value)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)
