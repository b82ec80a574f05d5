"""One streamed request against each kind of server, timed token by token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.client.client import BatonClient
from baton.client.events import Finished, LatencyBudget, Tokens


@dataclass(slots=True)
class Timed:
    """When a request's tokens came, in seconds from its submission.

    Attributes:
        token_ids: what came.
        times_s: of each token.
        budget: Baton's own account of it.
    """

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    budget: LatencyBudget | None = None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def e2e_s(self) -> float:
        return self.times_s[-1]

    @property
    def gaps_s(self) -> list[float]:
        return [
            after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)
        ]

    @property
    def second_gap_s(self) -> float:
        """From the first to the second token: where a handoff shows."""
        return self.gaps_s[0]

    @property
    def steady_gaps_s(self) -> list[float]:
        return self.gaps_s[1:]

    def add(self, token_ids: Sequence[int], at_s: float) -> None:
        self.token_ids += token_ids
        self.times_s += [at_s] * len(token_ids)


async def through_baton(client: BatonClient, prompt: list[int], max_tokens: int) -> Timed:
    timed, start = Timed(), time.perf_counter()
    stream = client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async for event in stream:
        if isinstance(event, Tokens):
            timed.add(event.token_ids, time.perf_counter() - start)
        elif isinstance(event, Finished):
            timed.budget = event.budget
    return timed


async def through_vllm(
    http: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    max_tokens: int,
    **extra: Any,
) -> Timed:
    """vLLM's own OpenAI server, streaming."""
    timed, start = Timed(), time.perf_counter()
    body = _body(prompt, max_tokens) | {"stream": True} | extra
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await _check(response)
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"]
            if choice and (token_ids := choice[0].get("token_ids")):
                timed.add(token_ids, time.perf_counter() - start)
    return timed


async def through_nixl(
    http: aiohttp.ClientSession,
    prefill_url: str,
    decode_url: str,
    prompt: list[int],
    max_tokens: int,
) -> Timed:
    """vLLM's NixlConnector with what its proxy does: prefill answers first, then decode streams.

    The first token comes from the decode server, as with vLLM's proxies.
    """
    start = time.perf_counter()
    body = _body(prompt, 1) | {"kv_transfer_params": {"do_remote_decode": True}}
    async with http.post(f"{prefill_url}/v1/completions", json=body) as response:
        await _check(response)
        params = (await response.json())["kv_transfer_params"]
    spent = time.perf_counter() - start
    timed = await through_vllm(http, decode_url, prompt, max_tokens, kv_transfer_params=params)
    timed.times_s = [spent + at_s for at_s in timed.times_s]
    return timed


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RuntimeError(f"{response.url}: {response.status}: {(await response.text())[:500]}")
