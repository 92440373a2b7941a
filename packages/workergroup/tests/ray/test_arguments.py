# SPDX-License-Identifier: Apache-2.0
"""Tests of the arguments that travel with a call, that are stored, and that are refused before anything is sent."""

import threading

import pytest

from fairlead_workergroup import Shard


class Holder:
    """An object with a part that cannot be pickled."""

    def __init__(self):
        self.name = "holder"
        self.lock = threading.Lock()


class Raising:
    def __reduce__(self):
        raise OSError("this value is bound to its process")


def test_refused_before_anything_is_sent(group, requests):
    """The error names the argument, its innermost part and the reason, in one line; no worker is called."""
    lock, holder = threading.Lock(), Holder()
    for match, args, kwargs in [
        (
            r"^argument 'value' of 'total': a lock cannot be pickled: TypeError: cannot pickle '_thread.lock'",
            [lock],
            {},
        ),
        (r"^argument 'value' of 'total': its part \[0\]", [], {"value": [lock]}),
        (r"^argument 'value' of 'total': its part \[1\] of type Shard", [[1, Shard([1, 2], "dp")]], {}),
        (r"^argument 'value' of 'total': its part \['a'\] of type Call", [{"a": group.call("rank")}], {}),
        (r"its part \['model'\]\[1\]\.lock of type lock cannot", [{"model": [0, holder]}], {}),
        (r"its part \.lock of type lock cannot", [lambda: lock], {}),
        (r"a Raising cannot be pickled: OSError: this value is bound to its process", [Raising()], {}),
    ]:
        with pytest.raises(TypeError, match=match) as caught:
            group.call("total", *args, **kwargs)
        assert len(str(caught.value).splitlines()) == 1
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    with pytest.raises(TypeError, match="argument 0 of 'echo'"):
        group.call("echo", lock)
    assert requests == ["rank"] * 8


@pytest.mark.parametrize(
    ("value", "inlined"),
    [
        ([1.5, None, True, "x" * 9_000], True),
        (["x" * 10_000] * 16, False),
        (("x" * 5_000, b"x" * 5_001), False),
        ({"x" * 4_000: 1, "y": "x" * 4_000}, True),
        ("é" * 6_000, False),
        ("\ud800", True),
        (1 << 100_000, False),
        (list(range(17)), False),
    ],
    ids=type,
)
def test_a_whole_argument_is_inlined_up_to_10_kb(group, puts, value, inlined):
    """The total of a container's values counts, in bytes."""
    group.call("hold", value)
    assert len(puts) == (not inlined)
