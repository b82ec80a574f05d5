"""Prompt log probabilities of requests that move to another worker after their first tokens."""

import asyncio
import signal

import pytest

from baton.client import AdminClient, BatonClient, Tokens

PROMPT = list(range(5, 45))
SAMPLING = {"prompt_logprobs": 1, "max_tokens": 50}
# Timeout of a wait in seconds; it only bounds a test that hangs.
SOON_S = 120.0


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_a_request_that_leaves_its_only_worker_returns_them(new_cluster, how):
    """One worker computes the prompt and decodes; the next worker gets the known tokens."""
    cluster = new_cluster("d1", simulated={"step_base_ms": 20})
    await cluster.serving(1)
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        stream = client.generate(PROMPT, timeout_s=SOON_S, **SAMPLING)
        num_tokens = 0
        async for event in stream:
            num_tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
            if num_tokens >= 5:
                break
        if how == "killed":
            cluster.signal("d1", signal.SIGKILL)
            await cluster.exit_code("d1")
        else:
            await admin.drain_worker("d1", drain_s=0.001)
        cluster.start_worker("decode", "d2")
        async with asyncio.timeout(SOON_S):
            done = await stream.complete()
        assert stream.token_ids == cluster.expected(PROMPT, 50)
        rows = done.finished.prompt_logprobs
        assert [[entry.token_id for entry in row[:1]] for row in rows] == [
            [],
            *([token] for token in PROMPT[1:]),
        ]
