# SPDX-License-Identifier: Apache-2.0
"""Usage of fairlead-inspect as type checkers see it. Never run: `nox -s typecheck` checks that these types hold.

Where a comment ignores an error, there is one: what is wrong there is refused, and an ignore without need is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Mapping
from typing import Literal, assert_type

from fairlead_inspect import StragglerReport, Watch, WorkerEvent, WorkerTiming, stragglers, trace, watch
from fairlead_inspect.otel import export_spans
from fairlead_workergroup import GroupHandle, RayWorkerGroup, StuckWorker


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
