# SPDX-License-Identifier: Apache-2.0
"""One job of a snapshot while it is judged: its waits, its ages, its names, and findings about its processes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from .._node.waits import EVENT, INPUT, SLEEP, WAITS_FOR_CHILD
from ..model import Child, Confidence, Evidence, Finding, Frame, Kind, Named, Snapshot, Suspect, Waiting, WorkerSet
from .libraries import PACKAGES, shows
from .positions import LOOP, OFTEN_PER_S, Position, find_own
from .waits import Graph, Wait

RAN, CALLED, WAITED = "last run of its thread", "start of its call", "the first of those that wait"
_MOST_NAMED = 256
_ORDER: tuple[Confidence, ...] = ("guess", "likely", "certain")
_UNREAD = Position("unread")


@dataclass(frozen=True)
class Case:
    """A job of a snapshot, and the seconds after which a process is late."""

    snapshot: Snapshot
    graph: Graph
    after_s: float

    def at(self, key: str) -> Position:
        """Return where a process stands."""
        return self.graph.positions.get(key, _UNREAD)

    def call_age(self, key: str) -> float | None:
        """Return for how long the oldest call that runs in a process does so; None without one."""
        began = self.graph.began.get(key)
        return None if began is None else self.snapshot.looked_at - began

    def age(self, key: str, *, by_call: bool = True) -> tuple[float | None, str]:
        """Return for how long a process has stood where it stands, and what says so; None if that is not known.

        A thread that rests says it itself, and a child that it waits for more. One that polls has waited since its call
        began, as may one that rests, if the kernel does not say when it ran: `by_call` takes that for it. One that
        spins has no age, since a long computation looks the same.
        """
        place = self.at(key)
        if (held := self.holding_child(key)) is not None and held[0].since_s is not None:
            return held[0].since_s, "last run of its child"
        rests = place.motion in ("still", "disk", "stopped")
        if rests and place.since_s is not None:
            return place.since_s, RAN
        calls = place.motion == "waking" or (rests and by_call)
        return (self.call_age(key), CALLED) if calls else (None, "")

    def sleeps(self, key: str) -> bool:
        """Return whether a process sleeps, waits for a person, or has traffic where it stands: it waits on purpose."""
        thread = None if self.at(key).paused else self.at(key).thread
        window_s = self.graph.processes[key].window_s if key in self.graph.processes else 1.0
        return thread is not None and (
            thread.waits_on in (SLEEP, INPUT) or (thread.switches or 0) > OFTEN_PER_S * window_s
        )

    def waited(self, wait: Wait) -> float | None:
        """Return for how long all members have waited in a collective: by their calls if none of them sleeps there."""
        places = {key: self.at(key) for key in wait.waiters}
        if any(place.motion not in ("still", "waking", "spinning") for place in places.values()):
            return None
        still = [place.since_s for place in places.values() if place.motion == "still" and place.since_s is not None]
        calls = [age for key in places if (age := self.call_age(key)) is not None]
        return min(still or calls, default=None)

    def frees(self, *requesters: str) -> bool:
        """Return whether others may free what is requested: they work, or run tasks, or calls begun not long ago."""
        graph, since = self.graph, self.snapshot.looked_at - self.after_s
        works = (
            place.motion in ("moving", "spinning") or place.busy_elsewhere
            for key, place in graph.positions.items()
            if key not in graph.waiters and key not in requesters
        )
        runs = (
            call.state == "RUNNING" and (not call.actor_id or call.began > since)
            for key, call in graph.tasks.items()
            if graph.waiters.isdisjoint([f"task:{key}", call.actor_id])
        )
        return any(works) or any(runs)

    def quiet_s(self) -> float:
        """Return for how many seconds nothing of the job has begun or ended, as far as Ray lists it."""
        times = [call.began for call in self.graph.tasks.values()]
        times += [actor.created for actor in self.graph.actors.values()]
        times += [ended for key, ended in self.snapshot.finished.items() if key.endswith(self.graph.job.job_id)]
        return self.snapshot.looked_at - max(times, default=0.0)

    def awaits(self, key: str) -> bool:
        """Return whether the event loop of an actor rests for long without a timer: its coroutines do not sleep."""
        threads = self.graph.processes[key].threads if key in self.graph.processes else ()
        loops = [thread for thread in threads if thread.name.startswith(LOOP)]
        rests = (loop.waits_on == EVENT and (loop.last_ran_s or 0.0) >= self.after_s for loop in loops)
        return bool(loops) and all(rests)

    def shows(self, key: str, pattern: re.Pattern[str]) -> bool:
        """Return whether the thread of a process is in a function of a library, by its file and name."""
        thread = self.at(key).thread
        return thread is not None and shows(pattern, *thread.stack)

    def upstream(self, keys: Iterable[str]) -> set[str]:
        """Return all processes that wait for some, directly or not, without those themselves."""
        ends = {*keys}
        waiters = {key for wait in self.graph.waits for key in wait.waiters if wait.kind != "calls"}
        return {key for key in waiters - ends if self.graph.reach([key]) & ends}

    def moving(self) -> list[str]:
        """Return the processes with code of the job that were seen to make progress."""
        waits = self.graph.waiters
        return [
            key
            for key, place in self.graph.positions.items()
            if key not in self.graph.infrastructure
            and (
                place.motion == "moving"
                or (place.busy_elsewhere and place.kind not in ("idle", "opaque") and key not in waits)
            )
        ]

    def name(self, key: str) -> str:
        """Return how people call a process."""
        if key.startswith("driver:"):
            return "driver"
        if (task := self.graph.tasks.get(key.removeprefix("task:"))) is not None:
            return f"task {task.name}"
        if (pair := self.graph.members.get(key)) is not None:
            return f"{pair[0].name} {pair[1].label}"
        actor = self.graph.actors.get(key)
        return f"{actor.class_name} {actor.name}".strip() if actor else key[:8]

    def describe_place(self, key: str) -> str:
        """Return what a process waits for in the kernel, as a clause, with a child that may hold it up."""
        place, process = self.at(key), self.graph.processes.get(key)
        if place.paused:
            return ", it stands at a breakpoint, to which no debugger is attached"
        if place.kind == "opaque" and place.thread is None and process is not None and "." in process.title:
            return f", in {process.title.partition('::')[2]}"
        if place.motion == "spinning" and place.thread is not None and process is not None:
            return f", it uses {(place.thread.ticks or 0) / process.window_s:.0f} % of a core"
        text = f", it waits for {place.thread.waits_on}" if place.thread is not None and place.thread.waits_on else ""
        text = text.replace("it waits for time.sleep", "it stands in time.sleep")
        if (held := self.holding_child(key)) is not None:
            child, frame = held
            file = frame.file.rpartition("/")[2]
            text += f"; its child process {child.pid} stands in {file}:{frame.line} {frame.function}"
            text += f" and waits for {child.waits_on}" if child.waits_on else ""
        return text

    def holding_child(self, key: str) -> tuple[Child, Frame] | None:
        """Return the child that a process waits for and that stands in code of the job, and the frame where it does."""
        place, process = self.at(key), self.graph.processes.get(key)
        if process is None or place.thread is None or not shows(WAITS_FOR_CHILD, *place.thread.stack[:8]):
            return None
        for child in process.children:
            # Below its start, a child that was forked has the frames of its parent.
            own = takewhile(lambda frame: not frame.file.endswith("/multiprocessing/process.py"), child.stack)
            frame = find_own(own)
            if frame is not None and not child.ticks and not shows(PACKAGES, frame):
                return child, frame
        return None

    def suspect(self, key: str, text: str) -> Suspect:
        """Return a process that may be what a job waits for."""
        since_s, source = max(self.age(key), (self.call_age(key), CALLED), key=lambda pair: pair[0] is not None)
        place, text = _show_place(self.at(key)), text + self.describe_place(key)
        node, pid = self.find_process(key)
        return Suspect(self.name(key), pid, node, place, since_s, text, source)

    def find_process(self, key: str) -> tuple[str, int]:
        """Return the address of the node of a process, and its process id; "" and 0 if it has none."""
        known = self.graph.processes.get(key) or self.graph.actors.get(key) or self.graph.tasks.get(key[5:])
        if known is None:
            return "", 0
        return next((node.address for node in self.snapshot.nodes if node.node_id == known.node_id), ""), known.pid

    def blame(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, since: tuple[float | None, str],
        fact: Evidence, *, sure: bool = False, **more: Any,
    ) -> Finding:  # fmt: skip
        """Return a finding that blames some processes; `more` are further fields of it, as for `say`."""
        evidence, (since_s, source) = [fact], since
        if wait is not None and wait.workers is not None:
            ranks = next((member.source for member in wait.workers.members if member.key in keys[:1]), "")
            how = f"by {wait.workers.rule}" + (f", rank from {ranks}" if ranks else "")
            evidence.insert(0, Evidence("worker set", f"{how} ({wait.workers.confidence})"))
        if (step := self.snapshot.labels.get(keys[0], {}).get("step")) is not None:
            evidence.append(Evidence("group", f"its last step is {step}"))
        if since_s is not None and kind == "late":
            evidence.append(Evidence(source, f"{since_s:.1f} s ago", since_s))
        more = {"blames": True, "since_s": since_s, "since_source": source, "evidence": tuple(evidence), **more}
        return self.say(kind, keys, text, wait, confidence="certain" if sure else "likely", **more)

    def say(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, *,
        workers: WorkerSet | None = None, **more: Any,
    ) -> Finding:  # fmt: skip
        """Return a finding about some processes; `more` are further fields of it."""
        graph, first = self.graph, keys[0] if keys else ""
        members = [pair for key in keys if (pair := graph.members.get(key))]
        task = graph.tasks.get(first.removeprefix("task:"))
        ranks = sorted(member.rank for _, member in members if member.rank is not None)[:_MOST_NAMED]
        sure = [workers.confidence for workers, member in members if member.rank is not None]
        actors = [graph.actors[key] for key in keys[:_MOST_NAMED] if key in graph.actors]
        node, pid = self.find_process(first)
        fields: dict[str, Any] = {
            "text": text,
            "worker_set": workers.name if workers is not None else members[0][0].name if members else "",
            "ranks": tuple(ranks),
            "rank_confidence": min(sure, key=_ORDER.index, default=None),
            "ordinals": () if ranks else tuple(sorted(member.ordinal for _, member in members))[:_MOST_NAMED],
            "actors": tuple(Named(actor.actor_id, actor.class_name, actor.name) for actor in actors),
            "task": task.name if task is not None else "",
            "pid": pid,
            "node": node,
            "where": _show_place(self.at(first)),
        }
        if wait is not None and first not in wait.waiters:
            everybody = self.upstream(keys) | {*wait.waiters}
            # The driver counts only if nobody else waits.
            waiters = sorted(everybody - {self.graph.driver}) or sorted(everybody)
            members = [pair for key in waiters if (pair := graph.members.get(key))]
            ranks = sorted(member.rank for _, member in members if member.rank is not None)
            ordinals = sorted(member.ordinal for _, member in members if member.rank is None)
            shown = next((key for key in wait.waiters if key in waiters), waiters[0])
            # A thread in `ray.get` wakes up once a second.
            since_s = self.waited(wait) if wait.kind == "collective" else None
            named = tuple(ranks[:_MOST_NAMED]), tuple(ordinals[:_MOST_NAMED])
            fields["waiting"] = Waiting(len(waiters), *named, self.at(shown).where[:8], since_s)
        if wait is not None and first:
            fields["chain"] = self._chain(first, wait)
        return Finding(kind, graph.job.job_id, **{**fields, **more})

    def say_early(self, keys: Sequence[str], text: str, wait: Wait | None, since_s: float, **more: Any) -> Finding:
        """Return the finding that some processes have not moved, and not for as long as it takes to be late."""
        again = f"run `why` again in {max(1.0, self.after_s - since_s):.0f} s"
        fields = {"since_s": since_s or None, "limit_s": self.after_s, "moves": True, "remedy": again, **more}
        return self.say("working", keys, text, wait, **fields)

    def _chain(self, key: str, wait: Wait) -> tuple[str, ...]:
        """Return the waits that lead to a process, from the driver if they do; its calls show the way to those."""
        path = self.graph.find_path(self.graph.driver, key, calls=False)
        if len(path) == 1:
            waits = self.graph.find_path(wait.waiters[0], key, calls=False)
            path = waits if len(waits) > 1 else self.graph.find_path(wait.waiters[0], key)
            path = [*self.graph.find_path(self.graph.driver, path[0])[:-1], *path]
        return tuple(map(self.name, path)) if len(path) > 1 else ()


def _show_place(place: Position) -> tuple[Frame, ...]:
    """Return the frames of a position, with the innermost one of any code."""
    inner = place.inner
    shown = inner is None or inner in place.where or replace(inner, line=0) in place.where
    return place.where[:64] if shown or inner is None else (inner, *place.where)[:64]
