"""Sends streamed requests to each kind of server and records the time of each token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import aiohttp

from baton.client.client import BatonClient
from baton.client.events import Finished, LatencyBudget, Tokens
from baton.client.request import LaneName
from baton.simulator.colocated import Balancer

REQUEST_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Timed:
    """Tokens of a request and their times, in seconds from the submission.

    Attributes:
        token_ids: Received tokens.
        times_s: Arrival of each token.
        budget: Latency budget of the request; Baton only.
        prefilled_s: Answer of the prefill server; NIXL only.
        num_prompt_tokens: Tokens of the prompt, if the caller sets them.
        num_cached_tokens: Prompt tokens that were not computed, as the server reports them.
    """

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    budget: LatencyBudget | None = None
    prefilled_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

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
        """Time from the first to the second token, which includes a handoff."""
        return self.gaps_s[0]

    @property
    def steady_gaps_s(self) -> list[float]:
        return self.gaps_s[1:]

    @property
    def exposed_s(self) -> float | None:
        """Handoff time that does not overlap with compute; None if there was no handoff.

        Baton: the stage "handoff", from the last computed layer to the verified commit.
        NIXL: from the prefill server's answer to the first token, including one decode step.
        """
        if self.budget is not None:
            workers = {
                one.worker_id for one in self.budget.stages if one.stage in ("prefill", "decode")
            }
            return self.stage_s("handoff") if len(workers) == 2 else None
        return None if self.prefilled_s is None else self.ttft_s - self.prefilled_s

    @property
    def prefill_s(self) -> float | None:
        """Duration of the prefill; for NIXL, this includes the wait in the queue."""
        return self.stage_s("prefill") if self.budget is not None else self.prefilled_s

    def stage_s(self, stage: str) -> float:
        """Returns the seconds of a stage of Baton's latency budget."""
        stages = self.budget.stages if self.budget is not None else ()
        return sum(one.duration_ms for one in stages if one.stage == stage) / 1e3

    def add(self, token_ids: Sequence[int], at_s: float) -> None:
        self.token_ids += token_ids
        self.times_s += [at_s] * len(token_ids)


Prompt: TypeAlias = list[int]
Send: TypeAlias = Callable[[Prompt], Awaitable[Timed]]
Request = TypeVar("Request")
Reply = TypeVar("Reply")


async def closed_loop(send: Send, prompts: Sequence[Prompt], concurrency: int) -> list[Timed]:
    """Sends all prompts with `concurrency` in flight: a new one follows when one has ended.

    Returns:
        The answers in the order of the prompts.
    """
    waiting, answers = iter(enumerate(prompts)), dict[int, Timed]()

    async def caller() -> None:
        for index, prompt in waiting:
            answers[index] = await send(prompt)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(caller())
    return [answers[index] for index in range(len(prompts))]


def least_loaded(
    senders: Sequence[Callable[[Request], Awaitable[Reply]]],
) -> Callable[[Request], Awaitable[Reply]]:
    """Returns a balancer: each request goes to the sender with the fewest requests in flight."""
    balancer = Balancer(len(senders))

    async def send(request: Request) -> Reply:
        index = balancer.send()
        try:
            return await senders[index](request)
        finally:
            balancer.finished(index)

    return send


async def through_baton(
    client: BatonClient,
    prompt: Prompt,
    max_tokens: int,
    lane: LaneName = "interactive",
    session_id: str = "",
) -> Timed:
    timed, start = Timed(), time.perf_counter()
    stream = client.generate(
        prompt,
        max_tokens=max_tokens,
        lane=lane,
        session_id=session_id,
        temperature=0,
        ignore_eos=True,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    async for event in stream:
        if isinstance(event, Tokens):
            timed.add(event.token_ids, time.perf_counter() - start)
        elif isinstance(event, Finished):
            timed.budget = event.budget
            timed.num_cached_tokens = event.usage.cached_prompt_tokens
    return timed


async def through_vllm(
    http: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    max_tokens: int,
    **extra: Any,
) -> Timed:
    """Streams from vLLM's own OpenAI server."""
    timed, start = Timed(), time.perf_counter()
    body = _body(prompt, max_tokens) | {"stream": True} | extra
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await _check(response)
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if (usage := chunk.get("usage")) is not None:
                details = usage.get("prompt_tokens_details") or {}
                timed.num_cached_tokens = details.get("cached_tokens") or 0
            choice = chunk["choices"]
            if choice and (token_ids := choice[0].get("token_ids")):
                timed.add(token_ids, time.perf_counter() - start)
    return timed


async def through_nixl(
    http: aiohttp.ClientSession,
    prefill_url: str,
    decode_url: str,
    prompt: Prompt,
    max_tokens: int,
) -> Timed:
    """Sends a request to vLLM's NixlConnector pair in the way of vLLM's proxy.

    The prefill server answers first, then the decode server streams, including the first token.
    """
    start = time.perf_counter()
    body = _body(prompt, 1) | {"kv_transfer_params": {"do_remote_decode": True}}
    async with http.post(f"{prefill_url}/v1/completions", json=body) as response:
        await _check(response)
        params = (await response.json())["kv_transfer_params"]
    prefilled_s = time.perf_counter() - start
    timed = await through_vllm(http, decode_url, prompt, max_tokens, kv_transfer_params=params)
    timed.times_s = [prefilled_s + at_s for at_s in timed.times_s]
    timed.prefilled_s = prefilled_s
    return timed


def _body(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
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
