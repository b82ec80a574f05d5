"""A worker's revision: reported in Hello, kept with the rollout record, checked in handoffs."""

import secrets

import pytest

from baton.engine.sim_tokens import expected_tokens
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.worker.scripted_coordinator import ScriptedCoordinator, plan, spec, tokens_of

pytestmark = pytest.mark.usefixtures("forked_services")

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
PROMPT = [3 + index % 90 for index in range(100)]


async def test_a_worker_reports_its_revision_and_keeps_the_rollout(coordinator, start_worker):
    start_worker(worker={"revision": "r2"}, engine_args={"max_num_seqs": 8})
    stream = await coordinator.stream()
    assert stream.hello.revision == "r2"
    assert len(stream.hello.config_digest) == 12
    assert stream.hello.fingerprint.revision.endswith("/r2")
    assert not stream.hello.HasField("rollout")
    record = cluster_pb2.RolloutRecord(
        version=7, configured="1", stable="1", canary="r2", share=0.1
    )
    await coordinator.command(stream, rollout=record)
    # A command without outputs is acknowledged with the next load report.
    while stream.acks < coordinator.sent:
        stream.heard.clear()
        await stream.heard.wait()
    stream.end()
    assert (await coordinator.stream()).hello.rollout == record


async def test_a_kv_cache_of_another_revision_is_refused(coordinator, start_worker, vocabulary):
    """The refused handoff fails, and the decode worker computes the prompt."""
    second = ScriptedCoordinator()
    await second.start()
    try:
        start_worker(PREFILL, "p")
        start_worker(DECODE, "d", address=second.address, worker={"revision": "r2"})
        prefill, decode = await coordinator.stream(), await second.stream()
        handoff = plan(secrets.token_bytes(16), decode.hello.kv_address, len(PROMPT), 0.5)
        made = spec("r", PROMPT, max_tokens=4)
        command = cluster_pb2.PrefillCommand(spec=made, handoff=handoff)
        await coordinator.command(prefill, prefill=command)
        made.known_token_ids.extend(tokens_of(await prefill.outputs("r")))
        report = (await prefill.next_of("handoff")).handoff
        assert report.state == kv_transfer_pb2.HANDOFF_STATE_FAILED
        assert report.reason == kv_transfer_pb2.REFUSAL_REASON_FINGERPRINT
        command = cluster_pb2.DecodeCommand(spec=made, handoff=handoff)
        await second.command(decode, decode=command)
        outputs = await decode.outputs("r")
        assert tokens_of(outputs) == expected_tokens(vocabulary, PROMPT, 4)[1:]
        assert outputs[0].timings.num_handoff_tokens == 0
    finally:
        await second.stop()
