"""Sends spans of requests to an OpenTelemetry collector.

A request whose client sent a sampled traceparent gets spans under it, from every process that
handles the request. The coordinator also exports some of the other requests at their end (tail
sampling), each as one trace with the coordinator's data. Without `tracing.otlp_endpoint`,
OpenTelemetry is not imported.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.runtime.config import TracingConfig
from baton.runtime.config_error import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

# A full queue drops its oldest spans, which bounds memory while the collector is away.
MAX_QUEUED_SPANS = 4096
_MAX_BATCH_SPANS = 512
_BATCH_INTERVAL_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
# Longest time at the end of the process in which queued spans may still be sent.
FLUSH_TIMEOUT_S = 2.0
# Logger of the exporter, which reports each attempt to send a batch while the collector is away.
_EXPORTER = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Span:
    """A finished operation.

    Attributes:
        start_ns: Start in nanoseconds since 1970, by this host's clock.
        end_ns: End, likewise.
        error: Error text; empty on success.
        children: Spans inside this one.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    error: str = ""
    children: Sequence[Span] = ()


class _SomeErrors(logging.Filter):
    """Passes one error of the exporter per _LOG_INTERVAL_S, and no warning: it retries after those.

    A passed record says in its field `not_logged` how many errors were left out before it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._logged_at, self._num_left_out = clock, -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return False
        now = self._clock()
        if now - self._logged_at < _LOG_INTERVAL_S:
            self._num_left_out += 1
            return False
        if self._num_left_out:
            record.not_logged = self._num_left_out
        self._logged_at, self._num_left_out = now, 0
        return True


def require(config: TracingConfig) -> None:
    """Raises ConfigError when spans are wanted and OpenTelemetry is not installed."""
    if not config.otlp_endpoint:
        return
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # noqa: F401
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint: is {config.otlp_endpoint!r}, which needs OpenTelemetry "
            f"({error}); install baton[tracing], or leave it empty"
        ) from error


class Tracing:
    """Exports a process's spans; owns a thread and a channel until `close`.

    Only `close` blocks: spans are queued, and the thread sends them in batches. Create it after the
    last child process was forked.

    Args:
        config: Tracing section; without an endpoint every span is dropped.
        resource: Attributes of this process in every span, beside service.name.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, config: TracingConfig, resource: Mapping[str, str]) -> None:
        require(config)
        self._tracer: Tracer | None = None
        self._provider: TracerProvider | None = None
        self._exporter: OTLPSpanExporter | None = None
        self._errors = _SomeErrors()
        if not config.otlp_endpoint:
            return
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        self._exporter = OTLPSpanExporter(
            endpoint=config.otlp_endpoint,
            insecure=config.otlp_endpoint.startswith("http://"),
            timeout=_EXPORT_TIMEOUT_S,
        )
        self._provider = TracerProvider(
            # The client decides by its traceparent; spans without one are kept on purpose.
            sampler=ParentBased(root=ALWAYS_ON),
            resource=Resource({"service.name": "baton", **resource}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=_BATCH_INTERVAL_S * 1e3,
                max_export_batch_size=_MAX_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("baton")
        _EXPORTER.addFilter(self._errors)

    def is_sampled(self, traceparent: str) -> bool:
        """Whether spans of a request with this traceparent would be sent."""
        if self._tracer is None or not traceparent:
            return False
        from opentelemetry.trace import get_current_span

        parent = get_current_span(_context(traceparent)).get_span_context()
        return parent.is_valid and parent.trace_flags.sampled

    def record(self, traceparent: str, *spans: Span) -> None:
        """Queues spans and their children under a traceparent for which `is_sampled` is true."""
        if self._tracer is not None:
            for span in spans:
                _record(self._tracer, span, _context(traceparent))

    def record_tail_sample(self, traceparent: str, span: Span) -> None:
        """Queues a span that was not requested by a sampled traceparent, and its children.

        The span joins the client's trace if the client named one, otherwise it starts a trace.
        """
        if self._tracer is not None:
            sampled = f"{traceparent[:-2]}01" if traceparent else ""
            _record(self._tracer, span, _context(sampled))

    def close(self) -> None:
        """Sends the queued spans, for at most FLUSH_TIMEOUT_S; blocks. Idempotent."""
        if self._provider is None or self._exporter is None:
            return
        # Shutdown fails the export in progress, and every later one at once.
        cut_off = threading.Timer(FLUSH_TIMEOUT_S, self._exporter.shutdown)
        cut_off.start()
        self._provider.shutdown()
        cut_off.cancel()
        cut_off.join()
        _EXPORTER.removeFilter(self._errors)
        self._tracer = self._provider = self._exporter = None


def _context(traceparent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _record(tracer: Tracer, span: Span, context: Context) -> None:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    recorded = tracer.start_span(
        span.name, context=context, attributes=span.attributes, start_time=span.start_ns
    )
    for child in span.children:
        _record(tracer, child, set_span_in_context(recorded, context))
    if span.error:
        recorded.set_status(Status(StatusCode.ERROR, span.error))
    recorded.end(end_time=span.end_ns)
