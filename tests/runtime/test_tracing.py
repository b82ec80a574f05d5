"""Export of spans with and without a collector."""

import asyncio
import logging
import math
import socket
import subprocess
import sys

import pytest
from opentelemetry.exporter.otlp.proto.grpc.exporter import _MAX_RETRYS

from baton.runtime.config import TracingConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.telemetry import tracing
from baton.runtime.telemetry.tracing import MAX_QUEUED_SPANS, Span, Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
# Limit for a machine under load; the flush itself is limited to two seconds.
FLUSH_S = 120.0


def span(name: str, **more) -> Span:
    return Span(name, 10**18, 10**18 + 5_000, **more)


async def close(spans: Tracing) -> None:
    async with asyncio.timeout(FLUSH_S):
        await asyncio.to_thread(spans.close)


async def test_spans_arrive_under_the_requests_span(collector):
    config = TracingConfig(otlp_endpoint=collector.endpoint)
    spans = Tracing(config, {"baton.worker.id": "w1"})
    assert spans.is_sampled(SAMPLED)
    outer = span("outer", attributes={"bytes": 7}, error="broke", children=[span("inner")])
    spans.record(SAMPLED, outer)
    await close(spans)
    found = await collector.wait_for("outer", "inner")
    assert {one.trace_id for one in found.values()} == {TRACE}
    assert found["outer"].parent_id == PARENT
    assert found["inner"].parent_id == found["outer"].span_id
    assert (found["outer"].start_ns, found["outer"].end_ns) == (10**18, 10**18 + 5_000)
    assert found["outer"].attributes == {"bytes": 7}
    assert found["outer"].resource == {"service.name": "baton", "baton.worker.id": "w1"}
    assert (found["outer"].error, found["inner"].error) == ("broke", "")


@pytest.mark.parametrize("traceparent", ["", "no traceparent", NOT_SAMPLED])
async def test_only_sampled_requests_get_spans(collector, traceparent):
    spans = Tracing(TracingConfig(otlp_endpoint=collector.endpoint), {})
    assert not spans.is_sampled(traceparent)
    spans.record(SAMPLED, span("wanted"))
    await close(spans)
    assert set(await collector.wait_for("wanted")) == {"wanted"}


async def test_a_kept_span_joins_the_clients_trace_or_starts_one(collector):
    spans = Tracing(TracingConfig(otlp_endpoint=collector.endpoint), {})
    spans.record_tail_sample(NOT_SAMPLED, span("callers", children=[span("part")]))
    spans.record_tail_sample("", span("own"))
    spans.record_tail_sample("no traceparent", span("odd"))
    await close(spans)
    found = await collector.wait_for("callers", "part", "own", "odd")
    assert (found["callers"].trace_id, found["callers"].parent_id) == (TRACE, PARENT)
    assert found["part"].parent_id == found["callers"].span_id
    assert not found["own"].parent_id
    assert len({TRACE, found["own"].trace_id, found["odd"].trace_id}) == 3


async def test_a_missing_or_silent_collector_delays_nothing(collector, monkeypatch):
    # Code that waited for an export would not end within this test.
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", 3600.0)
    collector.answers.clear()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for endpoint in (away, collector.endpoint):
            spans = Tracing(TracingConfig(otlp_endpoint=endpoint), {})
            for number in range(MAX_QUEUED_SPANS + 1000):
                spans.record(SAMPLED, span(f"s{number}"))
            await close(spans)
    assert collector.called.is_set()
    spans.record(SAMPLED, span("after the end"))
    spans.close()
    collector.answers.set()


async def test_a_collector_that_is_away_does_not_fill_the_log(collector, monkeypatch, caplog):
    monkeypatch.setattr(tracing, "_BATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(tracing, "_LOG_INTERVAL_S", math.inf)
    collector.refuses = True
    spans = Tracing(TracingConfig(otlp_endpoint=collector.endpoint), {})
    for number in range(3):
        spans.record(SAMPLED, span(f"s{number}"))
        await collector.wait_for_refusals((number + 1) * _MAX_RETRYS)
    await close(spans)
    (line,) = (one for one in caplog.records if one.name.startswith("opentelemetry."))
    assert line.levelname == "ERROR"
    assert "Failed to export" in line.getMessage()


def test_errors_that_were_left_out_are_counted():
    now = 0.0
    errors = tracing._SomeErrors(lambda: now)

    def shown(level):
        record = logging.LogRecord("exporter", level, "", 0, "failed", None, None)
        return getattr(record, "not_logged", 0) if errors.filter(record) else None

    assert shown(logging.WARNING) is None
    assert shown(logging.ERROR) == 0
    assert (shown(logging.ERROR), shown(logging.WARNING), shown(logging.ERROR)) == (None,) * 3
    now = 60.0
    assert shown(logging.ERROR) == 2
    now = 120.0
    assert shown(logging.ERROR) == 0


def test_without_an_endpoint_opentelemetry_is_not_imported():
    program = (
        "import sys, baton.worker.main\n"
        "from baton.runtime.config import TracingConfig\n"
        "from baton.runtime.telemetry.tracing import Tracing\n"
        f"spans = Tracing(TracingConfig(), {{}})\n"
        f"assert not spans.is_sampled({SAMPLED!r})\n"
        "spans.close()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_missing_package_is_a_configuration_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    tracing.require(TracingConfig())
    with pytest.raises(ConfigError, match=r"tracing.otlp_endpoint: .* install baton\[tracing\]"):
        tracing.require(TracingConfig(otlp_endpoint="http://127.0.0.1:4317"))
