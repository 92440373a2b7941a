# SPDX-License-Identifier: Apache-2.0
"""Tests of generator methods, whose items stream, and of async methods."""

import asyncio
import functools

import pytest
import ray

from fairlead_placement import RayVirtualCluster
from fairlead_workergroup import (
    CallCancelledError,
    CallTimeoutError,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupError,
)
from fairlead_workergroup.testing import kill

from ..calling import wait_for


class TestStreams:
    def test_items_by_arrival(self, group):
        """The items of all workers arrive interleaved, each with its rank, in the order of its worker."""
        outcomes = list(group.call("items", 3, pause_s=0.1).stream())
        assert sorted(outcome.value for outcome in outcomes) == [100 * rank + i for rank in range(8) for i in range(3)]
        assert {outcome.rank for outcome in outcomes[:8]} != {outcomes[0].rank}
        for rank in range(8):
            assert [o.value for o in outcomes if o.rank == rank] == [100 * rank + i for i in range(3)]

    def test_as_results(self, group):
        """`result()` has a list of items for each worker; the classic methods return them flat, or proxies."""
        call = group.call("items", 2, collect="dp")
        assert call.result() == call.result() == [[500, 501], [0, 1]]
        assert call.get_results() == [500, 501, 0, 1]
        proxies = group.call("items", 2, collect="dp").get_results(return_generators_as_proxies=True)
        assert [ray.get(ref) for ref in proxies[0]] == [500, 501]

    def test_items_are_handed_out_once(self, group):
        """Streamed items are not kept; a new stream continues where the last one ended."""
        call = group.at(dp=0, tp=0).call("items", 4)
        stream = call.stream()
        assert [next(stream).value, next(stream).value] == [500, 501]
        assert [outcome.value for outcome in call.stream()] == [502, 503]

    def test_workers_are_served_in_turn(self, group):
        """Workers that always have an item ready are served in turn, whatever their ranks."""
        call = group.at(dp=0, tp=slice(0, 2)).call("items", 12)
        assert call.wait(60)
        ranks = [outcome.rank for _, outcome in zip(range(12), call.stream(), strict=False)]
        assert (ranks.count(5), ranks.count(1)) == (6, 6)

    def test_no_result_after_streaming(self, group):
        """A result lacks the items that stream() has handed out, so it is refused; without any, it is complete."""
        call = group.at(dp=0).call("items", 2)
        assert next(call.stream()).value in (100, 200, 500, 600)
        with pytest.raises(WorkerGroupError, match=r"stream\(\) has handed out 1 item\(s\) of this call"):
            call.result()
        assert len(list(call.stream())) == 7
        with pytest.raises(WorkerGroupError, match="are not kept"):
            call.result()
        with pytest.raises(WorkerGroupError, match="are not kept"):
            asyncio.run(wait_for(call))
        assert [type(outcome.error) for outcome in call.outcomes()] == [WorkerGroupError] * 4
        empty = group.at(dp=0).call("items", 0)
        assert list(empty.stream()) == []
        assert empty.result() == [[]] * 4

    def test_async_for(self, group, tmp_path):
        """In a coroutine the loop keeps running while items are made; turns and errors are as with `for`."""

        async def main():
            gate = tmp_path / "gate"
            call = group.call("items", 3)
            outcomes = [outcome async for outcome in call.stream()]
            for rank in range(8):
                assert [o.value for o in outcomes if o.rank == rank] == [100 * rank + i for i in range(3)]
            waiting = anext(group.call("items_after", str(gate), timeout=60).stream())
            opened = asyncio.create_task(asyncio.to_thread(gate.touch))  # never done if the loop is blocked
            assert (await waiting).value == 1
            await opened
            stream = (failing := group.at(dp=0, tp=0).call("items_then_fail", 1)).stream()
            assert (await anext(stream)).value == 0
            with pytest.raises(KeyError, match="no more") as caught:
                await anext(stream)
            assert caught.value.__notes__[0].startswith("raised by rank 5")
            with pytest.raises(KeyError, match="no more"):
                await failing
            held = tmp_path / "held"
            late = group.at(dp=0, tp=0).call("items_after", str(held))
            with pytest.raises(CallTimeoutError):
                await anext(late.stream(timeout=0.2))
            held.touch()
            assert [outcome.value async for outcome in late.stream()] == [1]  # nothing was lost

        asyncio.run(main())

    def test_a_timeout_is_of_the_next_item(self, group, clock):
        """A stream has no time limit of its own: its timeout holds for the next item."""
        items = []
        for outcome in group.at(dp=0, tp=0).call("items", 4).stream(timeout=600):
            items.append(outcome.value)
            clock.skip(400)
        assert items == [500, 501, 502, 503]

    def test_errors(self, group, gate):
        """An error in the middle is raised at its place with its type."""
        call = group.at(dp=0, tp=0).call("items_then_fail", 2)
        stream = call.stream()
        assert [next(stream).value, next(stream).value] == [0, 1]
        for again in (lambda: next(stream), lambda: next(call.stream()), call.result):
            with pytest.raises(KeyError, match="no more") as caught:
                again()
            assert caught.value.__notes__[0].startswith("raised by rank 5 (dp=0, tp=0) on node ")
        assert isinstance(call.outcomes()[0].error, KeyError)
        with pytest.raises(KeyError, match="no more"):
            group.call("items_then_fail", 2).result()
        with pytest.raises(TypeError, match="'rank' is not a generator method"):
            group.call("rank").stream()
        with pytest.raises(CallTimeoutError):
            list(group.at(dp=0, tp=0).call("items_after", str(gate)).stream(timeout=0.2))
        gate.touch()

    def test_a_death(self, doomed):
        """The death of a worker does not end its stream silently."""
        with pytest.raises(WorkerFailureError, match="rank 1"):
            list(doomed.call("items_then_die", [1]).stream())
        classic = doomed.at(dp=0).call("items_then_die", [0])
        with pytest.raises(WorkerFailureError, match="rank 0"):
            doomed.get_all_worker_results([classic.futures[0]])

    def test_one_failure_ends_the_wait_for_generators(self, doomed, eventually):
        """A rank that fails is reported while others still wait, by the classic methods too."""
        with pytest.raises(CallTimeoutError, match="1 of 1 workers have not finished 'endless_items'"):
            doomed.at(dp=1).call("endless_items").result(timeout=0.3)  # items that keep coming are no end
        kill(doomed, 1)
        assert eventually(lambda: doomed.restart_failed_workers() == [1])  # once Ray knows
        failing = doomed.call("items_that_wait", [1])
        with pytest.raises(KeyError, match="1") as caught:
            failing.result()
        assert caught.value.__notes__[0].startswith("raised by rank 1 (dp=1, tp=0)")
        lost = doomed.at(dp=1).call("items_that_wait", [])
        kill(doomed, 1)
        with pytest.raises(WorkerFailureError, match="rank 1"):
            doomed.get_all_worker_results([failing.futures[0], lost.futures[0]])


class TestAsync:
    def test_overlapping(self, local_ray, eventually, wait_until_running):
        """With async_communication async methods overlap and can be cancelled, and all other kinds work as before."""
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Overlapping, async_communication=True) as group,
        ):
            waiting = group.call("wait_for_it")
            assert group.call("let_go").result() == ["went", "went"]  # while the other one runs
            assert waiting.result() == ["done", "done"]
            assert group.call("plain", 3).result() == [3, 3]
            assert group.call("items", 3).result() == [[0, 1, 2]] * 2
            assert group.call("async_items", 3).result() == [[0, 1, 2]] * 2
            assert group.call("async_items", 3, discard=True).result() is None
            assert group.call("plain", group.call("plain", 4)).result() == [[4, 4]] * 2
            assert group.call("late", group.call("plain", 4)).result() == [[4, 4]] * 2
            waiting = group.call(wait_in_a_function)
            assert group.call(lambda worker: worker.other.set()).result() == [None, None]
            assert waiting.result() == ["waited", "waited"]
            assert group.call(Overlapping.late, 4).result() == [4, 4]
            endless = group.call("forever")
            wait_until_running(group, "forever", 0, 1)
            with pytest.raises(CallTimeoutError, match="in 'forever' for"):
                endless.result(timeout=0.1)
            endless.cancel()
            with pytest.raises(CallCancelledError):
                endless.result()
            # The cancellation reaches the workers some time after the driver knows of it.
            assert eventually(lambda: group.call("cancelled").result() == [True, True])
            assert group.shutdown(cleanup_method="let_go")


async def wait_in_a_function(worker):
    await worker.other.wait()
    return "waited"


def timed(function):
    """Return a decorated function, as a timer or a logger does it."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def hiding(function):
    """Return a decorated function that does not show what it decorates."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def collected(function):
    """Return a decorated generator function that runs it."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return list(function(*args, **kwargs))

    return wrapper


class Decorated:
    """A worker whose decorated methods have other kinds than they seem to have."""

    def __init__(self):
        self.made = []

    @timed
    def items(self, count):
        yield from range(count)

    @timed
    async def async_items(self, count):
        for i in range(count):
            yield i

    @timed
    async def coroutine(self):
        return "value"

    @hiding
    async def hidden_coroutine(self):
        return "value"

    @hiding
    def hidden_items(self):
        yield 1

    def returned_items(self):
        def count():
            try:
                yield 1
            finally:
                self.made.append("closed")

        items = count()
        next(items)
        return items

    async def returned_from_async(self):
        return (i for i in range(3))

    @hiding
    async def hidden_async_items(self):
        yield 1

    def what_was_made(self):
        return self.made

    @collected
    def collected_items(self):
        yield 1


def check_decorated(group):
    """Check the kinds of the methods of one `Decorated`."""
    assert group.call("items", 3).result() == [[0, 1, 2]]
    assert [outcome.value for outcome in group.call("items", 3).stream()] == [0, 1, 2]
    assert group.call("async_items", 3).result() == [[0, 1, 2]]
    assert group.call("coroutine").result() == group.call("hidden_coroutine").result() == ["value"]
    assert group.call("collected_items").result() == [[1]]
    for method in ("hidden_items", "returned_items", "returned_from_async", "hidden_async_items"):
        with pytest.raises(TypeError, match=f"{method}' returned a generator.*`yield from"):
            group.call(method).result()
    with pytest.raises(TypeError, match="yield from"):
        group.call("returned_items", discard=True).result()
    assert group.call("what_was_made").result() == [["closed", "closed"]]


class TestDecorated:
    @pytest.mark.parametrize("async_communication", [False, True])
    def test_kinds(self, local_ray, async_communication):
        """A decorated method's result is streamed or awaited if its kind is visible, else refused with advice."""
        with (
            RayVirtualCluster([1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Decorated, async_communication=async_communication) as group,
        ):
            check_decorated(group)


class Overlapping:
    """A worker whose methods wait for each other."""

    def __init__(self):
        self.event, self.other = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def wait_for_it(self):
        await self.event.wait()
        return "done"

    async def let_go(self):
        self.event.set()
        return "went"

    async def forever(self):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def cancelled(self):
        return self.was_cancelled

    async def late(self, value):
        await asyncio.sleep(0.01)
        return value

    def plain(self, value):
        return value

    def items(self, count):
        yield from range(count)

    async def async_items(self, count):
        for i in range(count):
            await asyncio.sleep(0.001)
            yield i
