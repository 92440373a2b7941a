# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a restart: their deadlines, and calls of coroutines."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from fairlead_workergroup import CallCancelledError, CallTimeoutError, Restart, WorkerFailureError

from ..restarting import VALUE, die, is_restarting


def test_deadline_during_a_restart(make_group, tmp_path, eventually):
    """A call waits for a restart until its deadline, then reports it and sends nothing; the restart continues."""
    gate = tmp_path / "gate"
    group = make_group(restart=Restart(on_failure=True, method="load_when_open"), env_vars={"GATE": str(gate)})
    die(group, 1)
    with pytest.raises(CallTimeoutError, match="'pid' was not sent to its 2 workers"):
        group.call("pid", timeout=0.2)
    assert eventually(lambda: is_restarting(group))
    for view in (group, group.at(dp=1)):
        with pytest.raises(CallTimeoutError, match=r"A restart of rank\(s\) 1 continues") as caught:
            view.call("pid", timeout=0.2)
        assert caught.value.late == ()
    gate.touch()
    assert [state[1] for state in group.call("state", timeout=120).result()] == [0, 1]
    assert group.call("pid").called_workers == [0, 1]


def test_event_loop_during_a_restart(make_group, tmp_path, eventually):
    """Calls of a coroutine wait for a restart without blocking its event loop, and are sent in order.

    The restart ends when this coroutine opens the gate, so a call that blocks the loop would wait forever.
    """
    gate = tmp_path / "gate"
    group = make_group(restart=Restart(on_failure=True, method="load_when_open"), env_vars={"GATE": str(gate)})
    die(group, 1)

    async def main():
        waiting = [group.call("double", VALUE), group.call("note", config := {"lr": 1}), group.call("get_notes")]
        abandoned, cancelled, late = group.call("note", 2), group.call("note", 3), group.call("note", 4, timeout=0.3)
        items = group.call("count", 2)
        config["lr"] = 2
        assert not waiting[0].done()
        assert waiting[0].called_workers == [0, 1]
        assert cancelled.cancel() == []
        assert cancelled.done()
        with pytest.raises(CallCancelledError):
            await cancelled
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await abandoned
        with pytest.raises(CallTimeoutError, match="'note' was not sent to its 2 workers"):
            await late
        mapped = group.map("state_of", range(3))
        first = asyncio.create_task(anext(mapped))
        streamed = asyncio.create_task(anext(items.stream()))
        gathered = asyncio.gather(*waiting)
        with ThreadPoolExecutor() as threads:
            assert await asyncio.get_running_loop().run_in_executor(threads, eventually, lambda: is_restarting(group))
        assert not group.call("pid").done()
        gate.touch()
        doubled, _, noted = await asyncio.wait_for(gathered, 120)
        assert [float(value[0]) for value in doubled] == [2.0] * 2
        assert noted == [[{"lr": 1}]] * 2
        assert (await streamed).value == 0
        assert [(await first)[1], *[state[1] async for state in mapped]] == [0, 1, 0]
        assert [outcome.value async for outcome in group.call("raise_nothing")] == [None] * 2
        return abandoned, late

    abandoned, late = asyncio.run(main())
    for call, error in ((abandoned, CallCancelledError), (late, CallTimeoutError)):
        for ask in (call.result, call.wait, call.outcomes, lambda call=call: list(call), lambda call=call: call.refs):
            with pytest.raises(error):
                ask()
    assert group.call("get_notes").result() == [[{"lr": 1}]] * 2


def test_failed_restart_on_an_event_loop(make_group):
    """The awaited call raises the reason why it was not sent."""
    group = make_group((), [1], restart=Restart(on_failure=True))
    die(group, 1)

    async def main():
        call = group.call("pid", retries=1)
        with pytest.raises(WorkerFailureError, match="cannot start a second time"):
            await call
        with pytest.raises(WorkerFailureError, match="cannot start a second time"):
            call.result()
        assert call.done()
        assert call.cancel() == []

    asyncio.run(main())
