# SPDX-License-Identifier: Apache-2.0
"""Faults that are found without stacks: dead, stopped, lost and pending processes, and deadlocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model import Actor, Call, Confidence, Evidence, Finding, Kind, Reservation
from .case import CALLED, RAN, Case
from .libraries import BOOST, REPORT
from .waits import LACKS_ARGUMENTS, Wait, is_promise

# Ray tells the callers of an actor of its death within this time.
NOTICED_S = 5.0
_PENDING = ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")
# Those in other states wait for objects, or have just died.
_REQUESTING = ("PENDING_CREATION", "PENDING_NODE_ASSIGNMENT")
_DEVICES = ("GPU", "TPU", "HPU", "NPU", "neuron_cores")
_PLACEMENT = "/ray/util/placement_group.py"
# Ray's reasons why a placement group is not placed.
_REASONS = {
    "INFEASIBLE": "no node can hold it, even when it is idle (INFEASIBLE)",
    "NO_RESOURCES": "others hold what it needs (NO_RESOURCES)",
}
_NODES = "`print(RayVirtualCluster([1]).explain())` of fairlead_placement shows what each node has, and who holds it"
_STATUS = "`ray status` shows what is free and what is requested"


def find_faults(case: Case) -> tuple[list[Finding], set[str]]:
    """Return what is wrong with processes, whatever waits for them, and who waits for placement groups."""
    groups, held_up = _find_reservations(case)
    requests, waiters = _find_requests(case)
    rules = (_find_dead, _find_stopped, _find_nodes, _find_pending, _find_deadlocks, _find_left_in_collective)
    findings = [*groups, *requests, *(finding for rule in rules for finding in rule(case))]
    return findings, held_up | waiters


def _find_dead(case: Case) -> list[Finding]:
    """Name the dead actors that others wait for."""
    findings, now = list[Finding](), case.snapshot.looked_at
    for wait, key in ((waiting, target) for waiting in case.graph.waits for target in waiting.targets):
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
        joins = all(case.at(waiter).rendezvous for waiter in wait.waiters) or not actor.death.intended
        known = wait.workers is None or (wait.workers.world_size is not None and joins)
        sure = not actor.death.intended and wait.workers is not None and wait.workers.confidence == "certain"
        blames = known or (case.waited(wait) or 0.0) >= case.after_s
        findings.append(_blame_dead(case, actor, wait, age, sure=sure, blames=blames))
    return unique(findings) or _find_dead_peers(case)


def _blame_dead(
    case: Case, actor: Actor, wait: Wait, age: float | None, *, more: str = "", sure: bool = False, blames: bool = True
) -> Finding:
    said = actor.death.cause if actor.death is not None else ""
    fact, text = Evidence("actor table", f"DEAD: {said}", age), f"is dead: {said}{more}"
    fields = {"sure": sure, "blames": blames, "moves": not blames}
    return case.blame("dead", [actor.actor_id], text, wait, (age, "Ray's table of actors"), fact, **fields)


def _find_dead_peers(case: Case) -> list[Finding]:
    """Name an actor that was killed and whose peers, which may meet in an actor that they await, stand since then."""
    findings = list[Finding]()
    for actor in case.graph.actors.values():
        if actor.death is None or actor.death.intended or _is_replaced(case, actor, actor.death.at):
            continue
        age = case.snapshot.looked_at - actor.death.at
        peers = [peer.actor_id for peer in _find_alike(case, actor) if peer.created < actor.death.at]
        stand = [(case.call_age(peer) or 0.0) >= min(age, case.after_s) and not case.at(peer).moves for peer in peers]
        if age >= case.after_s and peers and all(stand):
            wait = Wait("get", tuple(peers), (actor.actor_id,))
            more = "; the other actors of its class have not moved since then"
            findings.append(_blame_dead(case, actor, wait, age, more=more))
    return findings


def _find_alike(case: Case, actor: Actor) -> list[Actor]:
    """Return the actors that live, of the class and the owner of one."""
    living = (other for other in case.graph.actors.values() if other.state == "ALIVE")
    return [other for other in living if (other.class_name, other.owner) == (actor.class_name, actor.owner)]


def _is_replaced(case: Case, lost: Actor, moment: float) -> bool:
    """Return whether an actor of its class has been created by its owner after a death."""
    return any(actor.created > moment for actor in _find_alike(case, lost))


def _find_stopped(case: Case) -> list[Finding]:
    """Name the processes that a signal has stopped, and those with such a child."""
    findings, graph = list[Finding](), case.graph
    for key, process in graph.processes.items():
        position = graph.positions[key]
        children = [child for child in process.children if {*child.states} <= {*"Tt"} and not child.ticks]
        if position.motion != "stopped" and not children:
            continue
        wait = next((wait for wait in graph.waits if key in graph.reach(wait.waiters)), None)
        if position.motion == "stopped":
            # A driver that is stopped explains idle workers, and not workers that hang.
            others = [place.kind for other, place in graph.positions.items() if other != key]
            blames = key != case.graph.driver or all(kind in ("idle", "unread") for kind in others)
            fact = Evidence("/proc/PID/stat", f"state {process.states[1]} in both snapshots")
            more = {"blames": blames, "remedy": f"kill -CONT {process.pid}"}
            text = "is stopped by a signal (SIGSTOP), or by a debugger"
            kind: Kind = "stopped" if blames else "driver"
            findings.append(case.blame(kind, [key], text, wait, (position.since_s, RAN), fact, sure=True, **more))
        for child in children:
            text = f"has a child process that is stopped: {child.title[:60]} (pid {child.pid})"
            fact = Evidence("/proc/PID/stat", f"state {child.states[1]} of pid {child.pid}")
            # Whoever waits for another process, or works, may have stopped it on purpose.
            ends = wait is not None and key not in graph.waiters and position.motion != "moving"
            more = {"blames": ends, "remedy": f"kill -CONT {child.pid}"}
            findings.append(case.blame("stopped", [key], text, wait, (None, ""), fact, sure=True, **more))
    return findings


def _find_nodes(case: Case) -> list[Finding]:
    """Name the nodes that are lost or silent and hold processes of the job."""
    findings, graph = list[Finding](), case.graph
    for node in case.snapshot.nodes:
        if node.answer not in ("lost", "silent"):
            continue
        held = [case.graph.driver] if graph.job.node_id == node.node_id else []
        held += [key for key, actor in graph.actors.items() if actor.node_id == node.node_id and actor.state != "DEAD"]
        wait = next((wait for wait in graph.waits if graph.reach(wait.waiters) & {*held}), None)
        if held and node.answer == "lost" and wait is not None:
            fact, text = Evidence("node table", node.note), "is on a node that Ray calls dead"
            findings.append(case.blame("node-lost", held, text, wait, (None, ""), fact, sure=True))
        elif held and node.answer == "silent":
            text, fact = f"is on node {node.address}, which did not answer: {node.note}", Evidence("probe", node.note)
            findings.append(case.say("node-silent", held, text, wait, evidence=(fact,)))
    return findings


def _find_pending(case: Case) -> list[Finding]:
    """Name the actors and tasks that have not started and that others wait for, and the ranks that do not join."""
    findings, launches = list[Finding](), case.snapshot.launches
    for wait in case.graph.waits:
        for key in wait.targets:
            actor, task = case.graph.actors.get(key), case.graph.tasks.get(key.removeprefix("task:"))
            if actor is not None and actor.state in _PENDING:
                fact, began = Evidence("actor table", actor.state), actor.created
                asks: Actor | Call = actor
            elif task is not None and task.state.startswith("PENDING") and actor is None:
                if task.state == LACKS_ARGUMENTS and key in case.graph.waiters:
                    continue
                fact, began, asks = Evidence("task events", task.state), task.began, task
            else:
                continue
            age = case.snapshot.looked_at - began if began else None
            lacks = _find_lacking(case, asks.resources)
            text = f"has not started{_describe_request(case, asks.resources)}{lacks}"
            if asks.environment and not lacks:
                text += f"; Ray may still be installing its runtime environment ({', '.join(asks.environment)})"
            waits_on = launches or (not lacks and case.frees())
            moves = (age is not None and age < case.after_s) or bool(waits_on)
            blames = not moves and (bool(lacks) or (wait.certain and not asks.environment)) and fact.text in _REQUESTING
            more = {"blames": blames, "moves": moves, "remedy": _STATUS}
            sure, since = wait.certain and bool(lacks) and not launches, (age, "Ray's tables")
            fact = replace(fact, age_s=age)
            findings.append(case.blame("pending", [key], text, wait, since, fact, sure=sure, **more))
        workers = wait.workers
        if workers is not None and workers.missing and not (workers.disputed or case.snapshot.partial):
            long = (case.waited(wait) or 0.0) >= case.after_s
            # The driver, or a task, may have one of these ranks.
            known = {process.environ.get("RANK") for process in case.graph.processes.values()}
            joining = known.isdisjoint(map(str, workers.missing))
            joining &= all(case.at(key).rendezvous for key in wait.waiters)
            more = {"ranks": workers.missing[:256], "rank_confidence": workers.confidence, "moves": not long}
            text = "has not joined: no actor has that rank"
            findings.append(case.say("missing", [], text, wait, workers=workers, blames=long and joining, **more))
    return unique(findings)


def _base(resources: Mapping[str, float]) -> dict[str, float]:
    """Return a request by the names of the nodes' resources; in a bundle Ray calls them "CPU_group_0_" and an id."""
    parts = {name: name.partition("_group_")[0] for name in resources}
    return {base: resources[name] for name, base in sorted(parts.items()) if base != "bundle"}


def _find_lacking(case: Case, resources: Mapping[str, float]) -> str:
    """Return what no node has of a request, as a clause; empty if a node may hold it, or nodes are not known."""
    wants = _base(resources)
    nodes = [node.resources for node in case.snapshot.nodes if node.alive]
    if not wants or not any(nodes) or any("_group_" in name for name in resources):
        return ""
    for name, amount in wants.items():
        most = max(held.get(name, 0.0) for held in nodes)
        if most < amount:
            return f"; no node has more than {most:g} {name}" if most else f"; no node has any {name}"
    fits = any(all(held.get(name, 0.0) >= amount for name, amount in wants.items()) for held in nodes)
    return "" if fits else "; no single node has all of that"


def _describe_request(case: Case, resources: Mapping[str, float]) -> str:
    """Return what an actor or task requests, as a clause."""
    wants = _base(resources)
    if not wants:
        return ""
    ids = {name.partition("_group_")[2].rpartition("_")[2] for name in resources if "_group_" in name}
    groups = [group for group in case.snapshot.reservations if group.group_id in ids]
    text = ": it requests " + ", ".join(f"{amount:g} {base}" for base, amount in wants.items())
    if groups:
        return f"{text} of {groups[0].label}, which {_describe_reason(groups[0])}"
    return text + (f" of placement group {min(ids)[:8]}" if ids else "")


def _find_reservations(case: Case) -> tuple[list[Finding], set[str]]:
    """Name the placement groups that are not placed and that processes wait for; return also who waits."""
    groups = [group for group in case.snapshot.reservations if group.job_id == case.graph.job.job_id]
    sure: dict[str, bool] = {}
    for key, process in case.graph.processes.items():
        place = case.at(key)
        ids = [reference.object_id for thread in process.threads for reference in thread.references]
        if place.thread is not None and any(frame.file.endswith(_PLACEMENT) for frame in place.thread.stack[:3]):
            sure[key] = True
        elif place.kind == "ray-get" and ids and all(map(is_promise, ids)):
            sure[key] = False
    findings, held_up = list[Finding](), set[str]()
    for group in groups:
        # Whoever has made others waits for one of these.
        makers = {other.creator or case.graph.driver for other in groups}
        own = [key for key in sure if key == (group.creator or case.graph.driver) or key not in makers]
        if not own:
            continue
        age = case.snapshot.looked_at - group.requested if group.requested else None
        settled = (age is None or age >= case.after_s) and not case.snapshot.launches
        settled &= group.reason == "INFEASIBLE" or not case.frees()
        confidence: Confidence = "certain" if all(sure[key] for key in own) and len(groups) == 1 else "likely"
        finding = case.say(
            "pending", [], _describe_reason(group), Wait("get", tuple(own), ()), confidence=confidence,
            evidence=(Evidence("placement groups", f"{group.reason}: {group.bundles}", age),), since_s=age,
            since_source="Ray's tables", subject=group.label, blames=settled, moves=not settled, remedy=_NODES,
        )  # fmt: skip
        findings.append(finding)
        held_up |= {*own}
    return findings, held_up


def _find_requests(case: Case) -> tuple[list[Finding], set[str]]:
    """Name the processes that wait inside of Fairlead for resources, ports or workers; return also who."""
    findings, held_up = list[Finding](), set[str]()
    for key, process in case.graph.processes.items():
        requests = [thread.request for thread in process.threads if thread.request is not None]
        for request in sorted(requests, key=lambda request: -(request.since_s or 0.0))[:1]:
            late = (request.since_s or 0.0) >= case.after_s
            more: dict[str, Any] = {"since_s": request.since_s, "since_source": request.function}
            more["limit_s"] = request.limit_s
            if request.function == "reserve":
                lacks = f", and {request.lacks}" if request.lacks else ""
                blames = late and not case.frees(key) and not case.snapshot.launches
                text = f"waits in reserve for {request.wants}{lacks}"
                findings.append(case.say("pending", [key], text, None, blames=blames, remedy=_NODES, **more))
                held_up.add(key)
            elif request.function == "lease_ports":
                text = "waits in lease_ports for the agents of its nodes, which lease ports"
                findings.append(case.say("undecided", [key], text, None, confidence="guess", remedy=_NODES, **more))
                held_up.add(key)
            elif not (late and any(key in wait.waiters and wait.targets for wait in case.graph.waits)):
                text = f"waits until the workers of {request.wants} have started"
                if late:
                    findings.append(case.say("undecided", [key], text, None, confidence="guess", **more))
                else:
                    findings.append(case.say_early([key], text, None, request.since_s or 0.0, confidence="guess"))
    return findings, held_up


def _find_deadlocks(case: Case) -> list[Finding]:
    """Name a cycle of processes that wait for each other."""
    graph = case.graph
    sure = graph.find_cycle(certain=True)
    cycle = sure or graph.find_cycle(certain=False)
    awaited = () if cycle else graph.find_cycle(certain=False, calls=True)
    if not (keys := cycle or awaited):
        return []
    names = " -> ".join(case.name(key) for key in (*keys, keys[0]))
    waits = [wait for wait in graph.waits if {*wait.waiters} & {*keys} and {*wait.targets} & {*keys}]
    if awaited:
        # Coroutines: their calls have run for long, and nothing of the job moves, or will by itself.
        long = all((case.call_age(key) or 0.0) >= case.after_s and case.at(key).kind == "opaque" for key in awaited)
        long &= all(case.awaits(key) or case.at(key).thread is not None for key in awaited)
        text, fact = "run calls that have called each other, and none of them moves", Evidence("task events", names)
        finding = case.blame("deadlock", awaited, f"{text}: {names}", waits[0], (None, ""), fact)
        return [finding] if len(awaited) > 1 and long and not case.moving() else []
    places = [case.at(key) for key in cycle if key in graph.positions]
    met = [case.waited(wait) for wait in waits if wait.kind == "collective"]
    # Some of the set may be in a collective of their own, which those outside of the cycle may end.
    moves = bool(met) and any(case.at(key).moves for key in graph.sinks(cycle))
    still = bool(sure) and not moves and all((age or 0.0) >= case.after_s for age in met)
    still &= all(place.motion in ("still", "waking", *["spinning"] * (place.kind == "collective")) for place in places)
    moves |= any(age is not None and age < case.after_s for age in met)
    text = f"wait for each other: {names}"
    if len(cycle) == 1:
        text = "waits for a call of itself, which cannot begin before this one is over"
    fact = Evidence("references in memory", names)
    finding = case.blame("deadlock", cycle, text, waits[0], (None, ""), fact, sure=still)
    return [finding if still else replace(finding, blames=False, confidence="guess", moves=moves)]


def _find_left_in_collective(case: Case) -> list[Finding]:
    """Name ranks of Ray Train that wait for each other: all but one in `report`, and that one in a collective."""
    findings, graph = list[Finding](), case.graph
    for key in graph.infrastructure:
        waits = [wait for wait in graph.waits if key in wait.targets and wait.kind == "get"]
        inside = [rank for wait in waits for rank in wait.waiters if case.shows(rank, REPORT)]
        alike = [(rank, actor) for rank, actor in graph.actors.items() if actor.owner == graph.actors[key].owner]
        ranks = [rank for rank, actor in alike if actor.class_name == "RayTrainWorker" and actor.state != "DEAD"]
        left = [rank for rank in ranks if rank not in inside]
        age = min([case.call_age(key) or 0.0, *(case.age(rank)[0] or float("inf") for rank in left)])
        # The collective may be one with others of the job, such as engines that receive weights.
        apart = graph.positions.keys() - {*ranks, graph.driver, *graph.infrastructure}
        if not inside or len(left) != 1 or any(case.at(other).kind != "idle" for other in apart):
            continue
        if age < case.after_s or not _is_in_collective(case, left[0]):
            continue
        # The fewer first; with two ranks the one that the collective lacks.
        keys = [*left, *inside] if len(inside) > 1 else [*inside, *left]
        place, others = case.at(left[0]).inner, f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        text = (
            f"wait for each other: {case.name(inside[0])}{others} in ray.train.report, which needs all ranks, and "
            f"{case.name(left[0])} in {place.function if place else 'a collective'}, which needs one of the others"
        )
        fact = Evidence("task events", f"report waits for {case.name(left[0])}", age)
        findings.append(case.blame("deadlock", keys, text, waits[0], (age, CALLED), fact))
    return findings


def _is_in_collective(case: Case, key: str) -> bool:
    """Return whether a rank waits for others in a collective, or in code that reduces, without a device or CPU time."""
    place, actor = case.at(key), case.graph.actors[key]
    if not place.stands or case.shows(key, REPORT):
        return False
    held = next((node.resources for node in case.snapshot.nodes if node.node_id == actor.node_id), {})
    reduces = place.kind == "device" and place.motion == "still" and (place.backward or case.shows(key, BOOST))
    return place.kind == "collective" or (reduces and bool(held) and held.keys().isdisjoint(_DEVICES))


def _describe_reason(group: Reservation) -> str:
    return f"is not placed: {_REASONS.get(group.reason, group.reason or 'Ray does not say why')}"


def unique(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with one for each set of actors: one that blames, or else the one with most that wait."""
    best: dict[object, Finding] = {}
    for finding in findings:
        key: object = tuple(sorted(actor.id for actor in finding.actors))
        key = key or ((finding.kind, finding.node, finding.pid) if finding.pid else (finding.text, finding.worker_set))
        before = best.get(key)
        # A collective says more than the `ray.get` that leads to it.
        if before is None or (finding.blames, finding.waiting.count) > (before.blames, before.waiting.count):
            best[key] = finding
    return [*best.values()]
