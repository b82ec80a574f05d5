"""Streams that lose their decode worker, and continue elsewhere as the coordinator has them do.

The rules are those of coordinator/core/commands.py and coordinator/routing/placement.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from baton.engine.base import EngineRequest
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.runtime.prompts.sampling import needs_exact_state
from baton.v1 import common_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import TIMEOUT_S, Side

# The coordinator's sampling of a prefill for the KV cache alone.
ONLY_PROMPT = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


async def recovered(prefill: Side, decode: Side, case: cases.Case) -> dict[str, Any]:
    """Runs a request whose decode worker is lost several times.

    Every attempt has a salt of its own, so its workers hold none of its blocks, like new ones.
    """
    known: list[int] = []
    num_loaded = []
    for number, num_tokens in enumerate([*case["lost_after"], None]):
        name = f"{case['name']}-{number}"
        request = await _begun(prefill, decode, case, known, name)
        if num_tokens is None:
            rest, first = await decode.finish(request)
        else:
            num_known = len(request.known_token_ids)
            rest, first = await decode.lost_after(request, num_tokens - num_known)
        num_loaded.append(first.num_handoff_tokens)
        # The first attempt knows the prefill worker's token.
        known = [*request.known_token_ids, *rest]
    return {"name": case["name"], "token_ids": known, "num_loaded": num_loaded}


async def continued(one: Side) -> dict[str, list[Any]]:
    """Asks for a prompt's log probabilities: in one run, and in one with three known tokens.

    Returns:
        For greedy and for seeded sampling the two runs; each has all tokens, and for each prompt
        token its candidates and their log probabilities.
    """
    found: dict[str, list[Any]] = {}
    prompt = cases.prompt(cases.CHUNK + 40, 601)
    for name, more in (("greedy", {"temperature": 0.0}), ("seeded", {"seed": 7})):
        sampling = common_pb2.SamplingParams(
            max_tokens=8, ignore_eos=True, prompt_logprobs=2, **more
        )
        runs: list[Any] = []
        known: list[int] = []
        for number in range(2):
            request = EngineRequest(
                f"continued-{name}-{number}", prompt, sampling, known_token_ids=known
            )
            tokens, first = await one.finish(request)
            rows = [
                [(each.token_id, each.logprob) for each in row] for row in first.prompt_logprobs
            ]
            runs.append([[*known, *tokens], rows])
            known = tokens[:3]
        found[name] = runs
    return found


async def _begun(
    prefill: Side, decode: Side, case: cases.Case, known: Sequence[int], name: str
) -> EngineRequest:
    """Returns the decode worker's request, after the prefill worker has computed the prompt."""
    prompt, sampling = case["prompt"], common_pb2.SamplingParams(**case["sampling"])
    is_exact = needs_exact_state(sampling)
    if is_exact and decode.info.layout.has_states:
        # Such requests stay on one worker.
        return EngineRequest(name, prompt, sampling, known_token_ids=known, cache_salt=name)
    computed = [*prompt, *(() if is_exact else known[:-1])]
    handoff_id, num_blocks = secrets.token_bytes(16), prefill.info.layout.num_blocks(len(computed))
    offset = await prefill.transfer.open_send(
        handoff_id, decode.transfer.address, num_blocks, len(computed), TIMEOUT_S
    )
    first, _ = await prefill.finish(
        EngineRequest(
            f"{name}-p",
            computed,
            ONLY_PROMPT if known else sampling,
            prefill_only=True,
            send=SendHandoff(handoff_id, offset, len(computed)),
            cache_salt=name,
        )
    )
    return EngineRequest(
        name,
        prompt,
        sampling,
        known_token_ids=known or first,
        receive=ReceiveHandoff(handoff_id, len(computed), TIMEOUT_S),
        cache_salt=name,
    )
