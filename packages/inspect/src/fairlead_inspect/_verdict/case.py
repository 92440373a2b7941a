# SPDX-License-Identifier: Apache-2.0
"""One job of a snapshot while it is judged: its waits, its ages, its names, and findings about its processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model import Child, Confidence, Evidence, Finding, Fleet, Frame, Kind, Named, Snapshot, Suspect, Waiting
from .libraries import PACKAGES, is_infrastructure, starts_child, waits_for_child
from .positions import OFTEN_PER_S, Position, find_own
from .waits import Graph, Wait, driver_key

# What the kernel says of a thread that waits on purpose (see `_node.waits`).
SLEEP, INPUT = "time.sleep", "its standard input"
RAN, CALLED, WAITED = "last run of its thread", "start of its call", "the first of those that wait"
_MOST_NAMED = 256
_UNREAD = Position("unread")


@dataclass(frozen=True)
class Case:
    """A job of a snapshot, and the seconds after which a process is late."""

    snapshot: Snapshot
    graph: Graph
    after_s: float

    @property
    def driver(self) -> str:
        """The key of the driver."""
        return driver_key(self.graph.job.job_id)

    @property
    def since(self) -> float:
        """The moment before which a late process has stood."""
        return self.snapshot.looked_at - self.after_s

    # Facts about processes.

    def at(self, key: str) -> Position:
        """Return where a process stands."""
        return self.graph.positions.get(key, _UNREAD)

    def is_infrastructure(self, key: str) -> bool:
        """Return whether an actor belongs to a library and runs no code of the job."""
        return (actor := self.graph.actors.get(key)) is not None and is_infrastructure(actor)

    def call_age(self, key: str) -> float | None:
        """Return for how long the oldest call that runs in a process does so; None without one."""
        began = self.graph.call_began(key)
        return None if began is None else self.snapshot.looked_at - began

    def count_calls(self, key: str) -> int:
        """Return how many calls run in a process."""
        return sum(
            key in (one.actor_id, f"task:{one.task_id}") for one in self.graph.tasks.values() if one.state == "RUNNING"
        )

    def age(self, key: str) -> tuple[float | None, str]:
        """Return for how long a process has stood where it stands, and what says so; None if that is not known.

        A thread that rests says it itself, and a child that it waits for more. One that polls has waited since its call
        began, as one that rests where the kernel does not say when it ran. One that spins has no age, since a long
        computation looks the same.
        """
        at = self.at(key)
        if (held := self.holding_child(key)) is not None and held[0].since_s is not None:
            return held[0].since_s, "last run of its child"
        rests = at.motion in ("still", "disk", "stopped")
        if rests and at.since_s is not None:
            return at.since_s, RAN
        return (self.call_age(key), CALLED) if rests or at.motion == "waking" else (None, "")

    def sleeps(self, key: str) -> bool:
        """Return whether a process sleeps, waits for a person, or has traffic where it stands: it waits on purpose."""
        thread = self.at(key).thread
        window_s = self.graph.processes[key].window_s if key in self.graph.processes else 1.0
        return thread is not None and (
            thread.waits_on in (SLEEP, INPUT) or (thread.switches or 0) > OFTEN_PER_S * window_s
        )

    def waited(self, wait: Wait) -> float | None:
        """Return for how long all members have waited in a collective.

        A rank that sleeps there says so itself. One that spins or wakes up has waited at most since its call began.
        """
        at = {key: self.at(key) for key in wait.waiters}
        if any(one.motion not in ("still", "waking", "spinning") for one in at.values()):
            return None
        still = [one.since_s for one in at.values() if one.motion == "still" and one.since_s is not None]
        calls = [age for key in at if (age := self.call_age(key)) is not None]
        return min(still or calls, default=None)

    def upstream(self, keys: Iterable[str]) -> set[str]:
        """Return all processes that wait for some, directly or not, without those themselves."""
        ends = {*keys}
        waiters = {key for wait in self.graph.waits for key in wait.waiters if wait.kind != "calls"}
        return {key for key in waiters - ends if self.graph.reach([key]) & ends}

    def moving(self) -> list[str]:
        """Return the processes with code of the job that were seen to make progress."""
        waits = self.graph.waiters()
        return [
            key
            for key, at in self.graph.positions.items()
            if (at.motion == "moving" or (at.busy_elsewhere and at.kind not in ("idle", "opaque") and key not in waits))
            and not self.is_infrastructure(key)
        ]

    # Words.

    def name(self, key: str) -> str:
        """Return how people call a process."""
        if key.startswith("driver:"):
            return "driver"
        if (task := self.graph.tasks.get(key.removeprefix("task:"))) is not None:
            return f"task {task.name}"
        there, actor = self.graph.fleet_of(key), self.graph.actors.get(key)
        kind = actor.class_name if actor else key[:8]
        if there is None:
            return kind + (f" {actor.name}" if actor and actor.name else "")
        number = f"rank {there[1].rank}" if there[1].rank is not None else f"#{there[1].ordinal}"
        return f"{there[0].name} {number}"

    def describe_place(self, key: str) -> str:
        """Return what a process waits for in the kernel, as a clause, with a child that may hold it up."""
        at = self.at(key)
        text = f", it waits for {at.thread.waits_on}" if at.thread is not None and at.thread.waits_on else ""
        text = text.replace("it waits for time.sleep", "it stands in time.sleep")
        if (held := self.holding_child(key)) is not None:
            child, frame = held
            file = frame.file.rpartition("/")[2]
            text += f"; its child process {child.pid} stands in {file}:{frame.line} {frame.function}"
            text += f" and waits for {child.waits_on}" if child.waits_on else ""
        return text

    def holding_child(self, key: str) -> tuple[Child, Frame] | None:
        """Return the child that a process waits for and that stands in code of the job, and the frame where it does."""
        at, process = self.at(key), self.graph.processes.get(key)
        if process is None or at.thread is None or not any(map(waits_for_child, at.thread.stack[:8])):
            return None
        for child in process.children:
            # Below its start, a child that was forked has the frames of its parent.
            ends = (number for number, frame in enumerate(child.stack) if starts_child(frame))
            frame = find_own(child.stack[: next(ends, len(child.stack))])
            if frame is not None and not child.ticks and not PACKAGES.search(frame.file):
                return child, frame
        return None

    # Findings.

    def suspect(self, key: str, text: str) -> Suspect:
        """Return a process that may be what a job waits for."""
        process, actor, at = self.graph.processes.get(key), self.graph.actors.get(key), self.at(key)
        since_s = self.age(key)[0]
        return Suspect(
            self.name(key),
            process.pid if process else actor.pid if actor else 0,
            self.address(key),
            _show_place(at),
            self.call_age(key) if since_s is None else since_s,
            text + self.describe_place(key),
        )

    def address(self, key: str) -> str:
        """Return the address of the node of a process."""
        process = self.graph.processes.get(key)
        return next((one.address for one in self.snapshot.nodes if process and one.node_id == process.node_id), "")

    def blame(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, since: tuple[float | None, str],
        fact: Evidence, *, sure: bool = False,
    ) -> Finding:  # fmt: skip
        """Return a finding that blames some processes."""
        evidence = [fact]
        if wait is not None and wait.fleet is not None:
            source = next((one.source for one in wait.fleet.members if one.key in keys[:1]), "")
            how = f"by {wait.fleet.rule}" + (f", rank from {source}" if source else "")
            evidence.insert(0, Evidence("worker set", f"{how} ({wait.fleet.confidence})"))
        if (step := self.snapshot.labels.get(keys[0], {}).get("step")) is not None:
            evidence.append(Evidence("group", f"its last step is {step}"))
        if since[0] is not None and kind == "late":
            evidence.append(Evidence(since[1], f"{since[0]:.1f} s ago", since[0]))
        return self.say(
            kind, keys, text, wait, confidence="certain" if sure else "likely", blames=True, since_s=since[0],
            since_source=since[1], evidence=tuple(evidence),
        )  # fmt: skip

    def counts(self, key: str) -> Evidence:
        """Return what two snapshots say of the thread of a process."""
        process, at = self.graph.processes.get(key), self.graph.positions.get(key)
        if process is None or at is None or at.thread is None:
            return Evidence("two snapshots", "no thread that runs a task")
        counts = f"{at.thread.switches} context switches and {at.thread.ticks} ticks in {process.window_s:.1f} s"
        return Evidence("two snapshots", f"equal stack, {counts}")

    def say(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, *, fleet: Fleet | None = None, **more: Any
    ) -> Finding:
        """Return a finding about some processes; `more` are further fields of it."""
        graph, first = self.graph, keys[0] if keys else ""
        members = [there for key in keys if (there := graph.fleet_of(key))]
        process, actor, task = graph.processes.get(first), graph.actors.get(first), graph.tasks.get(first[5:])
        ranks = tuple(sorted(one.rank for _, one in members if one.rank is not None))[:_MOST_NAMED]
        named = (graph.actors[key] for key in keys[:_MOST_NAMED] if key in graph.actors)
        waits = wait is not None and first not in wait.waiters
        return Finding(
            kind,
            graph.job.job_id,
            text=text,
            fleet=fleet.name if fleet is not None else members[0][0].name if members else "",
            ranks=ranks,
            rank_confidence=_lowest(there.confidence for there, one in members if one.rank is not None),
            ordinals=() if ranks else tuple(sorted(one.ordinal for _, one in members))[:_MOST_NAMED],
            actors=tuple(Named(one.actor_id, one.class_name, one.name) for one in named),
            task=task.name if task is not None and first.startswith("task:") else "",
            pid=process.pid if process else actor.pid if actor else task.pid if task else 0,
            node=self.address(first),
            where=_show_place(self.at(first)),
            waiting=self.describe_waiting(keys, wait) if waits and wait is not None else Waiting(),
            chain=self._chain(first, wait) if wait is not None and first else (),
            **more,
        )

    def describe_waiting(self, keys: Sequence[str], wait: Wait) -> Waiting:
        """Describe all that wait for some processes; the driver counts only if nobody else waits."""
        everybody = self.upstream(keys) | {*wait.waiters} if keys else {*wait.waiters}
        waiters = sorted(everybody - {self.driver}) or sorted(everybody)
        members = [there[1] for key in waiters if (there := self.graph.fleet_of(key))]
        shown = next((key for key in wait.waiters if key in waiters), waiters[0])
        return Waiting(
            len(waiters),
            tuple(sorted(one.rank for one in members if one.rank is not None))[:_MOST_NAMED],
            tuple(sorted(one.ordinal for one in members if one.rank is None))[:_MOST_NAMED],
            self.at(shown).where[:8],
            # A thread in `ray.get` wakes up once a second.
            self.waited(wait) if wait.kind == "collective" else None,
        )

    def _chain(self, key: str, wait: Wait) -> tuple[str, ...]:
        """Return the waits that lead to a process, from the driver if they do; its calls show the way to those."""
        path = self.graph.find_path(self.driver, key, calls=False)
        if len(path) == 1:
            waits = self.graph.find_path(wait.waiters[0], key, calls=False)
            path = waits if len(waits) > 1 else self.graph.find_path(wait.waiters[0], key)
            path = [*self.graph.find_path(self.driver, path[0])[:-1], *path]
        return tuple(self.name(one) for one in path) if len(path) > 1 else ()


def _lowest(confidences: Iterable[Confidence]) -> Confidence | None:
    order: tuple[Confidence, ...] = ("guess", "likely", "certain")
    return min(confidences, key=order.index, default=None)


def _show_place(at: Position) -> tuple[Any, ...]:
    """Return the frames of a position, with the innermost one of any code."""
    inner = at.inner
    if inner is not None and not {inner, replace(inner, line=0)} & {*at.where}:
        return (inner, *at.where)[:64]
    return at.where[:64]
