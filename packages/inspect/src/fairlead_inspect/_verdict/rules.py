# SPDX-License-Identifier: Apache-2.0
"""The verdict: the faults of each job, and the process that each fault blames. In doubt it lists suspects."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._worker_sets import find_worker_sets
from ..model import Evidence, Finding, Kind, Snapshot
from . import faults
from .case import CALLED, RAN, WAITED, Case
from .collectives import find_mismatches
from .positions import STANDS, WAKING_TICKS, Position, find_own
from .waits import Wait, make_graph

# A rank may wait so long for a file or a server and be well.
AFTER_S = 60.0
# What has stood for a shorter time is not worth a word, if nobody else waits for it.
EARLY_S = 10.0
MOST_SUSPECTS = 5
NO_JOB = "No job runs on this cluster. A driver in init_ray or ray.init has not registered one yet."
_STACKS = "`ps` shows when each process ran last, `stacks` where it stands; `why` in a minute shows which of them moved"
_REPLICA = "may serve a request of another replica, which Ray does not record"
_RECORDS = (
    "torch's flight recorder names the rank that has not begun the collective: set TORCH_FR_DUMP_TEMP_FILE before the "
    "job starts; with NCCL 2.24 or newer, ncclras on a node lists the ranks of each communicator"
)


def diagnose(snapshot: Snapshot, *, after_s: float = AFTER_S) -> tuple[Finding, ...]:
    """Return what is wrong with the jobs of a snapshot, and what only explains it. Without a job it is undecided.

    Args:
        snapshot: what `look` has returned.
        after_s: seconds after which a process that does not move, and that others wait for, is late.
    """
    if not snapshot.jobs:
        return (Finding("undecided", "", "guess", text=NO_JOB),)
    worker_sets = find_worker_sets(snapshot)
    cases = (Case(snapshot, make_graph(snapshot, job, worker_sets), after_s) for job in snapshot.jobs)
    return tuple(finding for case in cases for finding in _judge(case))


def exit_status(findings: Iterable[Finding]) -> int:
    """Return the exit status of `why` for the result of `diagnose`.

    It is 1 if a finding blames a process; else 4 if something does not move and is not explained; else 0.
    """
    statuses = {
        1 if finding.blames else 0 if finding.moves or finding.kind in ("working", "driver") else 4
        for finding in findings
    }
    return 1 if 1 in statuses else max(statuses, default=0)


@dataclass(frozen=True)
class _End:
    """The facts about the processes at the end of a wait: those that wait for nobody that is known."""

    place: Position  # of the first of them
    alike: bool  # all stand at one place
    age: float | None  # of the one that has stood for least; None if that is not known
    waited: float  # for how long those in a collective have waited for them; 0 if that is not known
    young: bool  # those in a collective have waited for less than it takes to be late
    late: bool  # `age` is as long as it takes to be late
    fresh: bool  # no call on the way there, or of those that wait, is as old as that, and the driver does not poll
    collective: bool  # ranks in a collective wait for them
    certain: bool  # the waits that lead there are, and no rank of their set is missing
    sleeps: bool  # one of them waits for a timer or has traffic
    called: bool  # the caller of idle ones waits for their peers, so that they should have been called
    paused: bool  # it is a single task that runs, for as long as it takes to be late, without code of the job


@dataclass(frozen=True)
class _Row:
    """What is said of the end of a wait, if it is so; an empty text explains it elsewhere."""

    kind: Kind
    holds: Callable[[_End], bool]
    text: str
    blames: bool = False


# The first row that holds is the finding.
_TABLE = (
    _Row("working", lambda end: end.fresh and not end.late, "others wait for it, but its call is younger than --after"),
    _Row("undecided", lambda end: end.place.kind in ("opaque", "channel"),
         "runs a call, and another thread or a coroutine of it may wait"),
    _Row("undecided", lambda end: end.place.kind == "unread", "its stacks cannot be read"),
    _Row("undecided", lambda end: end.place.kind in ("device", "collective"),
         "may wait for its device or for another rank"),
    _Row("undecided", lambda end: end.place.kind in ("library", "ray-get"),
         "waits inside Ray or one of its libraries, and it is not known what for"),
    _Row("working", lambda end: end.young or (not end.alike and end.age is not None and not end.late),
         "others wait for it, but it has not stood still for as long as --after"),
    _Row("undecided", lambda end: not end.alike, "does not move; it may wait for another one"),
    _Row("late", lambda end: end.place.kind == "idle" and end.called and end.certain,
         "runs nothing: it was not called, or it has returned", blames=True),
    _Row("late", lambda end: end.place.kind == "idle" and end.paused and end.certain,
         "is a generator that waits until its items are taken, or waits inside of Ray", blames=True),
    _Row("undecided", lambda end: end.place.kind == "idle", "runs nothing: its call may be over, or wait for its turn"),
    _Row("undecided", lambda end: end.place.motion == "unknown", "was not seen long enough to say whether it moves"),
    _Row("undecided", lambda end: end.age is None and end.place.motion == "waking",
         "wakes up now and then at one line, and it is not known since when"),
    _Row("undecided", lambda end: end.age is None and end.place.motion != "spinning",
         "does not move, and it is not known since when"),
    _Row("working", lambda end: not end.late and not (end.collective and end.place.motion == "spinning"),
         "others wait for it, but it has not stood still for as long as --after"),
    _Row("disk", lambda end: end.place.motion == "disk" and end.certain,
         "waits for a disk or for a device driver", blames=True),
    _Row("undecided", lambda end: end.sleeps and not (end.collective and end.place.motion == "still"),
         "sleeps on purpose, or has traffic"),
    _Row("late", lambda end: end.place.motion == "still" and end.certain, "does not move", blames=True),
    _Row("late", lambda end: end.place.motion == "waking" and end.certain,
         "stands at one line, where it only wakes up to look again", blames=True),
    _Row("undecided", lambda end: end.place.motion == "spinning",
         "computes at one line: an endless loop, or long work"),
    _Row("undecided", lambda end: True, "does not move; it may wait for another one"),
)  # fmt: skip


def _judge(case: Case) -> list[Finding]:
    findings, held_up = faults.find_faults(case)
    # Who waits for one of these is explained.
    explained = held_up | {actor.id for finding in findings for actor in finding.actors if finding.blames}
    tasks = {(finding.task, finding.node, finding.pid) for finding in findings if finding.blames and finding.task}
    keys = {f"task:{key}": task.name for key, task in case.graph.tasks.items()} if tasks else {}
    explained |= {key for key, name in keys.items() if (name, *case.find_process(key)) in tasks}
    if any(finding.kind == "stopped" and not (finding.actors or finding.task) for finding in findings):
        explained.add(case.graph.driver)
    mismatches, members = find_mismatches(case, explained)
    findings, explained = [*findings, *mismatches], explained | members
    ends, suspects = _find_ends(case, explained)
    blamed = {actor.id for end in ends if end.blames for actor in end.actors}
    # A finding that blames no process, and speaks of those that another one blames, says nothing more.
    findings += [
        finding
        for finding in ends
        if finding.blames or not blamed or (finding.actors and blamed.isdisjoint(known.id for known in finding.actors))
    ]
    if not any(finding.blames for finding in findings) and (finding := _find_only(case, explained)) is not None:
        findings = [finding, *(other for other in findings if other.kind != "working")]
    if not any(finding.blames for finding in findings):
        works = any(finding.kind == "working" for finding in findings)
        standing = [key for key in _standing(case) if key not in explained and not (works and key == case.graph.driver)]
        suspects = dict.fromkeys(standing, "its call has not moved") | suspects
        # What is at the end of one wait may be on the way of another.
        places = {case.find_process(key) for key in suspects if key in case.graph.processes}
        findings = [other for other in findings if other.kind != "working" or (other.node, other.pid) not in places]
        findings += [*_list_suspects(case, suspects, findings), *_find_unread(case, {*suspects, *explained})]
    if {finding.kind for finding in findings} <= {"working", "undecided"}:
        said = {(finding.node, finding.pid) for finding in findings}
        said |= {(suspect.node, suspect.pid) for finding in findings for suspect in finding.suspects}
        findings += _find_early(case, said | {case.find_process(case.graph.driver)} if said else said)
    return sorted(findings, key=lambda finding: (not finding.blames, -(finding.since_s or 0.0)))


def _find_early(case: Case, said: Collection[tuple[str, int]]) -> list[Finding]:
    """Say what else has stood for some seconds in a job in which nothing is late, which is no all-clear yet."""
    early = replace(case, after_s=min(EARLY_S, case.after_s))
    ages = {key: case.age(key)[0] or case.call_age(key) or early.after_s for key in _standing(early)}
    for wait in case.graph.waits:
        if not wait.targets and (waited := case.waited(wait) or 0.0) >= early.after_s:
            ages |= dict.fromkeys(wait.waiters, waited)
    ages = {key: age for key, age in ages.items() if age < case.after_s and case.find_process(key) not in said}
    if not ages:
        return []
    subject = f"{len(ages)} processes" if len(ages) > 1 else ""
    return [case.say_early([*ages], "motionless, but for less than --after", None, max(ages.values()), subject=subject)]


def _find_ends(case: Case, explained: Collection[str]) -> tuple[list[Finding], dict[str, str]]:
    """Return what is at the ends of the waits, and the processes there that nothing can be said of, with the reason."""
    findings, suspects = list[Finding](), dict[str, str]()
    for wait in case.graph.waits:
        if wait.kind == "calls" or {*wait.waiters, *case.graph.reach(wait.targets)} & {*explained}:
            continue
        inside = wait.kind == "collective" and not wait.targets
        end = _all_inside(case, wait) if inside else _end_of(case, wait, suspects)
        findings += [end] if end is not None else []
    return faults.unique(findings), suspects


def _end_of(case: Case, wait: Wait, suspects: dict[str, str]) -> Finding | None:
    """Return what is at the end of a wait, or add it to the suspects."""
    graph, sinks = case.graph, sorted(case.graph.sinks(wait.targets or wait.waiters))
    # A worker set that is in a collective with all its members waits for itself. Faults without a process are named
    # elsewhere.
    if any(key in graph.waiters or key in graph.absent for key in sinks):
        return None
    if not sinks:  # some of them may wait for each other
        cycle = [key for key in graph.reach(wait.waiters) if key in graph.reach(graph.next.get(key, ()))]
        ages = {key: case.age(key)[0] for key in cycle}
        if not any(case.at(key).moves or (age is not None and age < case.after_s) for key, age in ages.items()):
            suspects.update(dict.fromkeys(ages, "waits for others that may wait for it"))
        return None
    if moving := [key for key in sinks if case.at(key).moves]:
        if (text := _find_doubt(case, moving, wait)) is None:
            said = "others wait for it, and it makes progress"
            return case.say("working", moving, said, wait, workers=wait.workers, moves=True)
        suspects.update(dict.fromkeys(moving, text))
        return None
    serving = graph.infrastructure.intersection(sinks)
    sinks = [key for key in sinks if key not in serving]
    if not sinks:
        # A queue or a barrier of a library waits for others: whoever calls it may be the one that matters.
        for other in case.graph.waits:
            if called := serving & {*other.targets}:
                suspects.update(dict.fromkeys(other.waiters, f"waits for {case.name(min(called))}"))
        return None
    end = _describe(case, sinks, wait)
    row = next(row for row in _TABLE if row.holds(end))
    if row.kind == "undecided":
        suspects.update(dict.fromkeys(sinks, row.text))
        replicas = [key for key, actor in graph.actors.items() if actor.class_name.startswith("ServeReplica")]
        if not {*replicas}.isdisjoint(sinks):
            alive = (key for key in replicas if key not in suspects and graph.actors[key].state == "ALIVE")
            suspects.update(dict.fromkeys(alive, _REPLICA))
        return None
    if row.kind == "working":
        since_s = (end.waited or case.call_age(sinks[0]) or 0.0) if end.age is None else end.age
        return case.say_early(sinks, row.text, wait, since_s, workers=wait.workers)
    return _blame(case, row, sinks, end, wait)


def _find_doubt(case: Case, moving: Sequence[str], wait: Wait) -> str | None:
    """Return why it is not sure that the only process that works makes progress; None if nothing speaks against it."""
    key, place = moving[0], case.at(moving[0])
    waited = wait.kind != "collective" or (case.waited(wait) or 0.0) >= case.after_s
    if len(moving) > 1 or not waited:
        return None
    if place.motion in STANDS:
        long = (case.age(key)[0] or 0.0) >= case.after_s
        child = max(case.graph.processes[key].children, key=lambda child: child.ticks, default=None)
        works = f"its child process {child.pid}" if child is not None and child.ticks else "another thread of it"
        return f"does not move, while {works} works" if long else None
    long = (case.call_age(key) or 0.0) >= case.after_s
    return "has not left one function since its call began: endless or slow" if place.loops and long else None


def _blame(case: Case, row: _Row, keys: Sequence[str], end: _End, wait: Wait) -> Finding:
    """Return the finding of a row that blames."""
    age, source = case.age(keys[0])
    if end.paused or end.place.kind == "opaque":
        age, source = case.call_age(keys[0]), CALLED
    elif age is None or end.place.kind == "idle":
        age, source = end.waited, WAITED
    # Whoever waits for a peer outside, or polls, may be served later.
    alone = len(keys) == 1 and wait.workers is not None and wait.workers.confidence == "certain"
    alone &= end.place.kind == "user" and not (end.place.thread and ":" in end.place.thread.waits_on)
    text = row.text + case.describe_place(keys[0])
    if row.kind == "disk":
        text += f" ({case.graph.processes[keys[0]].file or 'state D'})"
    sure = alone and end.place.motion == "still" and source == RAN
    counts, process, thread = "no thread that runs a task", case.graph.processes.get(keys[0]), case.at(keys[0]).thread
    if process is not None and thread is not None:
        moves = f"{thread.switches} context switches and {thread.ticks} ticks in {process.window_s:.1f} s"
        counts = f"equal stack, {moves}"
    fact = Evidence("two snapshots", counts)
    return case.blame(row.kind, keys, text, wait, (age, source), fact, sure=sure)


def _describe(case: Case, keys: Sequence[str], wait: Wait) -> _End:
    """Return the facts about the processes at the end of a wait."""
    places, collective = [case.at(key) for key in keys], wait.kind == "collective"
    # Others wait in a collective for as long as this one stands; outside, it may rest just in the moment of the look.
    ages = [case.age(key, by_call=collective)[0] for key in keys]
    age = min(known for known in ages if known is not None) if None not in ages else None
    waited = case.waited(wait) if collective else None
    if collective and waited is None and all(case.at(key).motion == "spinning" for key in wait.waiters):
        waited = age  # those that spin have waited for as long as the one that they wait for stands
    reached = case.graph.reach(wait.waiters)
    missing = wait.workers is not None and wait.workers.missing and not case.snapshot.partial
    called = [case.call_age(key) for key in reached if key != case.graph.driver]
    calls = [age for age in called if age is not None and 0 <= age < case.after_s]
    # A driver may poll for long, with one short call after the other.
    polls = case.graph.driver in reached and max(calls, default=0.0) < EARLY_S
    return _End(
        place=places[0],
        alike=len({(place.kind, place.motion == "disk", place.where) for place in places}) == 1
        and not any(place.moves for place in places),
        age=age,
        waited=waited or 0.0,
        young=collective and waited is not None and waited < case.after_s,
        late=age is not None and age >= case.after_s,
        fresh=not (collective or polls) and len(calls) == len(called),
        collective=collective,
        certain=not missing
        and all(other.certain for other in case.graph.waits if not reached.isdisjoint(other.waiters)),
        sleeps=any(map(case.sleeps, keys)),
        called=collective and all(_caller_waits(case, key, wait) for key in keys),
        paused=wait.kind == "get"
        and len(keys) == 1
        and keys[0].startswith("task:")
        and (case.call_age(keys[0]) or 0.0) >= case.after_s
        and not places[0].moves,
    )


def _caller_waits(case: Case, key: str, wait: Wait) -> bool:
    """Return whether the maker of an idle actor waits for those that wait, and no call waits for its arguments."""
    graph, actor = case.graph, case.graph.actors.get(key)
    owners = (other for other, maker in graph.actors.items() if actor and maker.worker_id == actor.owner)
    owner = next(owners, graph.driver)
    if any(task.actor_id == key and task.state != "RUNNING" for task in graph.tasks.values()):
        return False
    waits = [other for other in graph.waits if other.certain and owner in other.waiters]
    return any({*other.targets} & {*wait.waiters} and case.at(owner).motion != "stopped" for other in waits)


def _all_inside(case: Case, wait: Wait) -> Finding | None:
    """Say of a worker set whose members are all in a collective whether it is the same one."""
    workers, places = wait.workers, [case.at(key) for key in wait.waiters]
    if len(places) < 2 or workers is None or (workers.missing and not case.snapshot.partial):
        return None
    # Ranks that spin or wake up, and whose calls Ray does not list, as those of Ray Train, may have waited for long.
    ages = [place.since_s for place in places if place.motion == "still" and place.since_s is not None]
    age = min(ages, default=case.waited(wait))
    if any(place.moves for place in places) or (age is not None and age < case.after_s):
        return None
    classes = {tuple(frame for frame in case.at(key).where if frame.line or frame == case.at(key).where[0]): key
               for key in wait.waiters}  # fmt: skip
    if len(classes) > 1:
        text = f"are in {len(classes)} different collectives, or at different places of one"
        listed = [case.suspect(key, "one of those that stand there") for key in [*classes.values()][:MOST_SUSPECTS]]
        more = {"remedy": _RECORDS, "suspects": tuple(listed)}
        return case.say("mismatch", wait.waiters, text, wait, workers=workers, **more)
    inner = places[0].inner.function if places[0].inner else "a collective"
    text = f"wait in {inner}: what they wait for is outside of Python"
    return case.say("together", wait.waiters, text, wait, workers=workers, remedy=_RECORDS)


def _standing(case: Case) -> list[str]:
    """Return the processes that have a reason to move, and have not for as long as it takes to be late.

    They run a call, or code of the job on a thread of a library, and do not wait for anything that is known. If
    somebody may wait for their call, it is enough that they were not seen to move.
    """
    graph, standing = case.graph, list[str]()
    waits = {key for wait in graph.waits if wait.kind != "calls" for key in wait.waiters}
    targets = {key for wait in graph.waits for key in wait.targets}
    asleep = case.sleeps(graph.driver)
    idle = {graph.driver} if asleep else set[str]()
    awaited = (wait for wait in graph.waits if wait.kind != "collective" and idle.isdisjoint(wait.waiters))
    called = {key for wait in awaited for key in wait.targets} - graph.absent
    for key in [*graph.positions, *sorted(called - graph.positions.keys())]:
        place, call = case.at(key), case.call_age(key)
        if key in waits or key in graph.infrastructure or place.motion == "stopped":
            continue
        if key not in called and place.kind in ("idle", "unread", "channel"):
            continue
        if place.kind == "opaque" and (call is None or key not in targets):
            continue
        if key == graph.driver and (asleep or place.kind == "opaque" or key in graph.waiters):
            continue
        age = call if (own := case.age(key)[0]) is None else own
        if key in called:
            stands = not place.moves and not (place.kind == "unread" and key in graph.processes)
            standing += [key] if stands and (age is None or age >= case.after_s) else []
        elif (place.stands or (place.kind == "opaque" and not place.moves)) and (age or 0.0) >= case.after_s:
            standing.append(key)
    return standing


def _find_only(case: Case, explained: Collection[str]) -> Finding | None:
    """Return the finding about the only process, or the only members of a worker set, that stand still.

    Somebody waits for them, as far as that is known, everything can be read, and nothing else of the job moves.
    """
    graph = case.graph
    others = [graph.positions[key] for key in graph.positions.keys() - graph.infrastructure - {graph.driver}]
    unknown = any(place.kind == "unread" or (place.mixed and place.kind != "library") for place in others)
    unknown |= case.at(graph.driver).kind == "unread"
    if unknown or case.moving() or any(wait.kind == "collective" for wait in graph.waits):
        return None
    standing = [key for key in _standing(case) if key not in {*explained, graph.driver}]
    # Others may wait inside of a library, or in a coroutine, for the one in code of the job.
    users = [key for key in standing if case.at(key).kind == "user"]
    chosen = users or standing or _find_callers(case)
    if not users and standing and not (len(standing) == 1 and _is_all_awaited(case, standing[0])):
        return None
    alike = {(case.at(key).where, (graph.members.get(key) or (key,))[0]) for key in chosen}
    waits = [wait for wait in graph.waits if {*chosen} & graph.reach(wait.waiters) - {*wait.waiters}]
    if len(alike) != 1 or not waits:
        return None
    end = replace(_describe(case, chosen, waits[0]), certain=True, collective=False, young=False, waited=0.0)
    row = next(row for row in (*_ONLY, *_TABLE) if row.holds(end))
    wait = replace(waits[0], workers=None)
    return replace(_blame(case, row, chosen, end, wait), confidence="likely") if row.blames else None


def _is_all_awaited(case: Case, key: str) -> bool:
    """Return whether all that is not idle waits for the coroutines of an actor, and nothing in it will wake them up."""
    graph, process, position = case.graph, case.graph.processes.get(key), case.at(key)
    if process is None or position.kind != "opaque" or position.thread is not None or graph.next.get(key):
        return False
    works = process.ticks > WAKING_TICKS or any(child.ticks for child in process.children)
    if works or not case.awaits(key) or any(find_own(thread.stack) for thread in process.threads):
        return False
    waiters = {waiter for wait in graph.waits if wait.kind != "calls" for waiter in wait.waiters}
    others = {other: case.at(other) for other in graph.positions if other != key and other not in graph.infrastructure}
    # Who stands in code of the job may be about to wake it up. An event loop without a call is idle.
    wait = [other in waiters or place.kind != "user" for other, place in others.items()]
    busy = [other for other, place in others.items() if place.thread is not None or other in graph.began]
    wait += [key in graph.reach([other]) for other in busy]
    return len(case.snapshot.jobs) == 1 and all(wait)  # another job may know the actor


# What is said of the only process that stands, before the rows for the ends of waits that are certain.
_ONLY = (
    _Row("late", lambda end: end.place.kind == "opaque",
         "runs calls in coroutines, which show no position, and its event loop rests without a timer", blames=True),
    _Row("late", lambda end: end.place.kind == "ray-get",
         "waits for a queue or a barrier of Ray, for which nobody else does anything", blames=True),
)  # fmt: skip


def _find_callers(case: Case) -> list[str]:
    """Return the processes that have waited for long for an actor of a library, such as a queue, which waits itself."""
    graph = case.graph
    if not graph.waiters.isdisjoint(graph.infrastructure & {key for wait in graph.waits for key in wait.targets}):
        return []
    waits = [wait for wait in graph.waits if wait.kind == "get" and graph.infrastructure.issuperset(wait.targets)]
    callers = dict.fromkeys(key for wait in waits for key in wait.waiters if key != graph.driver)
    return [key for key in callers if (case.call_age(key) or 0.0) >= case.after_s]


def _list_suspects(case: Case, suspects: dict[str, str], findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding that lists the processes of which any may be the cause.

    Those in code of the job come first, of these those where few stand, and then those that did not run at all.
    """
    spoken = [finding for finding in findings if finding.kind != "working"]
    said = {(finding.node, finding.pid) for finding in spoken}
    said |= {(suspect.node, suspect.pid) for finding in spoken for suspect in finding.suspects}
    order = {"user": 0, "library": 1}
    known = {key: case.suspect(key, text) for key, text in suspects.items()}
    alike = Counter(case.at(key).where for key in known)

    def rank(key: str) -> tuple[int, int, bool, float, int]:
        place, suspect = case.at(key), known[key]
        ran = place.motion not in ("still", "disk")
        return order.get(place.kind, 2), alike[place.where], ran, -(suspect.since_s or 0.0), suspect.pid

    listed = [known[key] for key in sorted(known, key=rank)]
    listed = [suspect for suspect in listed if (suspect.node, suspect.pid) not in said or not suspect.pid]
    if not listed:
        return []
    alone = len(listed) == 1
    text = f"stands still: {listed[0].text}" if alone else "stand still, and it is not known what for"
    waits = [wait for wait in case.graph.waits if {*suspects} & case.graph.reach(wait.waiters)]
    more: dict[str, Any] = {"confidence": "guess", "remedy": _STACKS, "suspects": tuple(listed[:MOST_SUSPECTS])}
    more |= {"subject": listed[0].name if alone else f"{len(listed)} processes", "since_s": listed[0].since_s}
    more |= {"since_source": listed[0].since_source}
    return [case.say("undecided", [*suspects], text, waits[0] if waits else None, **more)]


def _find_unread(case: Case, named: Collection[str]) -> list[Finding]:
    """Name the processes whose waits are not known, except for some that other findings name: any of them may hang."""
    graph, findings = case.graph, list[Finding]()
    left = sorted(graph.processes.keys() - {*named}, key=lambda key: (key != case.graph.driver, key))
    gets = [key for key in left if case.at(key).kind == "ray-get" and key not in graph.waiters]
    # Who polls with one call after the other waits for none of them.
    gets = [key for key in gets if case.at(key).motion != "moving"]
    gets = [key for key in gets if (case.call_age(key) or case.after_s) >= case.after_s]
    blind = [key for key in gets if not any(thread.references for thread in graph.processes[key].threads)]
    # Such objects may be there in a moment, as long as something of the job goes on.
    rests = case.quiet_s() >= case.after_s and not case.moving() and not graph.began.keys() - graph.waiters - {*named}
    why = {
        "cannot be read, so any of them may hang": [key for key in left if case.at(key).kind == "unread"],
        "in ray.get for objects whose ids cannot be read, so it is not known what for": blind,
        "in ray.get for objects that lead to no process: their tasks are over, or Ray does not list what makes them": [
            key for key in gets if rests and key not in blind
        ],
    }
    for text, keys in why.items():
        if keys:
            driver = f", the driver{' among them' * (len(keys) > 1)}" if keys[0] == graph.driver else ""
            subject = f"{len(keys)} process{'es' * (len(keys) > 1)}{driver}"
            notes = {graph.processes[key].note: None for key in keys if graph.processes[key].note}
            facts = tuple(Evidence("probe", note) for note in notes)
            finding = case.say("undecided", keys, text, None, confidence="guess", subject=subject, evidence=facts)
            findings.append(finding if len(keys) == 1 else replace(finding, pid=0, node="", where=()))
    return findings
