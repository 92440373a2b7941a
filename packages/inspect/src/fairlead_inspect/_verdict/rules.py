# SPDX-License-Identifier: Apache-2.0
"""The verdict: what is wrong with each job, and whom that blames. When in doubt it blames no process."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from .._fleets import find_fleets
from .._model import (
    Actor,
    Confidence,
    Evidence,
    Finding,
    Fleet,
    Kind,
    Named,
    Snapshot,
    Waiting,
    weakest,
)
from .positions import Position
from .waits import Graph, Wait, driver_key, make_graph

# A rank may wait so long for a file or a server and be well.
AFTER_S = 60.0
_PENDING = ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
_MOST_NAMED = 256


def diagnose(snapshot: Snapshot, *, after_s: float = AFTER_S) -> tuple[Finding, ...]:
    """Return what is wrong with the jobs of a snapshot, and what only explains it.

    Args:
        snapshot: one look at a cluster.
        after_s: seconds after which a process that does not move, and that others wait for, is late.
    """
    fleets = find_fleets(snapshot)
    return tuple(
        one for job in snapshot.jobs for one in _Judge(snapshot, make_graph(snapshot, job, fleets), after_s).judge()
    )


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if a finding blames somebody, else 4 if something does not move and is not explained, else 0."""
    found = list(findings)
    if any(one.blames for one in found):
        return 1
    return 4 if any(not one.moves for one in found if one.kind not in ("working", "driver")) else 0


class _Judge:
    def __init__(self, snapshot: Snapshot, graph: Graph, after_s: float) -> None:
        self._snapshot, self._graph, self._after_s = snapshot, graph, after_s
        self._job = graph.job.job_id
        self._waiters = {waiter for wait in graph.waits for waiter in wait.waiters}

    def judge(self) -> list[Finding]:
        found = [*self._dead(), *self._stopped(), *self._nodes(), *self._pending(), *self._deadlocks()]
        # Who waits for one of these is explained.
        explained = {actor.id for one in found for actor in one.actors if one.blames}
        explained |= (
            {driver_key(self._job)} if any(one.kind == "stopped" and not one.actors for one in found) else set()
        )
        late: dict[tuple[str, ...], Finding] = {}
        for wait in self._graph.waits:
            if not self._graph.reach(wait.waiters) & explained and (one := self._end_of(wait)) is not None:
                key = tuple(sorted(actor.id for actor in one.actors)) or (one.kind, *sorted(wait.waiters))
                before = late.get(key)
                # A collective says more than the `ray.get` that leads to it.
                if before is None or (one.blames, one.waiting.count) > (before.blames, before.waiting.count):
                    late[key] = one
        blamed = {actor.id for one in late.values() if one.blames for actor in one.actors}
        found += [one for one in late.values() if one.blames or not self._leads_to(one, blamed)]
        return sorted(found, key=lambda one: (not one.blames, -(one.since_s or 0.0)))

    def _leads_to(self, finding: Finding, blamed: Collection[str]) -> bool:
        """Return whether a finding that blames no process speaks of those that another one blames."""
        return bool(blamed) and (not finding.actors or bool({one.id for one in finding.actors} & {*blamed}))

    # Rules 1 to 5: what is wrong without a look at stacks.

    def _dead(self) -> list[Finding]:
        found = []
        for wait in self._graph.waits:
            for key in wait.targets:
                actor = self._graph.actors.get(key)
                if actor is None or actor.death is None or self._is_replaced(actor, actor.death.at):
                    continue
                age = max(0.0, self._snapshot.looked_at - actor.death.at) if actor.death.at else None
                # Whoever ends a group of actors ends one after the other, and the last ones may wait meanwhile.
                if actor.death.intended and (age or 0.0) < self._after_s:
                    continue
                confidence: Confidence = "certain"
                if actor.death.intended or wait.kind != "collective":
                    confidence = "likely"
                if wait.fleet is not None:
                    confidence = weakest(confidence, "likely" if wait.fleet.confidence != "certain" else "certain")
                found.append(
                    self._finding(
                        "dead",
                        [key],
                        confidence,
                        f"is dead: {actor.death.cause}",
                        wait,
                        blames=True,
                        since=(age, "Ray's table of actors"),
                        evidence=[Evidence("actor table", f"DEAD: {actor.death.cause}", age)],
                    )
                )
        return _unique(found)

    def _is_replaced(self, lost: Actor, at: float) -> bool:
        """Return whether an actor of its class has been created by its owner after a death."""
        return any(
            one.state == "ALIVE" and one.created > at and (one.class_name, one.owner) == (lost.class_name, lost.owner)
            for one in self._graph.actors.values()
        )

    def _stopped(self) -> list[Finding]:
        found = []
        for key, at in self._graph.positions.items():
            if at.motion != "stopped" or key in self._snapshot.claimed:
                continue
            process, driver = self._graph.processes[key], key == driver_key(self._job)
            remedy = f"kill -CONT {process.pid}"
            evidence = [Evidence("/proc/PID/stat", f"state {process.states[1]} in both looks")]
            # A driver that is stopped explains idle workers, and not workers that hang.
            blames = not driver or all(
                one.kind in ("idle", "unread") for of, one in self._graph.positions.items() if of != key
            )
            found.append(
                self._finding(
                    "stopped" if blames else "driver",
                    [key],
                    "certain",
                    "is stopped by a signal (SIGSTOP), or by a debugger",
                    next((wait for wait in self._graph.waits if key in self._graph.reach(wait.waiters)), None),
                    blames=blames,
                    since=(at.since_s, "last run of its thread"),
                    evidence=evidence,
                    remedy=remedy,
                )
            )
        for key, process in self._graph.processes.items():
            for child in process.children:
                if child.states[1] in "Tt":
                    text = f"has a child process that is stopped: {child.title[:60]} (pid {child.pid})"
                    evidence = [Evidence("/proc/PID/stat", f"state {child.states[1]} of pid {child.pid}")]
                    wait = next((one for one in self._graph.waits if key in self._graph.reach(one.waiters)), None)
                    remedy = f"kill -CONT {child.pid}"
                    found.append(
                        self._finding(
                            "stopped",
                            [key],
                            "certain",
                            text,
                            wait,
                            blames=wait is not None,
                            evidence=evidence,
                            remedy=remedy,
                        )
                    )
        return found

    def _nodes(self) -> list[Finding]:
        found = []
        for node in self._snapshot.nodes:
            if node.answer not in ("lost", "silent"):
                continue
            there = [
                key for key, one in self._graph.actors.items() if one.node_id == node.node_id and one.state != "DEAD"
            ]
            wait = next((one for one in self._graph.waits if self._graph.reach(one.waiters) & {*there}), None)
            if not there or (node.answer == "lost" and wait is None):
                continue
            lost = node.answer == "lost"
            text = "is on a node that Ray calls dead" if lost else f"is on node {node.address}, which did not answer"
            evidence = [Evidence("node table" if lost else "probe", node.note or node.answer)]
            kind: Kind = "node-lost" if lost else "node-silent"
            moves = wait is None
            found.append(self._finding(kind, there, "certain", text, wait, blames=lost, evidence=evidence, moves=moves))
        return found

    def _pending(self) -> list[Finding]:
        found = []
        for wait in self._graph.waits:
            for key in wait.targets:
                actor, task = self._graph.actors.get(key), self._graph.tasks.get(key.removeprefix("task:"))
                if actor is not None and actor.state in _PENDING:
                    wants = ", ".join(f"{amount:g} {name}" for name, amount in sorted(actor.resources.items()))
                    text = f"has not started: {actor.state}" + (f", it requests {wants}" if wants else "")
                elif task is not None and key.startswith("task:") and task.state.startswith("PENDING"):
                    text = f"of task {task.name} has not started: {task.state}"
                else:
                    continue
                began = task.began if task is not None else actor.created if actor is not None else 0.0
                age = self._snapshot.looked_at - began if began else None
                settled = age is None or age >= self._after_s
                evidence = [Evidence("actor table" if actor else "task events", text, age)]
                confidence: Confidence = "certain" if wait.certain else "likely"
                found.append(
                    self._finding(
                        "pending", [key], confidence, text, wait, blames=settled and wait.certain, evidence=evidence,
                        since=(age, "Ray's tables"), moves=not settled,
                        remedy="ray status shows what is free and what is requested",
                    )
                )  # fmt: skip
            if wait.fleet is not None and wait.fleet.missing and not wait.fleet.disputed:
                found += self._missing(wait, wait.fleet)
        return _unique(found)

    def _missing(self, wait: Wait, fleet: Fleet) -> list[Finding]:
        if any(one.rank is None for one in fleet.members):
            return []
        waiting = self._describe_waiting(wait)
        joining = all(self._graph.positions[key].rendezvous for key in wait.waiters)
        long = (waiting.since_s or 0.0) >= self._after_s
        ranks = fleet.missing
        text = f"ranks {list(ranks)[:8]} of {fleet.name} are not there: no actor of Ray has them"
        found = self._finding("missing", [], "likely", text, wait, blames=long and joining, fleet=fleet, moves=not long)
        return [_with_ranks(found, ranks)]

    def _deadlocks(self) -> list[Finding]:
        if not (cycle := self._graph.find_cycle()):
            return []
        still = all(
            self._graph.positions[key].motion in ("still", "waking") for key in cycle if key in self._graph.positions
        )
        names = " -> ".join(self._name(key) for key in (*cycle, cycle[0]))
        wait = next(one for one in self._graph.waits if {*one.waiters} & {*cycle})
        evidence = [Evidence("references in memory", names)]
        text = f"wait for each other in ray.get: {names}"
        return [
            self._finding(
                "deadlock", cycle, "certain" if still else "likely", text, wait, blames=still, evidence=evidence
            )
        ]

    # Rules 6 to 13: the ends of the waits.

    def _end_of(self, wait: Wait) -> Finding | None:
        """Return what is at the end of a wait; None if there is nothing to say."""
        graph, sinks = self._graph, sorted(self._graph.sinks(wait.waiters))
        waiting = self._describe_waiting(wait)
        if wait.kind == "collective" and not wait.targets:
            return self._all_inside(wait, waiting)
        # A fleet that is in a collective with all its members waits for itself. Rules 1 and 4 speak of those without
        # a process.
        if not sinks or any(key in self._waiters for key in sinks) or any(self._is_absent(key) for key in sinks):
            return None
        at = {key: graph.positions.get(key, Position("unread")) for key in sinks}
        fleet = wait.fleet
        moving = [key for key in sinks if at[key].motion == "moving" or at[key].busy_elsewhere]
        if moving:
            text = "makes progress: it computes"
            return self._finding("working", moving, "likely", text, wait, fleet=fleet, moves=True)
        unknown = [
            key for key in sinks if at[key].kind in ("opaque", "unread", "device") or key in self._snapshot.claimed
        ]
        if unknown:
            why = {"opaque": "runs calls without Python stacks", "device": "may wait for a device or another rank"}
            text = "stands at the end of the waits, and " + why.get(at[unknown[0]].kind, "cannot be read")
            if unknown[0] in self._snapshot.claimed:
                text = "belongs to a group that is examined below"
            moves = unknown[0] in self._snapshot.claimed
            return self._finding("undecided", unknown, "guess", text, wait, fleet=fleet, moves=moves)
        if (finding := self._late(wait, waiting, sinks, at)) is not None:
            return finding
        waits = max(waiting.since_s or 0.0, *(one.since_s or self._age_of_call(key) for key, one in at.items()))
        if waits < self._after_s or (wait.kind == "collective" and (waiting.since_s or 0.0) < self._after_s):
            text = "is what others wait for, not for long enough to call it late"
            return self._finding("working", sinks, "likely", text, wait, fleet=fleet, moves=True)
        return self._finding(
            "undecided", sinks, "guess", "does not move; it may wait for another one", wait, fleet=fleet
        )

    def _late(self, wait: Wait, waiting: Waiting, sinks: Sequence[str], at: dict[str, Position]) -> Finding | None:
        """Apply the rules 6 to 9."""
        fleet, bound = wait.fleet, waiting.since_s or 0.0
        classes = {(one.kind, one.motion == "disk", one.where) for one in at.values()}
        if len(classes) != 1 or (fleet is not None and (fleet.disputed or fleet.missing)) or not wait.certain:
            return None
        # Actors of one class need not work together. Several that wait for the last one do.
        if fleet is not None and fleet.confidence == "guess" and (len(sinks) > 1 or len(wait.waiters) < 2):
            return None
        first = min(at.values(), key=lambda one: -(one.since_s or 0.0))
        collective = wait.kind == "collective"
        if collective and bound < self._after_s:
            return None
        still = all(one.motion == "still" and (one.since_s or 0.0) >= self._after_s for one in at.values())
        if first.kind == "idle":
            # It waits for its caller. That is known to wait for the others only if it stands in `ray.get`.
            if not (collective and all(self._caller_waits(key) for key in sinks)):
                return None
            text = "runs nothing: it was not called, or it has returned"
            return self._blame("late", sinks, "likely", text, wait, (bound, "the first of those that wait"))
        if first.kind != "user":
            return None
        if all(one.motion == "disk" for one in at.values()):
            process = self._graph.processes[sinks[0]]
            text = f"waits for a disk or a driver of the kernel ({process.file or 'state D'})"
            return self._blame("disk", sinks, "likely", text, wait, (first.since_s, "last run of its thread"))
        if still:
            certain = collective and len(sinks) == 1 and fleet is not None and fleet.confidence == "certain"
            text = "does not move"
            return self._blame(
                "late", sinks, "certain" if certain else "likely", text, wait, (first.since_s, "last run of its thread")
            )
        if collective and all(one.motion in ("still", "spinning", "waking") for one in at.values()):
            spins = any(one.motion == "spinning" for one in at.values())
            text = "uses a core at one line: endless or slow" if spins else "wakes up now and then at one line"
            return self._blame("late", sinks, "likely", text, wait, (bound, "the first of those that wait"))
        return None

    def _is_absent(self, key: str) -> bool:
        actor, task = self._graph.actors.get(key), self._graph.tasks.get(key.removeprefix("task:"))
        return actor.state != "ALIVE" if actor is not None else task is not None and task.state.startswith("PENDING")

    def _age_of_call(self, key: str) -> float:
        """Return for how long the oldest open call of an idle actor is open; 0 if it has none."""
        began = [one.began for one in self._graph.tasks.values() if one.actor_id == key and one.began]
        return self._snapshot.looked_at - min(began) if began else 0.0

    def _caller_waits(self, key: str) -> bool:
        actor = self._graph.actors.get(key)
        owner = next((of for of, one in self._graph.actors.items() if actor and one.worker_id == actor.owner), None)
        at = self._graph.positions.get(owner or driver_key(self._job))
        return at is not None and at.kind == "ray-get" and at.motion != "stopped"

    def _all_inside(self, wait: Wait, waiting: Waiting) -> Finding | None:
        """Say of a fleet whose members are all in a collective whether it is the same one."""
        fleet, at = wait.fleet, [self._graph.positions[key] for key in wait.waiters]
        if len(at) < 2 or fleet is None or fleet.missing:
            return None
        long = (waiting.since_s or 0.0) >= self._after_s
        if any(one.motion == "moving" or one.busy_elsewhere for one in at) or not long:
            return None
        classes = {tuple(frame for frame in one.where if frame.line or frame == one.where[0]) for one in at}
        if len(classes) > 1:
            text = f"of {fleet.name} are in {len(classes)} different collectives, or at different places of one"
            return self._finding("mismatch", wait.waiters, "likely", text, wait, fleet=fleet)
        inner = at[0].inner.function if at[0].inner else "a collective"
        text = f"of {fleet.name} wait in {inner}: what they wait for is outside of Python"
        remedy = "NCCL 2.24 or newer: ncclras on a node of the job lists the ranks of each communicator"
        return self._finding("together", wait.waiters, "likely", text, wait, fleet=fleet, remedy=remedy)

    # Findings.

    def _blame(
        self,
        kind: Kind,
        keys: Sequence[str],
        confidence: Confidence,
        text: str,
        wait: Wait,
        since: tuple[float | None, str],
    ) -> Finding:
        evidence = [Evidence("two looks", f"equal stack, {self._counts(keys[0])}")]
        if wait.fleet is not None:
            source = next((one.source for one in wait.fleet.members if one.key == keys[0]), "")
            how = f"fleet by {wait.fleet.rule}" + (f", rank from {source}" if source else "")
            evidence.insert(0, Evidence("fleet", f"{how} ({wait.fleet.confidence})"))
        if (seconds := since[0]) is not None:
            evidence.append(Evidence(since[1], f"{seconds:.1f} s ago", seconds))
        return self._finding(kind, keys, confidence, text, wait, blames=True, since=since, evidence=evidence)

    def _counts(self, key: str) -> str:
        process, at = self._graph.processes.get(key), self._graph.positions.get(key)
        if process is None or at is None or at.thread is None:
            return "no thread that runs a task"
        return f"{at.thread.switches} context switches and {at.thread.ticks} ticks in {process.window_s:.1f} s"

    def _finding(
        self,
        kind: Kind,
        keys: Sequence[str],
        confidence: Confidence,
        text: str,
        wait: Wait | None,
        *,
        blames: bool = False,
        since: tuple[float | None, str] = (None, ""),
        evidence: Sequence[Evidence] = (),
        remedy: str = "",
        moves: bool = False,
        fleet: Fleet | None = None,
    ) -> Finding:
        graph, first = self._graph, keys[0] if keys else ""
        of = graph.fleet_of(first)
        members = [one for key in keys if (there := graph.fleet_of(key)) and (one := there[1])]
        at, process, actor = graph.positions.get(first), graph.processes.get(first), graph.actors.get(first)
        name = fleet.name if fleet is not None else of[0].name if of is not None else ""
        where = at.where if at is not None else ()
        if at is not None and at.inner is not None and at.inner not in where:
            where = (at.inner, *where)
        ranks = tuple(sorted(one.rank for one in members if one.rank is not None))[:_MOST_NAMED]
        waiting = self._describe_waiting(wait) if wait is not None and first not in wait.waiters else Waiting()
        node = next((one.address for one in self._snapshot.nodes if process and one.node_id == process.node_id), "")
        return Finding(
            kind,
            self._job,
            confidence,
            blames,
            text,
            name,
            ranks,
            () if ranks else tuple(sorted(one.ordinal for one in members))[:_MOST_NAMED],
            tuple(_named(graph.actors[key]) for key in keys[:_MOST_NAMED] if key in graph.actors),
            process.pid if process else actor.pid if actor else 0,
            node,
            where[:64],
            since[0],
            since[1],
            waiting,
            self._chain(first, wait) if wait is not None and first else (),
            tuple(evidence),
            remedy,
            moves,
        )

    def _describe_waiting(self, wait: Wait) -> Waiting:
        """Describe who waits; `since_s` is for how long all of them have, as far as their threads do not wake up."""
        members = [there[1] for key in wait.waiters if (there := self._graph.fleet_of(key))]
        at = [self._graph.positions[key] for key in wait.waiters if key in self._graph.positions]
        moving = any(one.motion not in ("still", "waking") for one in at)
        ages = [one.since_s for one in at if one.since_s is not None]
        return Waiting(
            len(wait.waiters),
            tuple(sorted(one.rank for one in members if one.rank is not None))[:_MOST_NAMED],
            tuple(sorted(one.ordinal for one in members if one.rank is None))[:_MOST_NAMED],
            at[0].where[:8] if at else (),
            # A thread in `ray.get` wakes up once a second.
            None if moving or not ages or wait.kind != "collective" else min(ages),
        )

    def _chain(self, key: str, wait: Wait) -> tuple[str, ...]:
        """Return the waits that lead to a process, from the driver if that waits."""
        graph, driver = self._graph, driver_key(self._job)
        start = driver if key in graph.reach([driver]) else wait.waiters[0]
        before: dict[str, str] = {}
        left = [start]
        while left and key not in before:
            here = left.pop(0)
            for target in sorted(graph.waits_of(here)):
                if target not in before:
                    before[target] = here
                    left.append(target)
        path = [key]
        while path[0] in before and path[0] != start:
            path.insert(0, before[path[0]])
        return tuple(self._name(one) for one in path) if len(path) > 1 else ()

    def _name(self, key: str) -> str:
        if key.startswith("driver:"):
            return "driver"
        if (task := self._graph.tasks.get(key.removeprefix("task:"))) is not None:
            return f"task {task.name}"
        there, actor = self._graph.fleet_of(key), self._graph.actors.get(key)
        kind = actor.class_name if actor else key[:8]
        if there is None:
            return kind + (f" {actor.name}" if actor and actor.name else "")
        return f"{kind} {f'rank {there[1].rank}' if there[1].rank is not None else f'#{there[1].ordinal}'}"


def _unique(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with one for each set of actors: the one with most that wait."""
    best: dict[object, Finding] = {}
    for one in found:
        key = one.actors or one.text
        if key not in best or one.waiting.count > best[key].waiting.count:
            best[key] = one
    return [*best.values()]


def _with_ranks(finding: Finding, ranks: Sequence[int]) -> Finding:
    return replace(finding, ranks=tuple(ranks)[:_MOST_NAMED])


def _named(actor: Actor) -> Named:
    return Named(actor.actor_id, actor.class_name, actor.name)
