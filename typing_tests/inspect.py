# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-inspect as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, assert_type

from fairlead_inspect import (
    Evidence,
    Finding,
    Frame,
    Named,
    Snapshot,
    StackClass,
    StragglerReport,
    Waiting,
    Watch,
    WorkerEvent,
    WorkerTiming,
    diagnose,
    fold_stacks,
    label,
    look,
    stragglers,
    trace,
    watch,
    write_report,
)
from fairlead_inspect.otel import export_spans
from fairlead_workergroup import GroupHandle, RayWorkerGroup, StuckWorker


def any_job(path: Path) -> None:
    snapshot = look("auto", job="01000000", window_s=0.5, timeout_s=10)
    assert_type(snapshot, Snapshot)
    assert_type((snapshot.looked_at, snapshot.took_s), tuple[float, float])
    assert_type((snapshot.notes, snapshot.finished), tuple[tuple[str, ...], frozenset[str]])
    assert_type(snapshot.claimed, frozenset[str])
    assert_type([one.job_id for one in snapshot.jobs], list[str])
    assert_type([one.class_name for one in snapshot.actors], list[str])
    assert_type([one.pid for one in snapshot.processes], list[int])
    assert_type([one.address for one in snapshot.nodes], list[str])
    assert_type([one.task_id for one in snapshot.calls], list[str])
    assert_type([one.group_id for one in snapshot.reservations], list[str])
    findings = diagnose(snapshot, after_s=60)
    assert_type(findings, tuple[Finding, ...])
    assert_type(write_report(snapshot, findings, path), None)
    for found in findings:
        assert_type((found.job_id, found.text, found.fleet, found.node), tuple[str, str, str, str])
        assert_type((found.remedy, found.since_source, found.subject), tuple[str, str, str])
        assert_type((found.blames, found.moves), tuple[bool, bool])
        assert_type((found.ranks, found.ordinals), tuple[tuple[int, ...], tuple[int, ...]])
        assert_type((found.pid, found.since_s), tuple[int, float | None])
        assert_type(found.confidence, Literal["certain", "likely", "guess"])
        assert found.kind == "late"
        assert_type(found.chain, tuple[str, ...])
        assert_type(found.actors, tuple[Named, ...])
        assert_type(found.where, tuple[Frame, ...])
        assert_type(found.evidence, tuple[Evidence, ...])
        assert_type(found.waiting, Waiting)
        assert_type((found.waiting.count, found.waiting.ranks), tuple[int, tuple[int, ...]])
        assert_type((found.waiting.ordinals, found.waiting.since_s), tuple[tuple[int, ...], float | None])
        assert_type(found.waiting.where, tuple[Frame, ...])
        for frame in found.where:
            assert_type((frame.file, frame.function, frame.line), tuple[str, str, int])
        for fact in found.evidence:
            assert_type((fact.source, fact.text, fact.age_s), tuple[str, str, float | None])
        for actor in found.actors:
            assert_type((actor.id, actor.class_name, actor.name), tuple[str, str, str])
    for alike in fold_stacks(snapshot):
        assert_type(alike, StackClass)
        assert_type((alike.fleet, alike.does, alike.ranks), tuple[str, str, tuple[str, ...]])
        assert_type((alike.pids, alike.where), tuple[tuple[int, ...], tuple[Frame, ...]])
    assert_type(label(rank=3, group="policy", world_size=8, coords={"dp": 1}), dict[str, str])
    look(None)  # type: ignore[arg-type]
    label(3, "policy")  # type: ignore[call-arg]


def watching(group: RayWorkerGroup) -> None:
    def on_event(event: WorkerEvent) -> None:
        assert_type(
            event.kind,
            Literal[
                "worker-started",
                "call-slow",
                "worker-stuck",
                "worker-dead",
                "worker-restarted",
                "resized",
                "replaced",
                "standby-ready",
                "node-draining",
            ],
        )
        assert_type(event.rank, int)
        assert_type(event.coords, Mapping[str, int])
        assert_type(event.node_id, str)
        assert_type(event.pid, int)
        assert_type(event.incarnation, int)
        assert_type(event.method, str | None)
        assert_type(event.message, str)
        assert_type(event.time, float)
        assert_type(event.stuck, StuckWorker | None)

    with watch(group, 5, 300, on_event, slow_after_s=60) as watching:
        assert_type(watching, Watch)
    watch(group, on_event=print).close()


def timeline(group: RayWorkerGroup, handle: GroupHandle) -> None:
    assert_type(trace(group, "trace.json"), None)
    assert_type(trace(handle, "trace.json"), None)
    report = stragglers(group)
    assert_type(report, StragglerReport)
    assert_type(stragglers(handle, "step"), StragglerReport)
    assert_type(report.timings, tuple[WorkerTiming, ...])
    assert_type(report.stragglers, tuple[WorkerTiming, ...])
    assert_type(report.ambiguous, tuple[str, ...])
    timing = report.timings[0]
    assert_type((timing.rank, timing.calls), tuple[int, int])
    assert_type(timing.coords, Mapping[str, int])
    assert_type(timing.method, str)
    assert_type(timing.median_s, float)
    assert_type(timing.ratios, Mapping[str, float])
    assert_type(timing.slow, tuple[str, ...])
    assert_type(export_spans(group), int)
    assert_type(export_spans(handle, None), int)


def refused(group: RayWorkerGroup, handle: GroupHandle) -> None:
    watch(group, on_event=lambda: None)  # type: ignore[misc, arg-type]
    watch(handle)  # type: ignore[arg-type]
    trace(group)  # type: ignore[call-arg]
