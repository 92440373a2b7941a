# SPDX-License-Identifier: Apache-2.0
"""Tests of arguments that are refused before anything is sent to real workers."""

import threading

import pytest

from fairlead_workergroup import Shard


def test_refused_before_anything_is_sent(group):
    """The error names the argument and is short; no worker is called."""
    before = group.inspect().statistics.requests
    lock = threading.Lock()
    for match, args, kwargs in [
        (
            r"^argument 'value' of 'total': a lock cannot be pickled: TypeError: cannot pickle '_thread.lock'",
            [lock],
            {},
        ),
        (r"^argument 'value' of 'total': its part \[0\]", [], {"value": [lock]}),
        (r"^argument 'value' of 'total': its part \[1\] of type Shard", [[1, Shard([1, 2], "dp")]], {}),
        (r"^argument 'value' of 'total': its part \['a'\] of type Call", [{"a": group.call("rank")}], {}),
    ]:
        with pytest.raises(TypeError, match=match) as caught:
            group.call("total", *args, **kwargs)
        assert len(str(caught.value).splitlines()) == 1
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    with pytest.raises(TypeError, match="argument 0 of 'echo'"):
        group.call("echo", lock)
    assert group.inspect().statistics.requests == before + 8  # of "rank"


@pytest.mark.by_processes
def test_refused_by_the_classic_methods(group):
    """The classic methods refuse them too."""
    before = group.inspect().statistics.requests
    with pytest.raises(TypeError, match="argument 'seconds' of 'sleep': its part"):
        group.run_all_workers_single_data("sleep", [Shard([1, 2], "dp")])
    assert group.inspect().statistics.requests == before


def test_a_large_container_is_stored_once(group):
    """Stored values are counted, and the object store has one copy for all workers."""
    call = group.call("echo", ["x" * 10_000] * 16)
    assert (call.statistics().puts, call.statistics().requests) == (1, 8)
    assert call.statistics().bytes_put > 10_000
    assert call.result()[3] == ((["x" * 10_000] * 16,), {})
