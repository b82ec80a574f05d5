"""The trace of a request contains the client's traceparent and spans of all processes."""

from baton.client import BatonClient
from tests.runtime.otlp_collector import OtlpCollector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_the_handoff_is_in_the_client_s_trace(new_cluster):
    async with OtlpCollector() as collector:
        cluster = new_cluster(
            "p1",
            "d1",
            elastic=False,
            # On a busy machine, handoffs may be slower than the prompt on the decode worker.
            decode={"local_prefill": False},
            tracing={"otlp_endpoint": collector.endpoint},
        )
        await cluster.serving()
        async with BatonClient(cluster.address) as client:
            await client.complete([7] * 600, max_tokens=4)
            traceparent = f"00-{TRACE}-{PARENT}-01"
            await client.complete([9] * 600, max_tokens=4, traceparent=traceparent)
        found = await collector.wait_for("handoff", "handoff commit", "handoff load")
    # The coordinator also sends a trace of its own for a request that is late.
    handoffs = [span for span in collector.spans if span.name.startswith("handoff")]
    assert {span.trace_id for span in handoffs} == {TRACE}
    sent, loaded = found["handoff"], found["handoff load"]
    assert sent.parent_id == loaded.parent_id == PARENT
    assert sent.resource["baton.worker.id"] == "p1"
    assert loaded.resource["baton.worker.id"] == "d1"
    for key in ("baton.request.id", "baton.handoff.id", "baton.handoff.bytes"):
        assert sent.attributes[key] == loaded.attributes[key]
