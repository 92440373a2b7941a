# SPDX-License-Identifier: Apache-2.0
"""The verdict: the faults of each job, and the process that each fault blames. In doubt it blames no process."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .._fleets import find_fleets
from .._model import Actor, Confidence, Evidence, Finding, Fleet, Kind, Named, Reservation, Snapshot, Waiting
from .collectives import Mismatch, find_mismatch
from .positions import Position
from .waits import Graph, Wait, driver_key, is_promise, make_graph

# A rank may wait so long for a file or a server and be well.
AFTER_S = 60.0
# Ray tells the callers of an actor of its death within this time.
NOTICED_S = 5.0
_PENDING = ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
# Those in other states wait for objects, or have just died.
_REQUESTING = ("PENDING_CREATION", "PENDING_NODE_ASSIGNMENT")
_PLACEMENT = "/ray/util/placement_group.py"
# Ray's reasons why a placement group is not placed.
_REASONS = {
    "INFEASIBLE": "no node can hold it, even when it is idle (INFEASIBLE)",
    "NO_RESOURCES": "others hold what it needs (NO_RESOURCES)",
}
_NODES = "python -m fairlead_placement nodes shows what each node has, and who holds it"
_MOST_NAMED = 256
_RAN, _WAITED = "last run of its thread", "the first of those that wait"


def diagnose(snapshot: Snapshot, *, after_s: float = AFTER_S) -> tuple[Finding, ...]:
    """Return what is wrong with the jobs of a snapshot, and what only explains it.

    Args:
        snapshot: one look at a cluster.
        after_s: seconds after which a process that does not move, and that others wait for, is late.
    """
    fleets, found = find_fleets(snapshot), list[Finding]()
    for job in snapshot.jobs:
        found += _Judge(snapshot, make_graph(snapshot, job, fleets), after_s).judge()
    return tuple(found)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if a finding blames somebody, else 4 if something does not move and is not explained, else 0."""
    found = list(findings)
    if any(one.blames for one in found):
        return 1
    return 4 if any(not one.moves for one in found if one.kind not in ("working", "driver")) else 0


class _Judge:
    def __init__(self, snapshot: Snapshot, graph: Graph, after_s: float) -> None:
        self._snapshot, self._graph, self._after_s = snapshot, graph, after_s
        self._job, self._driver = graph.job.job_id, driver_key(graph.job.job_id)
        self._waiters, self._since = graph.waiters(), snapshot.looked_at - after_s
        # The processes of all findings.
        self._named = set[str]()

    def judge(self) -> list[Finding]:
        reservations, held_up = self._reservations()
        found = [*self._dead(), *self._stopped(), *self._nodes(), *self._pending(), *reservations, *self._deadlocks()]
        # Who waits for one of these is explained.
        explained = held_up | {actor.id for one in found for actor in one.actors if one.blames}
        if any(one.kind == "stopped" and not one.actors for one in found):
            explained.add(self._driver)
        for fleet in self._graph.fleets:
            members = {one.key for one in fleet.members}
            odd = None if members & explained else find_mismatch(self._graph, fleet, self._after_s)
            if odd is not None:
                found.append(self._differ(fleet, odd))
                explained |= members
        late: dict[tuple[str, ...], Finding] = {}
        for wait in self._graph.waits:
            if not self._graph.reach(wait.waiters) & explained and (one := self._end_of(wait)) is not None:
                key = tuple(sorted(actor.id for actor in one.actors)) or (one.kind, *sorted(wait.waiters))
                before = late.get(key)
                # A collective says more than the `ray.get` that leads to it.
                if before is None or (one.blames, one.waiting.count) > (before.blames, before.waiting.count):
                    late[key] = one
        blamed = {actor.id for one in late.values() if one.blames for actor in one.actors}
        found += [one for one in late.values() if one.blames or not _speaks_of(one, blamed)]
        if not any(one.blames for one in found):
            found += self._unread()
        return sorted(found, key=lambda one: (not one.blames, -(one.since_s or 0.0)))

    # Rules 1 to 5: faults that are found without stacks.

    def _dead(self) -> list[Finding]:
        found = []
        for wait, key in ((one, target) for one in self._graph.waits for target in one.targets):
            actor = self._graph.actors.get(key)
            if actor is None or actor.death is None or self._is_replaced(actor, actor.death.at):
                continue
            age = max(0.0, self._snapshot.looked_at - actor.death.at) if actor.death.at else None
            # Whoever ends a group of actors ends one after the other, and the last ones may wait until then.
            if actor.death.intended and (age or 0.0) < self._after_s:
                continue
            # `ray.get` raises for an actor that is dead, so that only what Ray has not yet noticed waits for it.
            if wait.kind != "collective" and (len(wait.targets) > 1 or (age or 0.0) < NOTICED_S):
                continue
            # Those that are left may go on without it, in a collective of their own, unless they wait for it to join.
            joins = all(self._graph.positions[one].rendezvous for one in wait.waiters) or not actor.death.intended
            known = wait.fleet is None or (wait.fleet.world_size is not None and joins)
            sure = not actor.death.intended and wait.fleet is not None and wait.fleet.confidence == "certain"
            fact, text = Evidence("actor table", f"DEAD: {actor.death.cause}", age), f"is dead: {actor.death.cause}"
            one = self._blame("dead", [key], text, wait, (age, "Ray's table of actors"), fact, sure=sure)
            blames = known or (one.waiting.since_s or 0.0) >= self._after_s
            found.append(replace(one, blames=blames, moves=not blames))
        return _unique(found)

    def _is_replaced(self, lost: Actor, at: float) -> bool:
        """Return whether an actor of its class has been created by its owner after a death."""
        return any(
            one.state == "ALIVE" and one.created > at and (one.class_name, one.owner) == (lost.class_name, lost.owner)
            for one in self._graph.actors.values()
        )

    def _stopped(self) -> list[Finding]:
        found, graph = [], self._graph
        for key, process in graph.processes.items():
            at = graph.positions[key]
            children = [one for one in process.children if {*one.states} <= {*"Tt"} and not one.ticks]
            wait = None
            if at.motion == "stopped" or children:
                wait = next((one for one in graph.waits if key in graph.reach(one.waiters)), None)
            if at.motion == "stopped":
                # A driver that is stopped explains idle workers, and not workers that hang.
                others = [one.kind for of, one in graph.positions.items() if of != key]
                blames = key != self._driver or all(one in ("idle", "unread") for one in others)
                fact = Evidence("/proc/PID/stat", f"state {process.states[1]} in both looks")
                text, kind = "is stopped by a signal (SIGSTOP), or by a debugger", "stopped" if blames else "driver"
                one = self._blame(kind, [key], text, wait, (at.since_s, _RAN), fact, sure=True)  # type: ignore[arg-type]
                found.append(replace(one, blames=blames, remedy=f"kill -CONT {process.pid}"))
            for child in children:
                text = f"has a child process that is stopped: {child.title[:60]} (pid {child.pid})"
                fact = Evidence("/proc/PID/stat", f"state {child.states[1]} of pid {child.pid}")
                one = self._blame("stopped", [key], text, wait, (None, ""), fact, sure=True)
                # Whoever waits for another process, or works, may have stopped it on purpose.
                ends = wait is not None and key not in self._waiters and at.motion != "moving"
                found.append(replace(one, blames=ends, remedy=f"kill -CONT {child.pid}"))
        return found

    def _nodes(self) -> list[Finding]:
        found, graph = [], self._graph
        for node in self._snapshot.nodes:
            if node.answer not in ("lost", "silent"):
                continue
            there = [self._driver] if graph.job.node_id == node.node_id else []
            there += [key for key, one in graph.actors.items() if one.node_id == node.node_id and one.state != "DEAD"]
            wait = next((one for one in graph.waits if graph.reach(one.waiters) & {*there}), None)
            if there and node.answer == "lost" and wait is not None:
                fact = Evidence("node table", node.note)
                found.append(
                    self._blame(
                        "node-lost", there, "is on a node that Ray calls dead", wait, (None, ""), fact, sure=True
                    )
                )
            elif there and node.answer == "silent":
                text, fact = f"is on node {node.address}, which told nothing: {node.note}", Evidence("probe", node.note)
                found.append(self._say("node-silent", there, text, wait, evidence=(fact,)))
        return found

    def _pending(self) -> list[Finding]:
        found = []
        for wait in self._graph.waits:
            for key in wait.targets:
                actor, task = self._graph.actors.get(key), self._graph.tasks.get(key.removeprefix("task:"))
                if actor is not None and actor.state in _PENDING:
                    text = f"has not started: {actor.state}{self._describe_request(actor)}"
                    source, began, state = "actor table", actor.created, actor.state
                elif actor is None and task is not None and task.state.startswith("PENDING"):
                    text, state = f"task {task.name} has not started: {task.state}", task.state
                    source, began = "task events", task.began
                else:
                    continue
                age = self._snapshot.looked_at - began if began else None
                settled = age is None or age >= self._after_s
                one = self._blame(
                    "pending", [key], text, wait, (age, "Ray's tables"), Evidence(source, text, age), sure=wait.certain
                )
                remedy = "ray status shows what is free and what is requested"
                settled = settled and not self._graph.frees(self._since)
                blames = settled and wait.certain and state in _REQUESTING
                found.append(replace(one, blames=blames, moves=not settled, remedy=remedy))
            if wait.fleet is not None and wait.fleet.missing and not wait.fleet.disputed:
                found.append(self._missing(wait, wait.fleet))
        return _unique(found)

    def _describe_request(self, actor: Actor) -> str:
        """Return what an actor requests, as a clause; of a bundle Ray calls it "CPU_group_0_" and the group's id."""
        parts = {name: name.partition("_group_") for name in actor.resources}
        wants = {base: actor.resources[name] for name, (base, _, _) in sorted(parts.items()) if base != "bundle"}
        if not wants:
            return ""
        ids = {group.rpartition("_")[2] for _, _, group in parts.values() if group}
        groups = [one for one in self._snapshot.reservations if one.group_id in ids]
        text = ", it requests " + ", ".join(f"{amount:g} {base}" for base, amount in wants.items())
        if groups:
            return f"{text} of {groups[0].label}, which {_describe_reason(groups[0])}"
        return text + (f" of placement group {min(ids)[:8]}" if ids else "")

    def _reservations(self) -> tuple[list[Finding], set[str]]:
        """Name the placement groups that are not placed and that processes wait for; return also who waits."""
        groups = [one for one in self._snapshot.reservations if one.job_id == self._job]
        waiting = {key: self._waits_for_placement(key) for key in self._graph.processes if groups}
        sure = {key: is_sure for key, is_sure in waiting.items() if is_sure is not None}
        found, held_up = [], set[str]()
        for group in groups:
            # Whoever has made others waits for one of these.
            makers = {one.creator or self._driver for one in groups}
            own = [key for key in sure if key == (group.creator or self._driver) or key not in makers]
            if not own:
                continue
            age = self._snapshot.looked_at - group.requested if group.requested else None
            settled = (age is None or age >= self._after_s) and (
                group.reason == "INFEASIBLE" or not self._graph.frees(self._since)
            )
            confidence: Confidence = "certain" if all(sure[key] for key in own) and len(groups) == 1 else "likely"
            one = self._say(
                "pending", [], _describe_reason(group), Wait("get", tuple(own), ()), confidence=confidence,
                evidence=(Evidence("placement groups", f"{group.reason}: {group.bundles}", age),), since_s=age,
                since_source="Ray's tables", subject=group.label, blames=settled, moves=not settled, remedy=_NODES,
            )  # fmt: skip
            found.append(one)
            held_up |= {*own} if settled else set()
        return found, held_up

    def _waits_for_placement(self, key: str) -> bool | None:
        """Return whether a process waits for a placement group for sure, or None if it does not wait for any."""
        at, references = self._graph.positions[key], self._graph.processes[key].references
        if at.thread is not None and any(frame.file.endswith(_PLACEMENT) for frame in at.thread.stack[:3]):
            return True
        promised = at.kind == "ray-get" and references and all(is_promise(one.object_id) for one in references)
        return False if promised else None

    def _missing(self, wait: Wait, fleet: Fleet) -> Finding:
        long = (self._describe_waiting(wait).since_s or 0.0) >= self._after_s
        joining = all(self._graph.positions[key].rendezvous for key in wait.waiters)
        # The driver, or a task, may have one of these ranks.
        joining &= {one.environ.get("RANK") for one in self._graph.processes.values()}.isdisjoint(
            map(str, fleet.missing)
        )
        text = "is not there: no actor of Ray has that rank"
        one = self._say("missing", [], text, wait, fleet=fleet, blames=long and joining, moves=not long)
        return replace(one, ranks=fleet.missing[:_MOST_NAMED])

    def _unread(self) -> list[Finding]:
        """Name the processes whose waits are not known, and of which no finding speaks: any of them may hang."""
        graph, found = self._graph, []
        left = [key for key in graph.processes if key not in self._named]
        left.sort(key=lambda key: key != self._driver)
        unread = [key for key in left if graph.positions[key].kind == "unread"]
        blind = [key for key in left if graph.positions[key].kind == "ray-get" and not graph.processes[key].references]
        why = {"not readable": unread, "in ray.get for objects whose ids are not readable": blind}
        for text, keys in why.items():
            if not keys:
                continue
            driver = "" if keys[0] != self._driver else ", the driver" if len(keys) == 1 else ", the driver among them"
            subject = f"{len(keys)} process{'es' * (len(keys) > 1)}{driver}"
            notes = {graph.processes[key].note: None for key in keys if graph.processes[key].note}
            facts = tuple(Evidence("probe", note) for note in notes)
            said = f"{text}, so that it is not known what waits there"
            found.append(self._say("undecided", keys, said, None, confidence="guess", subject=subject, evidence=facts))
        return found

    def _deadlocks(self) -> list[Finding]:
        graph = self._graph
        sure = graph.find_cycle(certain=True)
        if not (cycle := sure or graph.find_cycle(certain=False)):
            return []
        waits = [one for one in graph.waits if {*one.waiters} & {*cycle} and {*one.targets} & {*cycle}]
        at = [graph.positions[key] for key in cycle if key in graph.positions]
        still = bool(sure) and all(one.motion in ("still", "waking") for one in at)
        if met := [one for one in waits if one.kind == "collective"]:
            # Some of the fleet may be in a collective of their own, which those outside of the cycle may end.
            ends = [graph.positions[key] for key in graph.sinks(cycle) if key in graph.positions]
            still &= not any(one.motion == "moving" or one.busy_elsewhere for one in ends)
            still &= all((self._describe_waiting(one).since_s or 0.0) >= self._after_s for one in met)
        names = " -> ".join(self._name(key) for key in (*cycle, cycle[0]))
        fact = Evidence("references in memory", names)
        one = self._blame("deadlock", cycle, f"wait for each other: {names}", waits[0], (None, ""), fact, sure=still)
        return [one if still else replace(one, blames=False, confidence="guess", moves=bool(met))]

    # Rules 6 to 13: the ends of the waits.

    def _end_of(self, wait: Wait) -> Finding | None:
        """Return what is at the end of a wait; None if there is nothing to say."""
        graph, fleet, sinks = self._graph, wait.fleet, sorted(self._graph.sinks(wait.waiters))
        waiting = self._describe_waiting(wait)
        if wait.kind == "collective" and not wait.targets:
            return self._all_inside(wait, waiting)
        # A fleet that is in a collective with all its members waits for itself. Rules 1 and 4 speak of those without
        # a process.
        if not sinks or any(key in self._waiters or self._is_absent(key) for key in sinks):
            return None
        at = {key: graph.positions.get(key, Position("unread")) for key in sinks}
        if moving := [key for key in sinks if at[key].motion == "moving" or at[key].busy_elsewhere]:
            return self._say("working", moving, "makes progress: it computes", wait, fleet=fleet, moves=True)
        if unknown := [key for key in sinks if at[key].kind in ("opaque", "unread", "device")]:
            why = {"opaque": "may wait in another thread or coroutine", "device": "may wait for a device or a rank"}
            text = "stands at the end of the waits, and " + why.get(at[unknown[0]].kind, "cannot be read")
            return self._say("undecided", unknown, text, wait, fleet=fleet, confidence="guess")
        if (finding := self._late(wait, waiting, sinks, at)) is not None:
            return finding
        bound = waiting.since_s or 0.0
        waits = max(bound, *(one.since_s or self._age_of_call(key) for key, one in at.items()))
        if (bound if wait.kind == "collective" else waits) < self._after_s:
            text = "is what others wait for, not for long enough to call it late"
            return self._say("working", sinks, text, wait, fleet=fleet, moves=True)
        text = "does not move; it may wait for another one"
        return self._say("undecided", sinks, text, wait, fleet=fleet, confidence="guess")

    def _late(self, wait: Wait, waiting: Waiting, sinks: Sequence[str], at: dict[str, Position]) -> Finding | None:
        """Apply the rules 6 to 9."""
        fleet, bound, collective = wait.fleet, waiting.since_s or 0.0, wait.kind == "collective"
        classes = {(one.kind, one.motion == "disk", one.where) for one in at.values()}
        early = collective and bound < self._after_s
        if len(classes) != 1 or early or (fleet and fleet.missing) or not self._graph.is_certain(wait.waiters):
            return None
        first = max(at.values(), key=lambda one: one.since_s or 0.0)
        if first.kind == "idle":
            # It waits for its caller. That is known to wait for the others only if it stands in `ray.get`.
            if not (collective and all(self._caller_waits(key, wait) for key in sinks)):
                return None
            text = "runs nothing: it was not called, or it has returned"
            return self._blame("late", sinks, text, wait, (bound, _WAITED), self._counts(sinks[0]))
        if first.kind != "user":
            return None
        long = all((one.since_s or 0.0) >= self._after_s for one in at.values())
        if long and all(one.motion == "disk" and one.thread and one.thread.switches == 0 for one in at.values()):
            text = f"waits for a disk or a driver of the kernel ({self._graph.processes[sinks[0]].file or 'state D'})"
            return self._blame("disk", sinks, text, wait, (first.since_s, _RAN), self._counts(sinks[0]))
        if long and all(one.motion == "still" for one in at.values()):
            sure = len(sinks) == 1 and fleet is not None and fleet.confidence == "certain"
            since = first.since_s, _RAN
            return self._blame("late", sinks, "does not move", wait, since, self._counts(sinks[0]), sure=sure)
        if collective and all(one.motion in ("still", "spinning", "waking") for one in at.values()):
            # A loop at one line may be endless, and may be long work: two looks do not tell them apart.
            spins = any(one.motion == "spinning" for one in at.values())
            text = "uses a core at one line: endless or slow" if spins else "wakes up now and then at one line"
            one = self._blame("late", sinks, text, wait, (bound, _WAITED), self._counts(sinks[0]))
            return replace(one, blames=False, confidence="guess")
        return None

    def _is_absent(self, key: str) -> bool:
        actor, task = self._graph.actors.get(key), self._graph.tasks.get(key.removeprefix("task:"))
        return actor.state != "ALIVE" if actor is not None else task is not None and task.state.startswith("PENDING")

    def _age_of_call(self, key: str) -> float:
        """Return for how long the oldest open call of an idle actor is open; 0 if it has none."""
        began = [one.began for one in self._graph.tasks.values() if one.actor_id == key and one.began]
        return self._snapshot.looked_at - min(began) if began else 0.0

    def _caller_waits(self, key: str, wait: Wait) -> bool:
        """Return whether the maker of an idle actor waits for those that wait, and no call waits for its arguments."""
        graph, actor = self._graph, self._graph.actors.get(key)
        owner = next((of for of, one in graph.actors.items() if actor and one.worker_id == actor.owner), self._driver)
        if any(one.actor_id == key and one.state != "RUNNING" for one in graph.tasks.values()):
            return False
        waits = [one for one in graph.waits if one.certain and owner in one.waiters]
        return any({*one.targets} & {*wait.waiters} and graph.positions[owner].motion != "stopped" for one in waits)

    def _all_inside(self, wait: Wait, waiting: Waiting) -> Finding | None:
        """Say of a fleet whose members are all in a collective whether it is the same one."""
        fleet, at = wait.fleet, [self._graph.positions[key] for key in wait.waiters]
        if len(at) < 2 or fleet is None or fleet.missing or (waiting.since_s or 0.0) < self._after_s:
            return None
        if any(one.motion == "moving" or one.busy_elsewhere for one in at):
            return None
        classes = {tuple(frame for frame in one.where if frame.line or frame == one.where[0]) for one in at}
        if len(classes) > 1:
            text = f"are in {len(classes)} different collectives, or at different places of one"
            return self._say("mismatch", wait.waiters, text, wait, fleet=fleet)
        inner = at[0].inner.function if at[0].inner else "a collective"
        text = f"wait in {inner}: what they wait for is outside of Python"
        remedy = "NCCL 2.24 or newer: ncclras on a node of the job lists the ranks of each communicator"
        return self._say("together", wait.waiters, text, wait, fleet=fleet, remedy=remedy)

    def _differ(self, fleet: Fleet, odd: Mismatch) -> Finding:
        record = odd.record
        counts = f"{len(odd.waiting)} of {record.size} members wait, {len(odd.behind)} differ"
        wait, fact = (
            Wait("collective", odd.waiting, odd.behind, fleet=fleet),
            Evidence(record.source, counts, record.age_s),
        )
        one = self._blame("mismatch", odd.behind, odd.text, wait, (odd.since_s, record.source), fact)
        return replace(one, fleet=fleet.name, blames=odd.blames)

    # Findings.

    def _blame(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, since: tuple[float | None, str],
        fact: Evidence, *, sure: bool = False,
    ) -> Finding:  # fmt: skip
        evidence = [fact]
        if wait is not None and wait.fleet is not None:
            source = next((one.source for one in wait.fleet.members if one.key in keys[:1]), "")
            how = f"by {wait.fleet.rule}" + (f", rank from {source}" if source else "")
            evidence.insert(0, Evidence("fleet", f"{how} ({wait.fleet.confidence})"))
        if (step := self._snapshot.labels.get(keys[0], {}).get("step")) is not None:
            evidence.insert(1, Evidence("group", f"its last step is {step}"))
        if since[0] is not None and kind == "late":
            evidence.append(Evidence(since[1], f"{since[0]:.1f} s ago", since[0]))
        confidence: Confidence = "certain" if sure else "likely"
        return self._say(
            kind, keys, text, wait, confidence=confidence, blames=True, since_s=since[0], since_source=since[1],
            evidence=tuple(evidence),
        )  # fmt: skip

    def _counts(self, key: str) -> Evidence:
        process, at = self._graph.processes.get(key), self._graph.positions.get(key)
        if process is None or at is None or at.thread is None:
            return Evidence("two looks", "no thread that runs a task")
        counts = f"{at.thread.switches} context switches and {at.thread.ticks} ticks in {process.window_s:.1f} s"
        return Evidence("two looks", f"equal stack, {counts}")

    def _say(
        self, kind: Kind, keys: Sequence[str], text: str, wait: Wait | None, *, fleet: Fleet | None = None, **more: Any
    ) -> Finding:
        """Return a finding about some processes; `more` are further fields of it."""
        graph, first = self._graph, keys[0] if keys else ""
        self._named.update(keys)
        members = [there for key in keys if (there := graph.fleet_of(key))]
        at, process, actor = graph.positions.get(first), graph.processes.get(first), graph.actors.get(first)
        where = at.where if at is not None else ()
        if at is not None and at.inner is not None and not {at.inner, replace(at.inner, line=0)} & {*where}:
            where = (at.inner, *where)
        ranks = tuple(sorted(one.rank for _, one in members if one.rank is not None))[:_MOST_NAMED]
        here = next((one.address for one in self._snapshot.nodes if process and one.node_id == process.node_id), "")
        named = (graph.actors[key] for key in keys[:_MOST_NAMED] if key in graph.actors)
        return Finding(
            kind,
            self._job,
            text=text,
            fleet=fleet.name if fleet is not None else members[0][0].name if members else "",
            ranks=ranks,
            ordinals=() if ranks else tuple(sorted(one.ordinal for _, one in members))[:_MOST_NAMED],
            actors=tuple(Named(one.actor_id, one.class_name, one.name) for one in named),
            pid=process.pid if process else actor.pid if actor else 0,
            node=here,
            where=where[:64],
            waiting=self._describe_waiting(wait) if wait is not None and first not in wait.waiters else Waiting(),
            chain=self._chain(first, wait) if wait is not None and first else (),
            **more,
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
        start = self._driver if key in self._graph.reach([self._driver]) else wait.waiters[0]
        path = self._graph.find_path(start, key)
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


def _describe_reason(group: Reservation) -> str:
    return f"is not placed: {_REASONS.get(group.reason, group.reason or 'Ray does not say why')}"


def _unique(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with one for each set of actors: the one with most that wait."""
    best: dict[object, Finding] = {}
    for one in found:
        key = one.actors or (one.text, one.fleet)
        if key not in best or one.waiting.count > best[key].waiting.count:
            best[key] = one
    return [*best.values()]


def _speaks_of(finding: Finding, blamed: Collection[str]) -> bool:
    """Return whether a finding that blames no process speaks of those that another one blames."""
    return bool(blamed) and (not finding.actors or bool({one.id for one in finding.actors} & {*blamed}))
