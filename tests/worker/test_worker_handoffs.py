"""Observability of a worker's handoffs: reports, metrics, and spans in the request's trace."""

import asyncio
import contextlib
import secrets

import pytest
from prometheus_client import generate_latest

from baton.runtime.config import TracingConfig
from baton.runtime.telemetry.tracing import Tracing
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from baton.worker.handoffs import RECEIVE, SEND, HandoffLog, receive_spans, send_spans
from baton.worker.metrics import Snapshot, WorkerCollector
from tests.runtime.otlp_collector import OtlpCollector
from tests.worker.scripted_coordinator import WAIT_S, ScriptedCoordinator, plan, spec, tokens_of

pytestmark = pytest.mark.usefixtures("forked_services")

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
RELEASED = kv_transfer_pb2.HANDOFF_STATE_RELEASED
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
PROMPT = [3 + index % 90 for index in range(100)]
NUM_BYTES = 4 * 7 * 1024
NOW_NS = 10**18


@contextlib.asynccontextmanager
async def two_workers(coordinator, start_worker, **sections):
    """A prefill and a decode worker, each with its own coordinator and stream."""
    second = ScriptedCoordinator()
    await second.start()
    try:
        start_worker(PREFILL, "p", **sections)
        start_worker(DECODE, "d", address=second.address, **sections)
        yield await coordinator.stream(), second, await second.stream()
    finally:
        await second.stop()


async def hand_over(coordinator, prefill, second, decode, name, **changes):
    """Runs one request across both workers; returns the handoff report of each."""
    handoff = plan(secrets.token_bytes(16), decode.hello.kv_address, len(PROMPT))
    made = spec(name, PROMPT, max_tokens=4)
    made.traceparent = changes.get("traceparent", "")
    command = cluster_pb2.PrefillCommand(spec=made, handoff=handoff)
    await coordinator.command(prefill, prefill=command)
    made.known_token_ids.extend(tokens_of(await prefill.outputs(name)))
    sent = (await prefill.next_of("handoff")).handoff
    command = cluster_pb2.DecodeCommand(spec=made, handoff=handoff)
    await second.command(decode, decode=command)
    received = (await decode.next_of("handoff")).handoff
    return sent, received


async def test_both_workers_report_the_handoff(coordinator, start_worker):
    async with two_workers(coordinator, start_worker) as (prefill, second, decode):
        sent, received = await hand_over(coordinator, prefill, second, decode, "r")
        assert (sent.state, sent.transport, sent.num_fallbacks) == (COMMITTED, "shm", 0)
        assert sent.num_bytes == received.num_bytes == NUM_BYTES
        assert sent.num_frames > 0
        assert sent.open_us > 0
        assert sent.total_us >= sent.fill_us + sent.exposed_us
        assert (received.state, received.transport) == (RELEASED, "shm")
        assert received.total_us >= received.receive_us + received.load_us - 2
        assert received.receive_us > 0
        load = await prefill.load_after()
        assert [(one.target, one.transport, one.reason) for one in load.peers] == [
            (decode.hello.kv_address, "shm", "")
        ]
        assert not (await decode.load_after()).peers


async def test_only_a_sampled_request_has_spans(coordinator, start_worker, collector):
    tracing = {"otlp_endpoint": collector.endpoint}
    async with two_workers(coordinator, start_worker, tracing=tracing) as (prefill, second, decode):
        for name, traceparent in (("unsampled", NOT_SAMPLED), ("untraced", ""), ("r", SAMPLED)):
            sent, received = await hand_over(
                coordinator, prefill, second, decode, name, traceparent=traceparent
            )
        steps = [f"handoff {step}" for step in ("reserve", "open", "fill", "commit")]
        found = await collector.wait_for("handoff", *steps, "handoff receive", "handoff load")
    assert len(collector.spans) == 7
    assert {span.trace_id for span in collector.spans} == {TRACE}
    handoff = found["handoff"]
    for name in ("handoff", "handoff receive", "handoff load"):
        assert found[name].parent_id == PARENT
        assert found[name].attributes["baton.request.id"] == "r"
        assert found[name].attributes["baton.handoff.id"] == sent.handoff_id.hex()
        assert found[name].attributes["baton.handoff.transport"] == "shm"
        assert found[name].attributes["baton.handoff.bytes"] == NUM_BYTES
        assert not found[name].error
    for name in steps:
        assert found[name].parent_id == handoff.span_id
        assert handoff.start_ns <= found[name].start_ns <= found[name].end_ns <= handoff.end_ns
    assert handoff.attributes["baton.handoff.outcome"] == "committed"
    assert handoff.attributes["baton.handoff.frames"] == sent.num_frames
    commit = found["handoff commit"]
    assert commit.end_ns - commit.start_ns == sent.exposed_us * 1000
    assert found["handoff receive"].attributes["baton.handoff.outcome"] == "released"
    assert found["handoff receive"].end_ns == found["handoff load"].start_ns
    assert received.load_us > 0
    roles = {name: found[name].resource["baton.worker.role"] for name in found}
    assert (roles["handoff"], roles["handoff load"]) == ("prefill", "decode")
    assert found["handoff load"].resource["baton.worker.id"] == "d"


async def test_a_refused_handoff_is_a_failed_span(coordinator, start_worker, collector):
    tracing = {"otlp_endpoint": collector.endpoint}
    start_worker(PREFILL, kv_transfer={"send_bytes": 4096}, tracing=tracing)
    stream = await coordinator.stream()
    made = spec("r", PROMPT, max_tokens=5)
    made.traceparent = SAMPLED
    handoff = plan(secrets.token_bytes(16), "127.0.0.1:9", len(PROMPT))
    command = cluster_pb2.PrefillCommand(spec=made, handoff=handoff)
    await coordinator.command(stream, prefill=command)
    found = await collector.wait_for("handoff", "handoff reserve")
    assert set(found) == {"handoff", "handoff reserve"}
    assert f"handoff of {NUM_BYTES} bytes" in found["handoff"].error
    assert found["handoff"].attributes["baton.handoff.outcome"] == "failed"


async def test_a_worker_stops_though_its_collector_is_silent(coordinator, start_worker):
    async with OtlpCollector() as collector:
        collector.answers.clear()
        worker = start_worker(PREFILL, tracing={"otlp_endpoint": collector.endpoint})
        stream = await coordinator.stream()
        made = spec("r", [5, 6], max_tokens=5)
        made.traceparent = SAMPLED
        handoff = plan(secrets.token_bytes(16), "127.0.0.1:9", 2)
        command = cluster_pb2.PrefillCommand(spec=made, handoff=handoff)
        await coordinator.command(stream, prefill=command)
        await stream.next_of("handoff")
        await asyncio.wait_for(collector.called.wait(), WAIT_S)
        await coordinator.command(stream, release=cluster_pb2.ReleaseCommand())
        worker.stop.set()
        assert await worker.exit_code() == 0
        collector.answers.set()


async def test_a_handoff_without_room_at_the_sender_is_reported_with_its_reason(
    coordinator, start_worker
):
    start_worker(PREFILL, "p", kv_transfer={"send_bytes": NUM_BYTES // 2})
    prefill = await coordinator.stream()
    handoff = plan(secrets.token_bytes(16), "127.0.0.1:1", len(PROMPT))
    command = cluster_pb2.PrefillCommand(spec=spec("r", PROMPT, max_tokens=4), handoff=handoff)
    await coordinator.command(prefill, prefill=command)
    failed = (await prefill.next_of("handoff")).handoff
    assert (failed.state, failed.handoff_id) == (FAILED, handoff.handoff_id)
    assert failed.reason == kv_transfer_pb2.REFUSAL_REASON_TOO_LARGE
    assert tokens_of(await prefill.outputs("r"))


def report(**fields) -> cluster_pb2.HandoffReport:
    base = {"request_id": "r", "attempt": 1, "handoff_id": b"h" * 16, "epoch": 2}
    return cluster_pb2.HandoffReport(**base | fields)


def stages_us(span, begun_us) -> dict[str, tuple[int, int]]:
    """Start and end of each child span, in microseconds after the start of the handoff."""
    start_ns = NOW_NS - begun_us * 1000
    return {
        child.name.removeprefix("handoff "): (
            (child.start_ns - start_ns) // 1000,
            (child.end_ns - start_ns) // 1000,
        )
        for child in span.children
    }


def test_the_stages_of_a_send_are_placed_by_their_durations():
    times = {"reserve_us": 20, "open_us": 30, "fill_us": 100, "exposed_us": 7, "total_us": 130}
    (span,) = send_spans(report(state=COMMITTED, num_fallbacks=1, **times), NOW_NS)
    # Durations count back from the end, so the 3 us of notification delay are at the start.
    assert (NOW_NS - span.start_ns, span.error) == (130_000, "")
    assert stages_us(span, 130) == {
        "reserve": (3, 23),
        "open": (23, 53),
        "fill": (23, 123),
        "commit": (123, 130),
    }
    assert (span.attributes["baton.handoff.fallbacks"], span.attributes["baton.handoff.epoch"]) == (
        1,
        2,
    )


def test_a_failed_send_has_only_the_stages_it_reached():
    times = {"reserve_us": 20, "fill_us": 100, "total_us": 500}
    reason = kv_transfer_pb2.REFUSAL_REASON_NO_ROOM
    failed = report(state=FAILED, reason=reason, detail="no room", **times)
    (span,) = send_spans(failed, NOW_NS)
    assert stages_us(span, 500) == {"reserve": (0, 20), "fill": (20, 120)}
    assert (span.error, span.attributes["baton.handoff.reason"]) == ("no room", "no_room")
    assert span.attributes["baton.handoff.transport"] == "none"
    cancelled = report(state=FAILED, reason=kv_transfer_pb2.REFUSAL_REASON_CANCELLED)
    (span,) = send_spans(cancelled, NOW_NS)
    assert (span.error, span.attributes["baton.handoff.outcome"]) == ("", "cancelled")


def test_a_receive_that_never_committed_has_no_load():
    expired = report(state=FAILED, detail="too long", receive_us=50, total_us=50)
    (span,) = receive_spans(expired, NOW_NS)
    assert (span.name, span.start_ns, span.end_ns) == ("handoff receive", NOW_NS - 50_000, NOW_NS)
    assert span.error == "too long"


def test_metrics_of_handoffs():
    log = HandoffLog(Tracing(TracingConfig(), {}))
    log.record(SEND, "", report(state=COMMITTED, transport="shm", exposed_us=300))
    log.record(SEND, "", report(state=FAILED, transport="x" * 99))
    log.record(RECEIVE, "", report(state=RELEASED, transport="grpc"))
    shm = kv_transfer_pb2.TransportStatistics(
        name="shm", bytes_sent=5, bytes_received=6, frames_sent=2, frames_received=3, fallbacks=1
    )
    transfer = kv_transfer_pb2.LocalStatistics(
        transports=[shm],
        refusals={kv_transfer_pb2.REFUSAL_REASON_CHECKSUM: 4, 98: 1, 99: 2},
        expiries=9,
        num_waiting_sends=1,
    )
    collector = WorkerCollector("demo", "prefill", ["shm", "grpc"])
    collector.snapshot = Snapshot(transfer=transfer, handoffs=log.counts())
    text = generate_latest(collector.registry()).decode()
    for name, labels, value in (
        ("handoff_bytes_total", {"direction": "send", "transport": "shm"}, 5.0),
        ("handoff_bytes_total", {"direction": "receive", "transport": "shm"}, 6.0),
        ("handoff_bytes_total", {"direction": "send", "transport": "grpc"}, 0.0),
        ("handoff_frames_total", {"direction": "receive", "transport": "shm"}, 3.0),
        ("handoff_fallbacks_total", {"transport": "shm"}, 1.0),
        (
            "handoffs_total",
            {"direction": "send", "outcome": "committed", "transport": "shm"},
            1.0,
        ),
        ("handoffs_total", {"direction": "send", "outcome": "failed", "transport": "other"}, 1.0),
        (
            "handoffs_total",
            {"direction": "receive", "outcome": "released", "transport": "grpc"},
            1.0,
        ),
        ("handoff_refusals_total", {"reason": "checksum"}, 4.0),
        ("handoff_refusals_total", {"reason": "other"}, 3.0),
        ("handoff_lease_expiries_total", {}, 9.0),
        ("staging_waiting_handoffs", {"direction": "send"}, 1.0),
        ("handoff_exposed_seconds_bucket", {"le": "0.0005", "transport": "shm"}, 1.0),
        ("handoff_exposed_seconds_bucket", {"le": "0.00025", "transport": "shm"}, 0.0),
        ("handoff_exposed_seconds_sum", {"transport": "shm"}, 0.0003),
    ):
        labels = sorted((labels | {"model": "demo", "role": "prefill"}).items())
        shown = ",".join(f'{label}="{one}"' for label, one in labels)
        assert f"baton_worker_{name}{{{shown}}} {value}\n" in text
