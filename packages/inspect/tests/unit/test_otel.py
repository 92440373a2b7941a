# SPDX-License-Identifier: Apache-2.0
"""The timeline of a group as OpenTelemetry spans, also over OTLP/HTTP to a receiver of this process."""

import gzip
import http.server
import threading
import time

import pytest

from fairlead_sharding import NamedSharding
from fairlead_workergroup import WorkerGroupError
from fairlead_workergroup.spi import RegisteredGroup, RegisteredWorker

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fairlead_inspect import otel
from fairlead_inspect._timeline import Request, Span, Timeline, WorkerTimeline

pytestmark = pytest.mark.nightly  # the session `test` lacks the exporter

MESH = NamedSharding.from_shape(dp=2, tp=1)
# In place of a handle, of which the exporter only reads the timeline.
HANDLE = "policy"


def task(rank, number):
    return bytes([rank, number]) * 4


@pytest.fixture
def timeline():
    """Two workers: a call that both have ended, one that failed on rank 1, and one that runs."""
    now = time.monotonic()
    members = tuple(
        RegisteredWorker(rank, f"w-{rank}", MESH.get_worker_coords(rank), "n", "10.0.0.1", 10 + rank, 1, 0, 0, "", "")
        for rank in range(2)
    )
    driver = {"pid": 7, "host": "head", "node_id": "n", "job_id": "01", "worker_id": "w", "started": 1}
    group = RegisteredGroup("ab" * 16, "policy", "Trainer", MESH.shape, MESH.to_dict(), 0.0, "ns", 1, driver, members)
    workers = tuple(
        WorkerTimeline(
            one,
            (
                Span(1, "train", now - 5.0, now - 4.0, 0.25, False, task(one.rank, 1)),
                Span(2, "save", now - 3.0, now - 2.5 + one.rank, 0.0, one.rank == 1, task(one.rank, 2)),
                Span(3, "train", now - 1.0, None, task=task(one.rank, 3)),
            ),
            ((now - 4.5, 3),),
            0.001,
        )
        for one in members
    )
    requests = tuple(
        Request(method, now - start, end and now - end, failed, count, tasks)
        for method, start, end, failed, count, tasks in (
            ("train", 5.1, 3.9, False, 2, (task(0, 1), task(1, 1))),
            ("save", 3.1, None, True, 2, (task(0, 2), task(1, 2))),
            ("train", 1.1, None, False, 2, (task(0, 3), task(1, 3))),
            ("transfer of version 3", 0.5, 0.2, False, 0, ()),
        )
    )
    return Timeline(group, workers, requests, now, 0.0005)


def test_spans(timeline):
    """Calls that have ended are spans; those of workers are below the driver's call, at the right time."""
    spans = otel.make_spans(timeline)
    assert [span.name for span in spans] == ["train", "save", "transfer of version 3", "train", "save", "train", "save"]
    train, save, transfer, first = spans[:4]
    assert train.parent is None
    assert train.kind is SpanKind.CLIENT
    assert first.parent == train.context
    assert first.context.trace_id == train.context.trace_id != save.context.trace_id
    assert first.attributes["fairlead.coords.dp"] == 0
    assert first.attributes["fairlead.waited_s"] == 0.25
    assert [(event.name, dict(event.attributes)) for event in first.events] == [("step", {"fairlead.step": 3})]
    assert train.start_time <= first.start_time <= first.end_time <= train.end_time
    assert abs(first.end_time / 1e9 - (time.time() - 4.0)) < 60
    assert [span.status.status_code for span in spans if span.name == "save"] == [
        StatusCode.ERROR,
        StatusCode.OK,
        StatusCode.ERROR,
    ]
    assert save.end_time == spans[6].end_time  # of its last worker
    assert transfer.resource.attributes["service.name"] == "policy"
    again = otel.make_spans(timeline)
    assert [span.context for span in again] == [span.context for span in spans]
    assert len({span.context.span_id for span in spans}) == len(spans)


@pytest.fixture
def read(monkeypatch, timeline):
    """Make the timeline that of the handle."""
    monkeypatch.setattr(otel, "read_own_timeline", lambda handle: {HANDLE: timeline}[handle])


def test_exporter(read):
    """An exporter of the caller receives the spans, and is not shut down."""
    exporter = InMemorySpanExporter()
    assert otel.export_spans(HANDLE, exporter) == 7
    assert otel.export_spans(HANDLE, exporter) == 7
    assert len(exporter.get_finished_spans()) == 14


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def receiver(monkeypatch):
    """A server that receives OTLP over HTTP, to which the environment points."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.received, server.status = [], 200
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join(10)


def test_otlp(read, receiver):
    """Without an exporter the spans go to the collector that the environment names, over HTTP."""
    assert otel.export_spans(HANDLE) == 7
    ((path, request),) = receiver.received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert attributes["service.name"] == "policy"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == sorted(["train", "save"] * 3 + ["transfer of version 3"])
    roots = {span.span_id for span in spans if not span.parent_span_id}
    assert sum(span.parent_span_id in roots for span in spans) == 4


def test_refused(read, receiver):
    """Spans that a collector refuses are an error that says what to check."""
    receiver.status = 400
    with pytest.raises(WorkerGroupError, match=r"7 spans .* were not delivered by OTLPSpanExporter"):
        otel.export_spans(HANDLE)
