# SPDX-License-Identifier: Apache-2.0
"""Which actors do the same work, and which rank each of them has. Pure."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .model import Actor, Confidence, Fleet, Member, Process, Snapshot

LABEL = "FAIRLEAD_INSPECT_LABEL"
# What tells the fleets of one job apart, beside the address of their rendezvous.
_GROUPS = ("NRL_WORKER_GROUP", "WG_PREFIX")
# verl's `<prefix><Class>_<pg>:<local>`, NeMo RL's `<prefix>-grp<g>-<local>`; `<text>-<n>`. Of a name such as "exp-0-1"
# the last number is the rank, because experiments of one driver are numbered like that.
_NAME = re.compile(r"^(?P<prefix>.*?)[-_:.]?(?:(?P<first>\d+):|grp(?P<group>\d+)-)?(?P<last>\d+)$")
_LIVING = ("ALIVE", "RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY")


def find_fleets(snapshot: Snapshot) -> tuple[Fleet, ...]:
    """Return the fleets of a snapshot: each actor is in the first one whose rule applies, and in none but that."""
    processes = {(one.node_id, one.pid): one for one in snapshot.processes}
    actors, nothing = snapshot.actors, Process("", 0)
    environ = {one.actor_id: processes.get((one.node_id, one.pid), nothing).environ for one in actors}
    found: list[Fleet] = []
    for rule in (partial(_by_label, snapshot.labels), _by_environ, _by_name, _by_class):
        taken = _members(found)
        new = rule([one for one in actors if one.actor_id not in taken], environ)
        taken |= _members(new)
        found += [_attach_lost(fleet, actors, taken) for fleet in new]
    return tuple(found)


def _members(fleets: Iterable[Fleet]) -> frozenset[str]:
    return frozenset(member.key for fleet in fleets for member in fleet.members)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else None


def _group(actors: Iterable[Actor], key: Any) -> dict[Any, list[Actor]]:
    found: dict[Any, list[Actor]] = {}
    for actor in actors:
        if (of := key(actor)) is not None:
            found.setdefault(of, []).append(actor)
    return found


def _make(
    name: str,
    rule: str,
    confidence: Confidence,
    actors: Sequence[Actor],
    ranks: Mapping[str, tuple[int, str]],
    world_size: int | None = None,
    coords: Mapping[str, Mapping[str, int]] | None = None,
) -> Fleet:
    by_creation = sorted(actors, key=lambda one: (one.created or float("inf"), one.actor_id))
    order = {one.actor_id: at for at, one in enumerate(by_creation)}
    counts = Counter(rank for rank, _ in ranks.values())
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    beyond = sorted(rank for rank in counts if world_size is not None and rank >= world_size)
    disputed = ""
    if twice or beyond:
        disputed = f"two members have rank {twice[0]}" if twice else f"rank {beyond[0]} is beyond the world size"
    known: Mapping[str, tuple[int | None, str]] = {} if disputed else ranks
    given = ((one.actor_id, *known.get(one.actor_id, (None, ""))) for one in actors)
    members = [
        Member(actor_id, rank, order[actor_id], source, (coords or {}).get(actor_id, {}))
        for actor_id, rank, source in given
    ]
    ordered = sorted(members, key=lambda one: (one.rank is None, one.rank or 0, one.ordinal))
    return Fleet(
        name, actors[0].job_id, rule, "guess" if disputed else confidence, tuple(ordered), world_size, disputed
    )


def _common_class(actors: Iterable[Actor]) -> str:
    return Counter(one.class_name for one in actors).most_common(1)[0][0]


def _read_label(text: str | None) -> dict[str, Any] | None:
    try:
        label = json.loads(text or "")
    except ValueError:
        return None
    if not isinstance(label, dict) or not isinstance(label.get("group"), str) or type(label.get("rank")) is not int:
        return None
    if type(label.get("world_size")) is not int:
        label["world_size"] = None
    coords = label.get("coords")
    label["coords"] = {axis: at for axis, at in coords.items() if type(at) is int} if isinstance(coords, dict) else {}
    return label


def _by_label(
    registered: Mapping[str, Mapping[str, Any]], actors: Sequence[Actor], environ: Mapping[str, Mapping[str, str]]
) -> list[Fleet]:
    """Return the fleets of the members of Fairlead's groups, and of actors with a label in their environment."""
    labels = {one: registered.get(one) or _read_label(own.get(LABEL)) for one, own in environ.items()}

    def key(actor: Actor) -> Any:
        label = labels[actor.actor_id]
        rule = "group" if actor.actor_id in registered else "label"
        return (actor.job_id, rule, label["group"]) if label else None

    found = []
    for (_, rule, name), there in _group(actors, key).items():
        given = {one.actor_id: label for one in there if (label := labels[one.actor_id])}
        ranks = {one: (label["rank"], rule) for one, label in given.items()}
        coords = {one: label["coords"] for one, label in given.items()}
        sizes = {label["world_size"] for label in given.values()}
        size = sizes.pop() if len(sizes) == 1 else None
        found.append(_make(name, rule, "certain", there, ranks, size, coords))
    return found


def _by_environ(actors: Sequence[Actor], environ: Mapping[str, Mapping[str, str]]) -> list[Fleet]:
    def key(actor: Actor) -> Any:
        own = environ[actor.actor_id]
        size, rank = _number(own.get("WORLD_SIZE")), _number(own.get("RANK"))
        if size is None or rank is None or size < 2:
            return None
        address = own.get("MASTER_ADDR"), own.get("MASTER_PORT")
        apart = tuple(own.get(name) for name in _GROUPS)
        return (actor.job_id, size, *apart, *((actor.class_name,) if None in address else address))

    found = []
    for of, there in _group(actors, key).items():
        ranks = {one.actor_id: (int(environ[one.actor_id]["RANK"]), "environ") for one in there}
        found.append(_make(_common_class(there), "environment", "certain", there, ranks, of[1]))
    return found


def _by_name(actors: Sequence[Actor], environ: Mapping[str, Mapping[str, str]]) -> list[Fleet]:
    parts = {one.actor_id: match for one in actors if (match := _NAME.match(one.name))}

    def key(actor: Actor) -> Any:
        if (match := parts.get(actor.actor_id)) is None:
            return None
        return actor.job_id, actor.namespace, match["prefix"], actor.class_name, _first(match) is not None

    found = []
    for (*_, pairs), named in _group(actors, key).items():
        there = _without_former(named)
        if len(there) > 1:
            number = {
                one.actor_id: (int(_first(match) or 0), int(match["last"]))
                for one in there
                if (match := parts[one.actor_id])
            }
            numbers = _from_pairs(number) if pairs else {one: last for one, (_, last) in number.items()}
            ranks = {one: (rank, "name") for one, rank in numbers.items()}
            found.append(_make(_common_class(there), "names", "likely", there, ranks))
    return found


def _first(match: re.Match[str]) -> str | None:
    return match["first"] or match["group"]


def _without_former(actors: Sequence[Actor]) -> list[Actor]:
    """Return actors without those that had died before one of the others was created."""
    created = [one.created for one in actors if one.state == "ALIVE"]
    return [one for one in actors if one.death is None or all(at <= one.death.at for at in created)]


def _from_pairs(numbers: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return ranks of names with two integers, of which the last is a rank in a group; none if one is missing."""
    groups, locals_ = sorted({first for first, _ in numbers.values()}), {second for _, second in numbers.values()}
    complete = len(numbers) == len(groups) * len(locals_) and locals_ == set(range(len(locals_)))
    return (
        {one: groups.index(first) * len(locals_) + second for one, (first, second) in numbers.items()}
        if complete
        else {}
    )


def _by_class(actors: Sequence[Actor], environ: Mapping[str, Mapping[str, str]]) -> list[Fleet]:
    there = _group(
        (one for one in actors if one.state in _LIVING),
        lambda one: (one.job_id, one.namespace, one.owner, one.class_name),
    )
    return [_make(of[-1], "class", "guess", alike, {}) for of, alike in there.items() if len(alike) > 1]


def _attach_lost(fleet: Fleet, actors: Sequence[Actor], taken: frozenset[str]) -> Fleet:
    """Add the actors to a fleet that died as members of it, and those that have not started.

    They were made by the owner of the members, of their class, before the death, and nothing has taken their place: no
    member was created after the death.
    """
    own = _members([fleet])
    members = [one for one in actors if one.actor_id in own]
    alive = [one for one in members if one.state == "ALIVE"]
    if not alive:
        return fleet
    owners = {(one.job_id, one.namespace, one.owner, one.class_name) for one in members}
    lost = [
        one
        for one in actors
        if one.actor_id not in taken
        and (one.job_id, one.namespace, one.owner, one.class_name) in owners
        and (one.state != "DEAD" or one in _without_former([*alive, one]))
    ]
    if fleet.world_size is not None:  # the others belong to another fleet of this class
        lost = lost if len(lost) <= len(fleet.missing) else []
    if not lost:
        return fleet
    missing = fleet.missing
    # The only rank that no member has is that of the only one that is lost.
    alone = len(lost) == 1 and len(missing) == 1 and not fleet.disputed
    new = tuple(
        Member(one.actor_id, missing[0] if alone else None, len(members) + at, "the only rank left" if alone else "")
        for at, one in enumerate(lost)
    )
    return replace(fleet, members=(*fleet.members, *new))
