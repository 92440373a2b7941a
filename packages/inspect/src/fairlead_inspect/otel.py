# SPDX-License-Identifier: Apache-2.0
"""The timeline of a group as OpenTelemetry spans. Needs the extra `otel`: `pip install 'fairlead-inspect[otel]'`.

It sends the spans of `fairlead_inspect.trace` to any OpenTelemetry backend. Nothing of it is imported unless you import
this module.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

try:
    from opentelemetry.attributes import BoundedAttributes
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as _missing:
    raise ImportError(
        "fairlead_inspect.otel needs the OpenTelemetry SDK: pip install 'fairlead-inspect[otel]'"
    ) from _missing

from fairlead_placement.spi import head_deadline
from fairlead_workergroup import GroupHandle, RayWorkerGroup, WorkerGroupError

from ._timeline import Request, Span, Timeline, WorkerTimeline, read_own_timeline

__all__ = ["export_spans"]

SCOPE = InstrumentationScope("fairlead_inspect")
HEAD_S = 30.0


def export_spans(group: RayWorkerGroup | GroupHandle, exporter: SpanExporter | None = None) -> int:
    """Send what a group has done lately to an OpenTelemetry backend.

    It sends the calls that have ended: a span for each call of the process that made the group and, below it, one for
    each worker that it called. Steps that a worker has reported are events of its span. A call has the same ids each
    time, so you can repeat this, such as once a minute. As in a trace, there are names and times, and no arguments or
    results. The workers are not asked.

    Args:
        group: the group, or a handle of it.
        exporter: receives the spans; None for OTLP over HTTP, which the variables `OTEL_EXPORTER_OTLP_*` configure.

    Returns:
        The number of spans.

    Raises:
        WorkerGroupError: the group has ended, or the exporter did not deliver the spans.
        HeadTimeoutError: Ray's head did not answer in time.
    """
    own = exporter is None
    with head_deadline(HEAD_S):
        timeline = read_own_timeline(group)
    spans = make_spans(timeline)
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    try:
        if spans and exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise WorkerGroupError(
                f"The {len(spans)} spans of {group!r} were not delivered by {type(exporter).__name__}; its log says "
                "why. Check that the collector is running, and OTEL_EXPORTER_OTLP_ENDPOINT."
            )
    finally:
        if own:
            exporter.shutdown()
    return len(spans)


def make_spans(timeline: Timeline) -> list[ReadableSpan]:
    """Return the calls of a timeline that have ended as spans, those of the driver first."""
    return list(_Spans(timeline).make())


class _Spans:
    """The spans of one timeline, by this process's wall clock; the ids repeat if a call is exported again."""

    def __init__(self, timeline: Timeline) -> None:
        group = timeline.group
        self._timeline = timeline
        self._epoch_s = time.time() - time.monotonic()
        self._id = group.group_id
        self._resource = Resource(
            {
                "service.name": group.name,
                "service.instance.id": group.group_id,
                "fairlead.class": group.class_name,
                "fairlead.mesh": str(dict(group.shape)),
            }
        )

    def make(self) -> Iterator[ReadableSpan]:
        parents: dict[bytes, SpanContext] = {}
        ends = {span.task: span.end for one in self._timeline.workers for span in one.spans if span.task}
        for request in self._timeline.requests:
            identity = request.tasks[0] if request.tasks else (request.method, round(request.start, 1))
            context = self._context("request", identity)
            parents.update((task, context) for task in request.tasks)
            known = [ends[task] for task in request.tasks if task in ends]
            # The caller did not wait for it, so it lasted as long as its workers.
            end = request.end or max((one for one in known if one is not None), default=None)
            if end is not None and None not in known:
                yield self._request(request, end, context)
        for worker in self._timeline.workers:
            for span in worker.spans:
                if span.end is not None:
                    yield self._call(worker, span, span.end, parents.get(span.task) if span.task else None)

    def _request(self, request: Request, end: float, context: SpanContext) -> ReadableSpan:
        driver = self._timeline.group.driver
        about = {"fairlead.workers": request.workers, "host.name": driver["host"], "process.pid": driver["pid"]}
        return self._span(request, end, SpanKind.CLIENT, context, None, about)

    def _call(self, one: WorkerTimeline, span: Span, end: float, parent: SpanContext | None) -> ReadableSpan:
        worker = one.worker
        identity = (worker.rank, worker.incarnation, span.number)
        context = self._context("call", identity, None if parent is None else parent.trace_id)
        about = {
            "fairlead.rank": worker.rank,
            "fairlead.incarnation": worker.incarnation,
            "fairlead.call": span.number,
            "fairlead.waited_s": span.waited_s,
            "host.name": worker.address,
            "process.pid": worker.pid,
            **{f"fairlead.coords.{axis}": at for axis, at in worker.coords.items()},
            **({} if span.weights is None else {"fairlead.weights": span.weights}),
        }
        steps = [
            Event("step", BoundedAttributes(attributes={"fairlead.step": step}), self._nanoseconds(when))
            for when, step in one.steps
            if span.start <= when <= end
        ]
        kind = SpanKind.INTERNAL if parent is None else SpanKind.SERVER
        return self._span(span, end, kind, context, parent, about, steps)

    def _span(
        self,
        one: Request | Span,
        end: float,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Mapping[str, Any],
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name=one.method,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=BoundedAttributes(attributes=attributes),
            events=events,
            kind=kind,
            status=Status(StatusCode.ERROR if one.failed else StatusCode.OK),
            start_time=self._nanoseconds(one.start),
            end_time=self._nanoseconds(end),
            instrumentation_scope=SCOPE,
        )

    def _context(self, kind: str, identity: object, trace: int | None = None) -> SpanContext:
        digest = hashlib.sha256(f"{self._id} {kind} {identity!r}".encode()).digest()
        trace_id = int.from_bytes(digest[8:24], "big") if trace is None else trace
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id, int.from_bytes(digest[:8], "big"), is_remote=False, trace_flags=flags)

    def _nanoseconds(self, moment: float) -> int:
        return int((self._epoch_s + moment) * 1e9)
