# SPDX-License-Identifier: Apache-2.0
"""What an attempt says when its rounds fail; the ends run in this process."""

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass

import numpy as np
import pytest

from fairlead_transfer import LayoutMismatchError, TransferError
from fairlead_transfer._attempt import Attempt
from fairlead_transfer._descriptions import Selection
from fairlead_transfer._remote.end import End
from fairlead_transfer._routes import Router
from fairlead_transfer._side import EndState, Side, States
from fairlead_workergroup import Outcome

from ..ends import Worker


@dataclass(frozen=True)
class Process:
    """A member of such a side."""

    rank: int
    node_id: str
    key: int = 0
    lost: None = None


@dataclass
class Here(Side):
    """A side whose workers are objects of this process, in `group`; requests run when they are made."""

    def __post_init__(self):
        self.members = tuple(Process(rank, self.link) for rank in range(len(self.group)))
        self.ends = {rank: EndState((rank, 0)) for rank in range(len(self.group))}
        self.served = [End((self.link, self.name)) for _ in self.group]

    def look(self):
        """Nothing changes here."""

    def ask(self, ranks, operation, arguments, *, alone_s=None, first=None):
        return {self.members[rank]: self.run(rank, operation, arguments(rank)) for rank in ranks}

    def run(self, rank, operation, args):
        try:
            return Outcome(rank, {}, asyncio.run(self.served[rank].serve(self.group[rank], operation, args)))
        except ArithmeticError as error:
            return Outcome(rank, {}, error=error)

    def wait(self, requests, timeout_s, *, all_of_them=False):
        return {member.rank: reply for member, reply in requests.items()}

    def cancel(self, requests, replies):
        """All requests have replies."""


def make_attempt(source, target):
    """Return an attempt to send version 1 from a side to another one."""
    router = Router(source, target, Selection(lambda name: name, None, ()), "auto")
    options = {"deadline": time.monotonic() + 60, "check_replicas": "first"}
    return Attempt(source, target, router, States(target), itertools.count(1).__next__, 1, **options)


def make_sync(*workers):
    """Return an attempt in which target ranks bring version 1 to others."""
    return make_attempt(Here("replica", workers, "a", "weights"), Here("target", workers, "a", "weights"))


def test_replicas_of_a_sync_are_compared():
    """Target ranks that hold the same box with different bytes are named; nothing is brought to others."""
    target = Worker({"w": np.zeros(4)})
    attempt = make_sync(Worker({"w": np.ones(4)}), Worker({"w": np.full(4, 2.0)}), target)
    with pytest.raises(LayoutMismatchError, match="the same box with different bytes"):
        attempt.move_from_replicas([2], [0, 1])
    assert attempt.target.served[2]._staged is None


def test_failures_of_a_sync_are_of_the_target():
    """Ranks that hold a version, and fail when they send it, are ranks of the target."""
    failing = Worker({"w": np.ones(4)})
    failing.weights = failing.fail
    with pytest.raises(TransferError) as caught:
        make_sync(failing, Worker({"w": np.zeros(4)})).move_from_replicas([1], [0])
    assert [(failure.side, failure.rank) for failure in caught.value.failures] == [("target", 0)]
    with pytest.raises(LayoutMismatchError) as refused:
        make_sync(Worker({"w": "text"}), Worker({"w": np.zeros(4)})).move_from_replicas([1], [0])
    (mismatch,) = refused.value.mismatches
    assert (mismatch.source, mismatch.target) == ("", "rank 0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_port_that_cannot_be_reached(monkeypatch, ranks):
    """The error says that the move has failed, and which transport needs no port."""

    def refuse(address, timeout):
        raise OSError("No route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    sources = [Worker({"w": np.ones(4)}) for _ in range(ranks)]
    attempt = make_attempt(
        Here("source", sources, "a", "weights"), Here("target", [Worker({"w": np.zeros(4)})], "b", "weights")
    )
    with pytest.raises(TransferError, match=r"No route to host.*give the link transport='object_store'") as caught:
        attempt.move_all()
    assert caught.value.phase == "move"
