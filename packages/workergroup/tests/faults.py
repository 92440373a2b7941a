# SPDX-License-Identifier: Apache-2.0
"""Faults, limits and moments of a group that have no public name, each named after what a user would see.

Tests use these functions and no private module. What a function changes lasts as long as the `pytest.MonkeyPatch` that
it is given.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import ray
from ray.experimental.locations import get_local_object_locations

from fairlead_placement import PlacementError, extension
from fairlead_placement._nodes import head as placement_head
from fairlead_workergroup import _replies as replies
from fairlead_workergroup import _status, _world
from fairlead_workergroup._calls import handle
from fairlead_workergroup._membership import (
    change,
    core,
    losses,
    operations,
    owned,
    provision,
)
from fairlead_workergroup._observe import (
    board,
    head,
    progress_bar,
)
from fairlead_workergroup._remote import process, record
from fairlead_workergroup._start import worker_class

Patch = pytest.MonkeyPatch

# Limits.


def set_clock(patch: Patch, clock: Any) -> None:
    """Let the deadlines of this process be those of a clock."""
    patch.setattr(provision, "time", clock)
    patch.setattr(_world.World, "now", clock.monotonic)


def limit_requests_to_the_head(patch: Patch, seconds: float) -> None:
    """Let nothing wait longer than this for Ray's head."""
    for module, name in (
        (placement_head, "LEAST_S"),
        (placement_head, "ALIVE_S"),
        (placement_head, "HEAD_S"),
        (head, "REQUEST_S"),
        (handle, "HEAD_S"),
        (losses, "LOOK_S"),
    ):
        patch.setattr(module, name, seconds)


def limit_starts_of_single_workers(patch: Patch, seconds: float) -> None:
    """Let a builder wait this long for the worker that it makes."""
    patch.setattr(worker_class, "START_S", seconds)


def limit_ends_of_workers(patch: Patch, seconds: float) -> None:
    """Let a shutdown wait this long for a worker before it kills the process."""
    patch.setattr(owned, "WORKER_GRACE_S", seconds)


def limit_ends_of_children(patch: Patch, seconds: float) -> None:
    """Let the processes that a worker has started have this long to end before they are killed."""
    patch.setattr(process, "CHILD_GRACE_S", seconds)


def report_late_workers_every(patch: Patch, seconds: float) -> None:
    """Let a wait for workers look at this interval at the clock, and at the workers that are late."""
    patch.setattr(replies, "REPORT_EVERY_S", seconds)


def longest_shutdown(timeout_s: float) -> float:
    """Return how long a shutdown with a timeout may take while Ray's head is silent."""
    return timeout_s + owned.LAST_LOOK_S


# Ray's head, and the agents of nodes.


def head_is_silent() -> bool:
    """Return whether a request to Ray's head is late in this process."""
    return placement_head.head_is_silent()


def publish(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is on a board for a group that is described as plain data."""
    return {board.KEY + about["group_id"]: {"schema": board.SCHEMA, **about}}


def let_boards_have(patch: Patch, boards: Mapping[Any, Mapping[str, Any] | Exception]) -> None:
    """Let the cluster have these boards, or errors in place of their answers."""
    patch.setattr(board, "find_boards", lambda *_: list(boards))
    patch.setattr(board, "read_boards", lambda found, prefix, timeout_s: {one: boards[one] for one in found})


def read_published(patch: Patch, group_id: str) -> Any:
    """Return the group with an id as a handle finds it, without waiting for one that is about to be published."""
    patch.setattr(board, "PUBLISHED_AGAIN_S", 0.0)
    return board.read_group(group_id, "01", "a")


def find_groups() -> list[Any]:
    """Return the groups of all jobs, as those who look from outside see them."""
    return list(board.find_groups())


def drain_without_agents(patch: Patch, nodes: set[str]) -> list[str]:
    """Let nodes drain on which Ray starts no task; return the list of the requests to them."""
    silent: list[str] = []

    def run_on_nodes(function: Any, asks: Any, **options: Any) -> Any:
        silent.extend(node_id for node_id in asks if node_id in nodes)
        answers = extension.run_on_nodes(function, asks, **options)
        return answers | {node_id: PlacementError("not schedulable") for node_id in asks if node_id in nodes}

    patch.setattr(owned, "run_on_nodes", run_on_nodes)
    patch.setattr(owned, "draining_nodes", lambda: frozenset(nodes))
    return silent


def keep_processes_alive(patch: Patch) -> None:
    """Let the processes of workers survive every signal, and nothing wait for their ends for long."""
    for name, value in (("CHILD_GRACE_S", 0.1), ("KILLED_S", 0.1), ("send_signal", lambda processes, number: None)):
        patch.setattr(process, name, value)


def let_nodes_report(patch: Patch, rows: Mapping[int, Mapping[str, Any] | None]) -> None:
    """Let the nodes answer a look at workers with these rows, given by rank; without one, a node is silent."""
    patch.setattr(_status, "ask_nodes", lambda workers, *_: [rows.get(worker.rank) for worker in workers])


@contextlib.contextmanager
def unreadable_record(pid: int) -> Iterator[None]:
    """Let the record of what a worker does look as if the worker wrote it all the time."""
    file = record.open_record(pid)
    page = os.pread(file, record.CANCELLED_AT, 0)
    for at in record.STATES_AT:
        os.pwrite(file, b"x" * 8, at + struct.calcsize(record.STATE) - 8)
    try:
        yield
    finally:
        os.pwrite(file, page, 0)
        os.close(file)


# What calls store and send.


def note_puts(patch: Patch) -> list[int]:
    """Return a list that gets the size in bytes of each value that this process stores from now on."""
    sizes: list[int] = []
    put = ray.put

    def put_and_note(value: Any, **options: Any) -> Any:
        ref = put(value, **options)
        sizes.append(get_local_object_locations([ref])[ref]["object_size"])
        return ref

    patch.setattr(ray, "put", put_and_note)
    return sizes


def note_requests(patch: Patch) -> list[str]:
    """Return a list that gets the name of the method of each request that a call sends to a worker from now on."""
    names: list[str] = []
    submit = core.Core._submit

    def submit_and_note(own: Any, call: Any) -> Any:
        sent = submit(own, call)
        if isinstance(sent, core.Sent):
            names.extend([call.method.name] * len(sent.replies))
        return sent

    patch.setattr(core.Core, "_submit", submit_and_note)
    return names


@contextlib.contextmanager
def changing(group: Any) -> Iterator[None]:
    """Let calls of a group wait, as while it begins an epoch."""
    group._core.begin_change()
    try:
        yield
    finally:
        group._core.end_change()


def find_unfinished(call: Any) -> list[int]:
    """Return the positions of the workers that have not finished a call."""
    return list(call._arrivals.pending())


# Moments at which something else happens.


def act_before(patch: Patch, owner: Any, name: str, act: Callable[[], object]) -> None:
    """Let `act` run before each call of a function."""
    function = getattr(owner, name)

    def act_and_run(*args: Any, **options: Any) -> Any:
        act()
        return function(*args, **options)

    patch.setattr(owner, name, act_and_run)


def act_in_steps(patch: Patch, act: Callable[[str], object]) -> None:
    """Let `act` run before these steps of a change of a group, with the name that the internals give it."""
    end, plan_restart = change._Run._end, operations._find_lost

    def act_and_end(own: Any, ranks: Sequence[int]) -> Any:
        if ranks:  # no process ends in a resize that starts others only
            act("end, construct")
        return end(own, ranks)

    def act_and_plan(*args: Any) -> Any:
        act("plan")
        return plan_restart(*args)

    patch.setattr(change._Run, "_end", act_and_end)
    patch.setattr(operations, "_find_lost", act_and_plan)
    act_before(patch, change._Run, "_find_late", partial(act, "quiesce"))
    act_before(patch, change._Run, "deliver", partial(act, "deliver"))


def act_before_calls_are_awaited(patch: Patch, act: Callable[[], object]) -> None:
    """Let `act` run when a change of a group begins to wait for the calls that were made before it."""
    act_before(patch, change._Run, "_find_late", act)


def act_while_a_change_awaits(patch: Patch, ranks: list[int], act: Callable[[], object]) -> None:
    """Let `act` run whenever a change of a group waits for these ranks, and for no others."""
    wait_for = change.wait_for

    def wait_and_act(futures: Mapping[Any, Any], until: Any, check: Callable[[], Any], **options: Any) -> Any:
        keys = {future: key for key, future in futures.items()}

        def act_and_check() -> Any:
            late = [keys[one] for one in ray.wait(list(keys), num_returns=len(keys), timeout=0)[1]]
            if sorted(key if isinstance(key, int) else key[0] for key in late) == ranks:
                act()
            return check()

        return wait_for(futures, until, act_and_check, **options)

    patch.setattr(change, "wait_for", wait_and_act)


def act_before_a_call_is_sent(patch: Patch, act: Callable[[], object]) -> None:
    """Let `act` run when a call has been checked, and before Ray gets it."""
    act_before(patch, replies, "submit", act)


def act_while_a_start_awaits(patch: Patch, ranks: list[int], act: Callable[[], object]) -> None:
    """Let `act` run whenever a start of workers waits for these ranks, and for no others."""

    class Bar(progress_bar.Bar):
        def show(self, done: int, *, waiting_for: Sequence[int] = ()) -> None:
            if list(waiting_for) == ranks:
                act()

    patch.setattr(provision, "Bar", Bar)


def limit_waits_of_handles(patch: Patch, seconds: float) -> None:
    """Let handles wait only this long for a publication that is on its way."""
    patch.setattr(handle, "RENEWED_S", seconds)


def find_running(pids: Iterable[int]) -> list[int]:
    """Return the processes of this machine that have not ended."""
    return [pid for pid in pids if process.start_tick(pid) >= 0]


# The state of a group.


@contextlib.contextmanager
def restarting(group: Any, rank: int) -> Iterator[None]:
    """Let a group record that a rank is being restarted."""
    group._core.advance(restarting=(rank,))
    try:
        yield
    finally:
        group._core.advance(restarting=())


def publish_next_epoch(group: Any) -> None:
    """Publish the next epoch of a group, of which its workers do not know."""
    now = group._core.now
    group._core.commit(replace(now, group_epoch=now.group_epoch + 1))
    group._provisioner.publish()
