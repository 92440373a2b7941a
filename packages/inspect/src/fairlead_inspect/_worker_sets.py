# SPDX-License-Identifier: Apache-2.0
"""Which actors do the same work, and which rank each of them has. Pure."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairlead_placement.extension import group_pairs

from .model import Actor, Confidence, Member, Process, Snapshot, WorkerSet

LABEL = "FAIRLEAD_INSPECT_LABEL"
# What tells the worker sets of one job apart, beside the address of their rendezvous.
_APART = ("MASTER_ADDR", "MASTER_PORT", "NRL_WORKER_GROUP", "WG_PREFIX")
# verl's `<prefix><Class>_<pg>:<local>`, NeMo RL's `<prefix>-grp<g>-<local>`; `<text>-<n>`. Of a name such as "exp-0-1"
# the last number is the rank, because experiments of one driver are numbered like that.
_NAME = re.compile(r"^(?P<prefix>.*?)[-_:.]?(?:(?P<first>\d+):|grp(?P<group>\d+)-)?(?P<last>\d+)$")
_LIVING = ("ALIVE", "RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY")
_Environ = Mapping[str, Mapping[str, str]]


def find_worker_sets(snapshot: Snapshot) -> tuple[WorkerSet, ...]:
    """Return the worker sets of a snapshot: each actor is in the first one whose rule applies, and in none but that."""
    processes = {(process.node_id, process.pid): process for process in snapshot.processes}
    nothing, worker_sets = Process("", 0), list[WorkerSet]()
    environ = {actor.actor_id: processes.get((actor.node_id, actor.pid), nothing).environ for actor in snapshot.actors}
    for rule in (_by_label, _by_environ, _by_name, _by_class):
        taken = _members(worker_sets)
        new = rule([actor for actor in snapshot.actors if actor.actor_id not in taken], environ, snapshot.labels)
        taken |= _members(new)
        worker_sets += [_attach_lost(workers, snapshot.actors, taken) for workers in new]
    return tuple(worker_sets)


def _members(worker_sets: Iterable[WorkerSet]) -> frozenset[str]:
    return frozenset(member.key for workers in worker_sets for member in workers.members)


def _group(actors: Iterable[Actor], key: Callable[[Actor], Any]) -> dict[Any, list[Actor]]:
    """Return the actors of each key but None."""
    return group_pairs((group, actor) for actor in actors if (group := key(actor)) is not None)


def _make(
    rule: str, confidence: Confidence, actors: Sequence[Actor], ranks: Mapping[str, tuple[int, str]], *,
    name: str = "", world_size: int | None = None, coords: Mapping[str, Mapping[str, int]] | None = None,
) -> WorkerSet:  # fmt: skip
    """Return a worker set of actors, by default with the name of the class that most of them have."""
    by_creation = sorted(actors, key=lambda actor: (actor.created or float("inf"), actor.actor_id))
    counts = Counter(rank for rank, _ in ranks.values())
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    beyond = sorted(rank for rank in counts if world_size is not None and rank >= world_size)
    disputed = f"two members have rank {twice[0]}" if twice else ""
    if beyond and not twice:
        disputed = f"rank {beyond[0]} is beyond the world size"
    known: Mapping[str, tuple[int | None, str]] = {} if disputed else ranks
    members = []
    for ordinal, actor in enumerate(by_creation):
        rank, source = known.get(actor.actor_id, (None, ""))
        members.append(Member(actor.actor_id, rank, ordinal, source, (coords or {}).get(actor.actor_id, {})))
    members.sort(key=lambda member: (member.rank is None, member.rank or 0))
    name = name or Counter(actor.class_name for actor in actors).most_common(1)[0][0]
    sure = "guess" if disputed else confidence
    return WorkerSet(name, actors[0].job_id, rule, sure, tuple(members), world_size, disputed)


def _read_label(text: str | None) -> dict[str, Any] | None:
    try:
        label = json.loads(text or "")
    except ValueError:
        return None
    if not isinstance(label, dict) or not isinstance(label.get("group"), str) or type(label.get("rank")) is not int:
        return None
    size, coords = label.get("world_size"), label.get("coords")
    coords = {axis: index for axis, index in coords.items() if type(index) is int} if isinstance(coords, dict) else {}
    return {**label, "world_size": size if type(size) is int else None, "coords": coords}


def _by_label(actors: Sequence[Actor], environ: _Environ, labels: Mapping[str, Mapping[str, Any]]) -> list[WorkerSet]:
    """Return the worker sets of the members of Fairlead's groups, and of actors with a label in their environment."""
    given = {key: labels.get(key) or _read_label(own.get(LABEL)) for key, own in environ.items()}

    def key(actor: Actor) -> Any:
        rule = "group" if actor.actor_id in labels else "label"
        return (actor.job_id, rule, label["group"]) if (label := given[actor.actor_id]) else None

    worker_sets = []
    for (_, rule, name), alike in _group(actors, key).items():
        own = {actor.actor_id: label for actor in alike if (label := given[actor.actor_id])}
        ranks = {actor_id: (label["rank"], rule) for actor_id, label in own.items()}
        coords = {actor_id: label["coords"] for actor_id, label in own.items()}
        sizes = {label["world_size"] for label in own.values()}
        size = sizes.pop() if len(sizes) == 1 else None
        worker_sets.append(_make(rule, "certain", alike, ranks, name=name, world_size=size, coords=coords))
    return worker_sets


def _by_environ(actors: Sequence[Actor], environ: _Environ, labels: object) -> list[WorkerSet]:
    def key(actor: Actor) -> Any:
        own = environ[actor.actor_id]
        size, rank = own.get("WORLD_SIZE", ""), own.get("RANK", "")
        if not (re.fullmatch("[0-9]{1,8}", size) and re.fullmatch("[0-9]{1,8}", rank)) or int(size) < 2:
            return None
        address, port, *groups = map(own.get, _APART)
        apart = (address, port) if address is not None and port is not None else (actor.class_name,)
        return (actor.job_id, int(size), *groups, *apart)

    worker_sets = []
    for (_, size, *_), alike in _group(actors, key).items():
        ranks = {actor.actor_id: (int(environ[actor.actor_id]["RANK"]), "environ") for actor in alike}
        worker_sets.append(_make("environment", "certain", alike, ranks, world_size=size))
    return worker_sets


def _by_name(actors: Sequence[Actor], environ: object, labels: object) -> list[WorkerSet]:
    parts = {actor.actor_id: match.groupdict() for actor in actors if (match := _NAME.match(actor.name))}

    def first(actor: Actor) -> str | None:
        return parts[actor.actor_id]["first"] or parts[actor.actor_id]["group"]

    def key(actor: Actor) -> Any:
        if (part := parts.get(actor.actor_id)) is None:
            return None
        return actor.job_id, actor.namespace, part["prefix"], actor.class_name, first(actor) is not None

    worker_sets = []
    for (*_, pairs), named in _group(actors, key).items():
        if len(alike := _without_former(named)) > 1:
            numbers = {actor.actor_id: (int(first(actor) or 0), int(parts[actor.actor_id]["last"])) for actor in alike}
            known = _from_pairs(numbers) if pairs else {actor_id: last for actor_id, (_, last) in numbers.items()}
            ranks = {actor_id: (rank, "name") for actor_id, rank in known.items()}
            worker_sets.append(_make("names", "likely", alike, ranks))
    return worker_sets


def _without_former(actors: Sequence[Actor]) -> list[Actor]:
    """Return actors without those that had died before one of the others was created."""
    created = [actor.created for actor in actors if actor.state == "ALIVE"]
    return [actor for actor in actors if actor.death is None or all(moment <= actor.death.at for moment in created)]


def _from_pairs(numbers: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the ranks of names with two integers, of which the last is a rank in a group; none if one is missing."""
    groups, locals_ = sorted({first for first, _ in numbers.values()}), {second for _, second in numbers.values()}
    if len(numbers) != len(groups) * len(locals_) or locals_ != set(range(len(locals_))):
        return {}
    return {actor_id: groups.index(first) * len(locals_) + second for actor_id, (first, second) in numbers.items()}


def _maker(actor: Actor) -> tuple[str, str, str, str]:
    return actor.job_id, actor.namespace, actor.owner, actor.class_name


def _by_class(actors: Sequence[Actor], environ: object, labels: object) -> list[WorkerSet]:
    living = (actor for actor in actors if actor.state in _LIVING)
    return [_make("class", "guess", alike, {}) for alike in _group(living, _maker).values() if len(alike) > 1]


def _attach_lost(workers: WorkerSet, actors: Sequence[Actor], taken: frozenset[str]) -> WorkerSet:
    """Add the actors to a worker set that died as members of it, and those that have not started.

    They were made by the owner of the members, of their class, before the death, and nothing has taken their place: no
    member was created after the death.
    """
    own, missing = _members([workers]), workers.missing
    members = [actor for actor in actors if actor.actor_id in own]
    alive = [actor for actor in members if actor.state == "ALIVE"]
    makers = {_maker(actor) for actor in members}
    lost = [
        actor
        for actor in actors
        if actor.actor_id not in taken
        and _maker(actor) in makers
        and (actor.state != "DEAD" or actor in _without_former([*alive, actor]))
    ]
    # More than are missing belong to another worker set of this class.
    if not alive or (workers.world_size is not None and len(lost) > len(missing)):
        return workers
    # The only rank that no member has is that of the only one that is lost.
    alone = len(lost) == 1 and len(missing) == 1 and not workers.disputed
    rank, source = (missing[0], "the only rank left") if alone else (None, "")
    new = (Member(actor.actor_id, rank, len(members) + index, source) for index, actor in enumerate(lost))
    return replace(workers, members=(*workers.members, *new))
