# SPDX-License-Identifier: Apache-2.0
"""The items of a map, without Ray."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from fairlead_workergroup._calls import map as item_map
from fairlead_workergroup._calls.map import ItemMap, MapOptions
from fairlead_workergroup._replies import ResultStream
from fairlead_workergroup._start.worker_class import Method


class Arrivals:
    """What has come back of a call that has been sent, and never ends."""

    def __init__(self, core, sent, cancelled):
        self.sent = SimpleNamespace(replies=[sent], call=SimpleNamespace(deadline=None))
        self.check_late = None


def wait_for_news(futures, deadline, check_late, turn_s):
    return {}


def test_a_task_that_is_cancelled_while_an_item_waits_to_be_sent(monkeypatch):
    """The item, which another thread sends when a change of the group ends, is cancelled too (seam: the sending)."""
    waits, goes_on, cancelled = threading.Event(), threading.Event(), []

    def send(call):
        waits.set()
        assert goes_on.wait(60)
        return call

    monkeypatch.setattr(item_map, "prepare_call", lambda core, method, recipients, args, kwargs, options: args[0])
    monkeypatch.setattr(item_map, "Arrivals", Arrivals)
    monkeypatch.setattr(item_map, "wait_for_news", wait_for_news)
    monkeypatch.setattr(item_map, "cancel", lambda core, sent, method, *, force: cancelled.extend(sent))
    worker_class = SimpleNamespace(method=lambda name: Method(name, "plain", None))
    core = SimpleNamespace(
        worker_class=worker_class,
        send=send,
        connection=SimpleNamespace(check=lambda: None, is_open=True),
    )
    options = MapOptions("round_robin", move_items=False)
    results = ResultStream(ItemMap(core, None, [0], "work", ["an item"], options).results)

    async def give_up():
        task = asyncio.ensure_future(anext(results))
        await asyncio.to_thread(waits.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    asyncio.run(give_up())
    assert cancelled == ["an item"]
