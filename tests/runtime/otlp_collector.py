"""An OpenTelemetry collector on a real gRPC server that stores the received spans."""

import asyncio
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)

from baton.runtime.network import rpc

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector received it; IDs in hex, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]
    resource: dict[str, str | int]
    error: str


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores every received span.

    Attributes:
        endpoint: Value for tracing.otlp_endpoint.
        answers: Event; while it is cleared, calls get no answer.
        refuses: Whether calls fail, so that the exporter tries again at once.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.called = asyncio.Event()
        self.refuses, self._num_refused = False, 0
        self._changed = asyncio.Condition()
        self._server = rpc.server()

    async def __aenter__(self) -> "OtlpCollector":
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://{rpc.bind(self._server, '127.0.0.1:0', 'listen')}"
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)

    async def Export(self, request, context):
        self.called.set()
        await self.answers.wait()
        if self.refuses:
            async with self._changed:
                self._num_refused += 1
                self._changed.notify_all()
            at_once = error_details_pb2.RetryInfo().SerializeToString()
            again = (("google.rpc.retryinfo-bin", at_once),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy", again)
        for group in request.resource_spans:
            resource = plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [received(span, resource) for span in scope.spans]
        async with self._changed:
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for_refusals(self, number: int) -> None:
        """Waits until the collector has refused this many calls."""
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: self._num_refused >= number)

    async def wait_for(self, *names: str) -> dict[str, ReceivedSpan]:
        """Waits until each of these spans has arrived; returns all spans by name."""
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                await self._changed.wait_for(lambda: set(names) <= {one.name for one in self.spans})
        except TimeoutError:
            seen = sorted(one.name for one in self.spans)
            raise AssertionError(f"waited for {names}; there are only {seen}") from None
        return {span.name: span for span in self.spans}


def received(span, resource) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=plain(span.attributes),
        resource=resource,
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
    )


def plain(attributes) -> dict[str, str | int]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
