"""OpenAI's Files and Batches APIs with the official client: real gateway, coordinator and workers."""

import asyncio
import io
import json

import pytest

WAIT_S = 300.0


def line(custom_id, **fields):
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
    found = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(found | fields).encode()


async def upload(openai, *lines):
    data = b"\n".join(lines)
    return await openai.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")


async def ended(openai, batch):
    async with asyncio.timeout(WAIT_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.05)
            batch = await openai.batches.retrieve(batch.id)
    return batch


async def content(openai, file_id):
    text = (await openai.files.content(file_id)).text
    return [json.loads(one) for one in text.splitlines()]


async def test_a_batch_from_upload_to_results(start_gateway, cluster, tmp_path):
    async with start_gateway(cluster.address, batches={"dir": str(tmp_path / "b")}) as gateway, gateway.openai() as openai:
        file = await upload(openai, *(line(f"r{n}") for n in range(20)))
        print(file)
        batch = await openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"})
        print(batch)
        batch = await ended(openai, batch)
        print(batch)
        print(await content(openai, batch.output_file_id))
        assert 0
