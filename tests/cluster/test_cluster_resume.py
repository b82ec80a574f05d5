"""Clients resume their streams when the coordinator is killed or restarted."""

import asyncio
import json
import subprocess

import pytest

from baton.client import BatonClient, Tokens
from tests.cluster.processes import COMMAND

NUM_STREAMS = 30
# The outputs take 5 s, so that all streams still run when the coordinator is restarted.
NUM_TOKENS = 300


def prompt_of(salt: int) -> list[int]:
    return [5 + (17 * index + 31 * salt) % 400 for index in range(20 + 13 * salt)]


@pytest.mark.parametrize("how", ["killed", "told to stop"])
async def test_streams_resume_at_a_restarted_coordinator(new_cluster, how):
    cluster = new_cluster(
        "p1", "d1", simulated={"step_base_ms": 15}, coordinator={"drain_timeout_s": 0.2}
    )
    await cluster.serving()
    prompts = [prompt_of(salt) for salt in range(NUM_STREAMS)]
    flows = [asyncio.Event() for _ in prompts]

    async def read(client: BatonClient, prompt: list[int], flowing: asyncio.Event):
        parts: list[Tokens] = []
        async with client.generate(prompt, max_tokens=NUM_TOKENS, timeout_s=120) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    parts.append(event)
                    flowing.set()
        return parts, stream.num_resumes

    async with BatonClient(cluster.address) as client:
        # The CLI process starts first, because it needs longest until its first token.
        typed = subprocess.Popen(
            [*COMMAND, "generate", "--tokens", "7,8,9", "--max-tokens", str(NUM_TOKENS)]
            + ["--json", "--address", cluster.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert '"tokens"' in [await asyncio.to_thread(typed.stdout.readline) for _ in range(2)][1]
        reading = [
            asyncio.create_task(read(client, prompt, flowing))
            for prompt, flowing in zip(prompts, flows, strict=True)
        ]
        await asyncio.gather(*(flowing.wait() for flowing in flows))
        await asyncio.to_thread(cluster.restart_coordinator, gently=how == "told to stop")
        results = await asyncio.gather(*reading)
        out, err = await asyncio.to_thread(typed.communicate, timeout=120)

    for prompt, (parts, num_resumes) in zip(prompts, results, strict=True):
        tokens = [token for part in parts for token in part.token_ids]
        assert tuple(tokens) == cluster.expected(prompt, NUM_TOKENS)
        text = "".join(part.text for part in parts)
        assert text == cluster.vocabulary.tokenizer.decode(tokens)
        starts = [0, *(part.offset + len(part.token_ids) for part in parts)]
        assert [part.offset for part in parts] == starts[:-1]
        assert num_resumes == 1
    assert typed.returncode == 0, err
    assert err == "baton: the connection to the coordinator failed; the stream resumed once\n"
    # The line with the first token was already read above.
    events = [json.loads(line) for line in out.splitlines()]
    tokens = [token for event in events[:-1] for token in event["token_ids"]]
    assert events[0]["offset"] + len(tokens) == NUM_TOKENS
    assert tuple(tokens) == cluster.expected([7, 8, 9], NUM_TOKENS)[events[0]["offset"] :]
    await cluster.nothing_left()
