"""Two workers of different versions: what one has stored is a miss for the other, never wrong."""

import contextlib
import secrets
import sys

import pytest

from baton.engine.sim_tokens import expected_tokens
from baton.kvtransfer import layout
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.worker.scripted_coordinator import (
    WAIT_S,
    ScriptedCoordinator,
    plan,
    send_prefix,
    spec,
    tokens_of,
)

DECODE = common_pb2.ROLE_DECODE
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
FINGERPRINT = kv_transfer_pb2.REFUSAL_REASON_FINGERPRINT
MALFORMED = kv_transfer_pb2.REFUSAL_REASON_MALFORMED
TURN, HELD = 100, 96
PROMPT = [3 + index % 90 for index in range(TURN + 20)]
# Replaces the Python interpreter: runs a transfer service whose wire format has the next version.
NEXT_VERSION = """#!/bin/sh
shift 2
exec {python} -c '
import sys
from baton.kvtransfer import layout
layout.PROTOCOL_VERSION += 1
from baton.kvtransfer.service import service
sys.exit(service.main())
' "$@"
"""


@contextlib.contextmanager
def another_cache():
    """Workers with another layout of the KV cache."""
    yield {"simulated": {"num_layers": 8}}


@contextlib.contextmanager
def another_protocol(directory, monkeypatch):
    """Workers of the next version of the code, with another wire format."""
    program = directory / "python"
    program.write_text(NEXT_VERSION.format(python=sys.executable))
    program.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(program))
        patched.setattr(layout, "PROTOCOL_VERSION", layout.PROTOCOL_VERSION + 1)
        yield {}


@pytest.fixture
async def start(start_worker, vocabulary):
    """Starts a worker with a coordinator of its own; returns functions that use it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_one(name, **over):
            own = ScriptedCoordinator()
            await own.start()
            stack.push_async_callback(own.stop)
            start_worker(DECODE, name, address=own.address, **over)
            return own, await own.stream()

        yield start_one


@pytest.mark.parametrize(
    ("newer", "other", "reason"),
    [
        ("holder", "cache", FINGERPRINT),
        ("holder", "protocol", MALFORMED),
        ("reader", "protocol", MALFORMED),
    ],
)
async def test_a_fetch_between_versions_is_refused_and_the_prompt_computed(
    start, vocabulary, tmp_path, monkeypatch, newer, other, reason
):
    makes = another_cache() if other == "cache" else another_protocol(tmp_path, monkeypatch)
    with makes as over:
        changed = await start(newer, **over)
    usual = await start("usual")
    holder, reader = (changed, usual) if newer == "holder" else (usual, changed)
    command = cluster_pb2.DecodeCommand(spec=spec("turn 1", PROMPT[:TURN], max_tokens=1))
    await holder[0].command(holder[1], decode=command)
    await holder[1].outputs("turn 1")
    # A coordinator lets such workers serve together only as two revisions, and fetches nothing
    # between these. Here it is told to.
    handoff = plan(secrets.token_bytes(16), reader[1].hello.kv_address, HELD)
    await holder[0].command(holder[1], send_prefix=send_prefix(PROMPT, handoff))
    sent = (await holder[1].next_of("handoff")).handoff
    assert (sent.state, sent.reason) == (FAILED, reason), sent
    fetch = cluster_pb2.FetchPlan(handoff_id=handoff.handoff_id, num_tokens=HELD)
    fetch.timeout.FromMicroseconds(round(WAIT_S * 1e6))
    made = spec("turn 2", PROMPT, max_tokens=6)
    command = cluster_pb2.DecodeCommand(spec=made, fetch=fetch)
    await reader[0].command(reader[1], decode=command)
    drop = cluster_pb2.CancelCommand(request_id="turn 2", handoff_id=handoff.handoff_id)
    await reader[0].command(reader[1], cancel=drop)
    outputs = await reader[1].outputs("turn 2")
    assert tokens_of(outputs) == expected_tokens(vocabulary, PROMPT, 6)
    assert outputs[0].timings.num_fetched_tokens == 0
    for _, stream in (holder, reader):
        await stream.idle()
