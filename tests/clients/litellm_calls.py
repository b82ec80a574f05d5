"""Calls of litellm, run by the clients' environment; prints a JSON object.

Usage: litellm_calls.py URL_OF_THE_GATEWAY LINES_FILE
"""

import asyncio
import json
import sys
from pathlib import Path

import litellm

URL, LINES = sys.argv[1], Path(sys.argv[2]).read_bytes()
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none"}
FILES = {**OPENAI, "custom_llm_provider": "openai"}
ANTHROPIC = {"api_base": URL, "api_key": "none"}
TURNS = [{"role": "user", "content": "What is a KV cache?"}]
SHORT = {"messages": TURNS, "max_tokens": 16}


async def main():
    found = {}
    chat = litellm.completion(model="openai/glossary", **SHORT, **OPENAI)
    found["chat"] = chat.choices[0].message.content
    chunks = await litellm.acompletion(model="openai/glossary", **SHORT, stream=True, **OPENAI)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
    found["stream"] = "".join(deltas)
    chat = await litellm.acompletion(model="hosted_vllm/glossary", **SHORT, **OPENAI)
    found["hosted_vllm"] = chat.choices[0].message.content
    chat = await litellm.acompletion(model="anthropic/glossary", **SHORT, **ANTHROPIC)
    found["anthropic"] = chat.choices[0].message.content
    message = await litellm.anthropic.messages.acreate(
        model="anthropic/glossary", **SHORT, **ANTHROPIC
    )
    found["messages"] = message["content"][0]["text"]
    response = await litellm.aresponses(
        model="openai/glossary", input=TURNS, max_output_tokens=16, **OPENAI
    )
    found["responses"] = response.output[0].content[0].text
    file = await litellm.acreate_file(file=("lines.jsonl", LINES), purpose="batch", **FILES)
    batch = await litellm.acreate_batch(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id, **FILES
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(0.1)
        batch = await litellm.aretrieve_batch(batch_id=batch.id, **FILES)
    content = await litellm.afile_content(file_id=batch.output_file_id, **FILES)
    answer = json.loads(content.content)["response"]["body"]
    found["batch"] = answer["choices"][0]["message"]["content"]
    print(json.dumps(found))


asyncio.run(main())
