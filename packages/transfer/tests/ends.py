# SPDX-License-Identifier: Apache-2.0
"""Ends of a link in this process, without Ray: what a driver and its workers do, step by step."""

import asyncio
import sys
import types

import numpy as np

from fairlead_transfer._descriptions import Selection, check_dtypes, read_side
from fairlead_transfer._plan import reshard
from fairlead_transfer._remote.end import End
from fairlead_transfer._remote.entry import SHARED
from fairlead_transfer._remote.replies import Committed, Described, Fetched
from fairlead_transfer._routes import whole_tensors
from fairlead_transfer._tasks import make_tasks

REPLIES = {"describe": Described, "fetch": Fetched, "commit": Committed, "release": tuple}


class Worker:
    """Holds tensors, and counts what is done with them."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.events = []

    def weights(self):
        return self.tensors

    def note(self):
        self.events.append("noted")

    def fail(self):
        raise ArithmeticError("broken")

    def load(self, tensors):
        self.events.append(list(tensors))
        for name, value in tensors.items():
            self.tensors[name] = np.array(value)

    def load_half(self, tensors):
        if self.events:
            raise ArithmeticError("broken")
        self.load(tensors)


class Ends:
    """A source and a target of several ranks each.

    Args:
        sources: a user's object for each source rank, with a method `weights`.
        targets: the same for the target; with `apply`, objects with a method of that name.
        apply: the method that takes tensors.
        transport: by which all tensors go.
        nodes: of the source ranks, and of the target ranks.
        selection: keywords of `Selection`.
    """

    def __init__(self, sources, targets, *, apply=None, transport="shared_memory", nodes=None, **selection):
        self.shared = types.ModuleType(SHARED)
        self.shared.ends = {}
        sys.modules[SHARED] = self.shared
        self.workers = {"source": sources, "target": targets}
        # Every end has a link of its own, as every worker has a process of its own.
        self.ends = {
            (side, rank): End((f"link{rank}", side)) for side, all in self.workers.items() for rank in range(len(all))
        }
        self.shared.ends = {(f"link{rank}", side): end for (side, rank), end in self.ends.items()}
        self.apply = apply
        self.transport = transport
        self.nodes = nodes or (["node"] * len(sources), ["node"] * len(targets))
        given = {"rename": lambda name: name, "dtype": None, "exclude": (), **selection}
        self.selection = Selection(**given)
        self.epoch = 0

    def choose(self, source, target):
        """Return the transport of a pair of ranks; within a node, TCP is not needed."""
        near = self.nodes[0][source] == self.nodes[1][target]
        return "shared_memory" if near and self.transport == "tcp" else self.transport

    def close(self):
        """Drop everything that the ends hold."""
        for side, rank in self.ends:
            self.ask(side, rank, "close")

    def restart(self, side, rank):
        """Take a new end for a rank, as a worker that has been started again has."""
        self.ask(side, rank, "close")
        self.ends[side, rank] = self.shared.ends[f"link{rank}", side] = End((f"link{rank}", side))

    def ask(self, side, rank, operation, *args):
        result = self.ends[side, rank].serve(self.workers[side][rank], operation, args)
        return REPLIES[operation](*asyncio.run(result)) if asyncio.iscoroutine(result) else result

    def describe(self):
        """Return the replies of all ranks of both sides."""
        self.epoch += 1
        sources = [
            self.ask("source", rank, "describe", self.epoch, "weights", 0, None, 0, False, False)
            for rank in range(len(self.workers["source"]))
        ]
        targets = [
            self.ask("target", rank, "describe", self.epoch, "weights", 0)
            for rank in range(0 if self.apply else len(self.workers["target"]))
        ]
        return sources, targets

    def refuse(self):
        """Plan and stage; return what the first target rank refuses."""
        self.plan()
        (reply, *_) = self.fetch(self.stage(), 1)
        assert reply.outcome == ("refused" if reply.refused else "done")
        return reply.refused

    def plan(self):
        """Describe, and make the tasks."""
        self.described, targets = self.describe()
        refused = [reply.refused for reply in [*self.described, *targets] if reply.refused]
        assert not refused, refused
        held = read_side("source", [reply.tensors for reply in self.described], self.selection, renamed=True)
        if self.apply:
            wanted = whole_tensors(held, len(self.workers["target"]))
        else:
            wanted = read_side("target", [reply.tensors for reply in targets], self.selection, renamed=False)
        assert not check_dtypes(held, wanted, self.selection)
        plan = reshard(held.layouts, wanted.layouts, source_nodes=self.nodes[0], target_nodes=self.nodes[1])
        dtypes = {name: self.selection.travelling(dtype) for name, dtype in held.dtypes.items()}
        self.tasks = make_tasks(self.epoch, plan, held, wanted, dtypes, self.choose)
        return plan

    def stage(self, compares=True, fresh=False):
        """Return the replies of the source ranks."""
        return {
            rank: self.ask(
                "source",
                rank,
                "describe",
                self.epoch,
                "weights",
                self.described[rank].number,
                tasks,
                self.tasks.number,
                compares,
                fresh,
            )
            for rank, tasks in self.tasks.source.items()
        }

    def fetch(self, staged, version):
        """Return the replies of the target ranks."""
        nodes = self.nodes[1]
        reads = self.tasks.find_reads(self.tasks.target, nodes)
        channels = {rank: reply.channels for rank, reply in staged.items()}
        replies, relays = {}, {}
        for rank in sorted(self.tasks.target, key=lambda rank: rank not in reads):
            failed = [reply for reader in reads if (reply := replies.get(reader)) and reply.outcome != "done"]
            if failed and rank not in reads and self.tasks.target[rank]["sources"]:
                replies[rank] = failed[0]  # the driver gives up
                continue
            places, mapped = reads.get(rank, ()), relays.get(nodes[rank], {})
            options = version, self.tasks.target[rank], self.tasks.number, channels, places, False, mapped, 10.0
            replies[rank] = self.ask("target", rank, "fetch", self.epoch, *options)
            if rank in reads:
                relays[nodes[rank]] = replies[rank].relays or {}
        return [replies[rank] for rank in self.tasks.target]

    def commit(self, version, before=None, after=None, chunk_bytes=1 << 30):
        """Return the replies of the target ranks."""
        return [
            self.ask("target", rank, "commit", self.epoch, version, before, after, self.apply, chunk_bytes)
            for rank in range(len(self.workers["target"]))
        ]

    def send(self, version, **options):
        """Do all of it; return the bytes that were fetched."""
        self.plan()
        fetched = self.fetch(self.stage(), version)
        assert all(reply.outcome == "done" for reply in fetched), fetched
        committed = self.commit(version, **options)
        assert [(reply.outcome, reply.version) for reply in committed] == [("done", version)] * len(committed)
        return sum(reply.length for reply in fetched)
