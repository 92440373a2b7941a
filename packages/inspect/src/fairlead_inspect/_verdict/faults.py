# SPDX-License-Identifier: Apache-2.0
"""Faults that are found without stacks: dead, stopped, lost and pending processes, and deadlocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..model import Actor, Confidence, Evidence, Finding, Fleet, Reservation
from .case import RAN, Case
from .waits import LACKS_ARGUMENTS, Wait, is_promise

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
_NODES = "`python -m fairlead_placement nodes` shows what each node has, and who holds it"
_STATUS = "`ray status` shows what is free and what is requested"


def find_dead(case: Case) -> list[Finding]:
    """Name the dead actors that others wait for."""
    found, now = list[Finding](), case.snapshot.looked_at
    for wait, key in ((one, target) for one in case.graph.waits for target in one.targets):
        actor = case.graph.actors.get(key)
        if actor is None or actor.death is None or _is_replaced(case, actor, actor.death.at):
            continue
        age = max(0.0, now - actor.death.at) if actor.death.at else None
        # Whoever ends a group of actors ends one after the other, and the last ones may wait until then.
        if actor.death.intended and (age or 0.0) < case.after_s:
            continue
        # `ray.get` raises for an actor that is dead, so that only what Ray has not yet noticed waits for it.
        if wait.kind != "collective" and (len(wait.targets) > 1 or (age or 0.0) < NOTICED_S):
            continue
        # Those that are left may go on without it, in a collective of their own, unless they wait for it to join.
        joins = all(case.at(one).rendezvous for one in wait.waiters) or not actor.death.intended
        known = wait.fleet is None or (wait.fleet.world_size is not None and joins)
        sure = not actor.death.intended and wait.fleet is not None and wait.fleet.confidence == "certain"
        fact, text = Evidence("actor table", f"DEAD: {actor.death.cause}", age), f"is dead: {actor.death.cause}"
        one = case.blame("dead", [key], text, wait, (age, "Ray's table of actors"), fact, sure=sure)
        blames = known or (one.waiting.since_s or 0.0) >= case.after_s
        found.append(replace(one, blames=blames, moves=not blames))
    return unique(found) or _find_dead_peers(case)


def _find_dead_peers(case: Case) -> list[Finding]:
    """Name an actor that was killed while its peers work together by other means, such as an actor that they await.

    All peers that are left must have stood since then in a call.
    """
    found = list[Finding]()
    for key, actor in case.graph.actors.items():
        if actor.death is None or actor.death.intended or _is_replaced(case, actor, actor.death.at):
            continue
        age = case.snapshot.looked_at - actor.death.at
        peers = [
            one.actor_id
            for one in case.graph.actors.values()
            if one.state == "ALIVE" and (one.class_name, one.owner) == (actor.class_name, actor.owner)
            and one.created < actor.death.at
        ]  # fmt: skip
        waits = [
            one for one in peers if (case.call_age(one) or 0.0) >= min(age, case.after_s) and not case.at(one).moves
        ]
        if age < case.after_s or not peers or len(waits) < len(peers):
            continue
        fact = Evidence("actor table", f"DEAD: {actor.death.cause}", age)
        text = f"is dead: {actor.death.cause}; the other actors of its class have not moved since then"
        wait = Wait("get", tuple(peers), (key,))
        found.append(case.blame("dead", [key], text, wait, (age, "Ray's table of actors"), fact))
    return found


def _is_replaced(case: Case, lost: Actor, at: float) -> bool:
    """Return whether an actor of its class has been created by its owner after a death."""
    return any(
        one.state == "ALIVE" and one.created > at and (one.class_name, one.owner) == (lost.class_name, lost.owner)
        for one in case.graph.actors.values()
    )


def find_stopped(case: Case) -> list[Finding]:
    """Name the processes that a signal has stopped, and those with such a child."""
    found, graph = list[Finding](), case.graph
    for key, process in graph.processes.items():
        at = graph.positions[key]
        children = [one for one in process.children if {*one.states} <= {*"Tt"} and not one.ticks]
        wait = None
        if at.motion == "stopped" or children:
            wait = next((one for one in graph.waits if key in graph.reach(one.waiters)), None)
        if at.motion == "stopped":
            # A driver that is stopped explains idle workers, and not workers that hang.
            others = [one.kind for of, one in graph.positions.items() if of != key]
            blames = key != case.driver or all(one in ("idle", "unread") for one in others)
            fact = Evidence("/proc/PID/stat", f"state {process.states[1]} in both snapshots")
            text = "is stopped by a signal (SIGSTOP), or by a debugger"
            one = case.blame("stopped" if blames else "driver", [key], text, wait, (at.since_s, RAN), fact, sure=True)
            found.append(replace(one, blames=blames, remedy=f"kill -CONT {process.pid}"))
        for child in children:
            text = f"has a child process that is stopped: {child.title[:60]} (pid {child.pid})"
            fact = Evidence("/proc/PID/stat", f"state {child.states[1]} of pid {child.pid}")
            one = case.blame("stopped", [key], text, wait, (None, ""), fact, sure=True)
            # Whoever waits for another process, or works, may have stopped it on purpose.
            ends = wait is not None and key not in graph.waiters() and at.motion != "moving"
            found.append(replace(one, blames=ends, remedy=f"kill -CONT {child.pid}"))
    return found


def find_nodes(case: Case) -> list[Finding]:
    """Name the nodes that are lost or silent and hold processes of the job."""
    found, graph = list[Finding](), case.graph
    for node in case.snapshot.nodes:
        if node.answer not in ("lost", "silent"):
            continue
        there = [case.driver] if graph.job.node_id == node.node_id else []
        there += [key for key, one in graph.actors.items() if one.node_id == node.node_id and one.state != "DEAD"]
        wait = next((one for one in graph.waits if graph.reach(one.waiters) & {*there}), None)
        if there and node.answer == "lost" and wait is not None:
            fact, text = Evidence("node table", node.note), "is on a node that Ray calls dead"
            found.append(case.blame("node-lost", there, text, wait, (None, ""), fact, sure=True))
        elif there and node.answer == "silent":
            text, fact = f"is on node {node.address}, which did not answer: {node.note}", Evidence("probe", node.note)
            found.append(case.say("node-silent", there, text, wait, evidence=(fact,)))
    return found


def find_pending(case: Case) -> list[Finding]:
    """Name the actors and tasks that have not started and that others wait for, and the ranks that do not join."""
    found = list[Finding]()
    for wait in case.graph.waits:
        for key in wait.targets:
            actor, task = case.graph.actors.get(key), case.graph.tasks.get(key.removeprefix("task:"))
            if actor is not None and actor.state in _PENDING:
                state, source, began = actor.state, "actor table", actor.created
                requests, environment = actor.resources, actor.environment
            elif actor is None and task is not None and task.state.startswith("PENDING"):
                if task.state == LACKS_ARGUMENTS and key in case.graph.waiters():
                    continue
                state, source, began = task.state, "task events", task.began
                requests, environment = task.resources, task.environment
            else:
                continue
            age = case.snapshot.looked_at - began if began else None
            lacks = _find_lacking(case, requests)
            text = f"has not started{_describe_request(case, requests)}{lacks}"
            if environment and not lacks:
                text += f"; Ray may still be installing its runtime environment ({', '.join(environment)})"
            sure = wait.certain and bool(lacks) and not case.snapshot.launches
            fact = Evidence(source, state, age)
            one = case.blame("pending", [key], text, wait, (age, "Ray's tables"), fact, sure=sure)
            waits_on = case.snapshot.launches or (not lacks and case.graph.frees(case.since))
            moves = (age is not None and age < case.after_s) or bool(waits_on)
            blames = not moves and (wait.certain or bool(lacks)) and state in _REQUESTING
            blames &= bool(lacks) or not environment
            found.append(replace(one, blames=blames, moves=moves, remedy=_STATUS, since_s=age))
        if wait.fleet is not None and wait.fleet.missing and not wait.fleet.disputed and not case.snapshot.partial:
            found.append(_find_missing(case, wait, wait.fleet))
    return unique(found)


def _base(resources: Mapping[str, float]) -> dict[str, float]:
    """Return a request by the names of the nodes' resources; in a bundle Ray calls them "CPU_group_0_" and an id."""
    parts = {name: name.partition("_group_")[0] for name in resources}
    return {base: resources[name] for name, base in sorted(parts.items()) if base != "bundle"}


def _find_lacking(case: Case, resources: Mapping[str, float]) -> str:
    """Return what no node has of a request, as a clause; empty if a node may hold it, or nodes are not known."""
    wants = _base(resources)
    nodes = [one.resources for one in case.snapshot.nodes if one.alive]
    if not wants or not any(nodes) or any("_group_" in name for name in resources):
        return ""
    for name, amount in wants.items():
        most = max(one.get(name, 0.0) for one in nodes)
        if most < amount:
            return f"; no node has more than {most:g} {name}" if most else f"; no node has any {name}"
    fits = any(all(one.get(name, 0.0) >= amount for name, amount in wants.items()) for one in nodes)
    return "" if fits else "; no single node has all of that"


def _describe_request(case: Case, resources: Mapping[str, float]) -> str:
    """Return what an actor or task requests, as a clause."""
    wants = _base(resources)
    if not wants:
        return ""
    ids = {name.partition("_group_")[2].rpartition("_")[2] for name in resources if "_group_" in name}
    groups = [one for one in case.snapshot.reservations if one.group_id in ids]
    text = ": it requests " + ", ".join(f"{amount:g} {base}" for base, amount in wants.items())
    if groups:
        return f"{text} of {groups[0].label}, which {_describe_reason(groups[0])}"
    return text + (f" of placement group {min(ids)[:8]}" if ids else "")


def _find_missing(case: Case, wait: Wait, fleet: Fleet) -> Finding:
    long = (case.waited(wait) or 0.0) >= case.after_s
    joining = all(case.at(key).rendezvous for key in wait.waiters)
    # The driver, or a task, may have one of these ranks.
    joining &= {one.environ.get("RANK") for one in case.graph.processes.values()}.isdisjoint(map(str, fleet.missing))
    text = "has not joined: no actor has that rank"
    one = case.say("missing", [], text, wait, fleet=fleet, blames=long and joining, moves=not long)
    return replace(one, ranks=fleet.missing[:256], rank_confidence=fleet.confidence)


def find_reservations(case: Case) -> tuple[list[Finding], set[str]]:
    """Name the placement groups that are not placed and that processes wait for; return also who waits."""
    groups = [one for one in case.snapshot.reservations if one.job_id == case.graph.job.job_id]
    waiting = {key: _waits_for_placement(case, key) for key in case.graph.processes if groups}
    sure = {key: is_sure for key, is_sure in waiting.items() if is_sure is not None}
    found, held_up = list[Finding](), set[str]()
    for group in groups:
        # Whoever has made others waits for one of these.
        makers = {one.creator or case.driver for one in groups}
        own = [key for key in sure if key == (group.creator or case.driver) or key not in makers]
        if not own:
            continue
        age = case.snapshot.looked_at - group.requested if group.requested else None
        settled = (age is None or age >= case.after_s) and not case.snapshot.launches
        settled &= group.reason == "INFEASIBLE" or not case.graph.frees(case.since)
        confidence: Confidence = "certain" if all(sure[key] for key in own) and len(groups) == 1 else "likely"
        one = case.say(
            "pending", [], _describe_reason(group), Wait("get", tuple(own), ()), confidence=confidence,
            evidence=(Evidence("placement groups", f"{group.reason}: {group.bundles}", age),), since_s=age,
            since_source="Ray's tables", subject=group.label, blames=settled, moves=not settled, remedy=_NODES,
        )  # fmt: skip
        found.append(one)
        held_up |= {*own}
    return found, held_up


def _waits_for_placement(case: Case, key: str) -> bool | None:
    """Return whether a process waits for a placement group for sure, or None if it does not wait for any."""
    at, references = case.at(key), case.graph.processes[key].references
    if at.thread is not None and any(frame.file.endswith(_PLACEMENT) for frame in at.thread.stack[:3]):
        return True
    promised = at.kind == "ray-get" and references and all(is_promise(one.object_id) for one in references)
    return False if promised else None


def find_deadlocks(case: Case) -> list[Finding]:
    """Name a cycle of processes that wait for each other."""
    graph = case.graph
    sure = graph.find_cycle(certain=True)
    if not (cycle := sure or graph.find_cycle(certain=False)):
        return _find_awaited_cycle(case)
    waits = [one for one in graph.waits if {*one.waiters} & {*cycle} and {*one.targets} & {*cycle}]
    at = [graph.positions[key] for key in cycle if key in graph.positions]
    still = bool(sure) and all(one.motion in ("still", "waking") for one in at)
    if met := [one for one in waits if one.kind == "collective"]:
        # Some of the set may be in a collective of their own, which those outside of the cycle may end.
        still &= not any(case.at(key).moves for key in graph.sinks(cycle))
        still &= all((case.waited(one) or 0.0) >= case.after_s for one in met)
    names = " -> ".join(case.name(key) for key in (*cycle, cycle[0]))
    text = f"wait for each other: {names}"
    if len(cycle) == 1:
        text = "waits for a call of itself, which cannot begin before this one is over"
    fact = Evidence("references in memory", names)
    one = case.blame("deadlock", cycle, text, waits[0], (None, ""), fact, sure=still)
    return [one if still else replace(one, blames=False, confidence="guess", moves=bool(met))]


def _find_awaited_cycle(case: Case) -> list[Finding]:
    """Name coroutines that have called each other, if their calls have run for long and nothing of the job moves."""
    cycle = case.graph.find_cycle(certain=False, calls=True)
    long = all((case.call_age(key) or 0.0) >= case.after_s and case.at(key).kind == "opaque" for key in cycle)
    if len(cycle) < 2 or not long or case.moving():
        return []
    names = " -> ".join(case.name(key) for key in (*cycle, cycle[0]))
    text = f"run calls that have called each other, and none of them moves: {names}"
    wait = next(one for one in case.graph.waits if {*one.waiters} & {*cycle})
    return [case.blame("deadlock", cycle, text, wait, (None, ""), Evidence("task events", names))]


def _describe_reason(group: Reservation) -> str:
    return f"is not placed: {_REASONS.get(group.reason, group.reason or 'Ray does not say why')}"


def unique(found: Sequence[Finding]) -> list[Finding]:
    """Return findings with one for each set of actors: the one with most that wait."""
    best: dict[object, Finding] = {}
    for one in found:
        key = one.actors or (one.text, one.fleet)
        if key not in best or one.waiting.count > best[key].waiting.count:
            best[key] = one
    return [*best.values()]
