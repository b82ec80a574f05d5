"""Converts a request to vLLM's request and parameters, and log probabilities back."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from baton.engine.base import EngineRequest, Logprob, RequestRejected
from baton.engine.vllm_forced_tokens import EXTRA_ARG
from baton.kvtransfer.connector import request_params
from baton.kvtransfer.connector.request_params import DropOrder
from baton.runtime.prompts.sampling import OPTIONAL_FIELDS, given, needs_exact_state
from baton.v1 import common_pb2


def engine_core_requests(
    inputs: InputProcessor,
    request: EngineRequest,
    vllm_id: str,
    lora: LoRARequest | None,
    features: Sequence[MultiModalFeatureSpec] = (),
) -> tuple[EngineCoreRequest, EngineCoreRequest]:
    """Returns the request for the output processor, and the request for the engine core.

    They differ in the known tokens: the output processor counts limits and text from the prompt,
    while the engine core may start with prompt + known tokens.

    Args:
        inputs: vLLM's input processor, which checks the request.
        request: The request.
        vllm_id: vLLM's ID for the request.
        lora: The request's adapter; None for the model itself.
        features: Its images.

    Raises:
        ValueError: vLLM does not accept the request; it may raise other exceptions too.
        RequestRejected: Baton does not accept the request.
    """
    shown: EngineCoreRequest = inputs.process_inputs(
        vllm_id,
        tokens_input(list(request.prompt_token_ids)),
        _sampling_params(request),
        supported_tasks=("generate",),
        lora_request=lora,
        priority=request.priority,
    )
    shown.external_req_id = vllm_id
    shown.mm_features = list(features) or None
    known, sampling = list(request.known_token_ids), shown.sampling_params
    params = sampling.clone()
    num_known = len(known)
    params.extra_args = {"kv_transfer_params": _transfer_params(request)}
    prompt = list(request.prompt_token_ids)
    if request.prefill_only:
        params.max_tokens, params.min_tokens = 1, min(params.min_tokens, 1)
    elif num_known:
        if not request.returns_prompt_logprobs:
            # Requesting them would turn prefix caching off.
            sampling.prompt_logprobs = params.prompt_logprobs = None
            params.skip_reading_prefix_cache = False
        if num_known >= params.max_tokens:
            raise ValueError(f"all {params.max_tokens} tokens are known already")
        if needs_exact_state(request.sampling):
            if inputs.vllm_config.speculative_config is not None:
                raise RequestRejected(
                    f"known_token_ids has {num_known} tokens; with speculative_config, outputs "
                    "with a seed, penalties or a grammar cannot be continued: vLLM replays nothing"
                )
            params.extra_args[EXTRA_ARG] = known
        else:
            prompt += known
            params.max_tokens -= num_known
            params.min_tokens = max(0, params.min_tokens - num_known)
    run = copy.copy(shown)
    run.prompt_token_ids, run.sampling_params = prompt, params
    run.cache_salt = request.cache_salt or None
    return shown, run


def drop_request(inputs: InputProcessor, vllm_id: str, order: DropOrder) -> EngineCoreRequest:
    """Returns the request that carries an order to delete KV blocks (connector/cache_drops.py)."""
    transfer = request_params.encode(drop=order)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": transfer}
    )
    made: EngineCoreRequest = inputs.process_inputs(
        vllm_id, tokens_input([0]), params, supported_tasks=("generate",)
    )
    made.external_req_id = vllm_id
    return made


def _sampling_params(request: EngineRequest) -> SamplingParams:
    """Converts the client's parameters to vLLM's, counted over the whole output."""
    source = request.sampling
    present = {name: getattr(source, name) for name in OPTIONAL_FIELDS if given(source, name)}
    if source.HasField("structured_output"):
        present["structured_outputs"] = _structured_outputs(source.structured_output)
    return SamplingParams(
        max_tokens=source.max_tokens if source.HasField("max_tokens") else None,
        min_tokens=source.min_tokens,
        stop=list(source.stop),
        stop_token_ids=list(source.stop_token_ids),
        bad_words=list(source.bad_words),
        ignore_eos=source.ignore_eos,
        include_stop_str_in_output=source.include_stop_str_in_output,
        logit_bias=dict(source.logit_bias) or None,
        allowed_token_ids=list(source.allowed_token_ids) or None,
        output_kind=RequestOutputKind.DELTA,
        **present,
    )


def _structured_outputs(source: common_pb2.StructuredOutput) -> StructuredOutputsParams:
    kind = source.WhichOneof("constraint")
    if kind == "json_schema":
        return StructuredOutputsParams(json=source.json_schema)
    if kind == "choice":
        return StructuredOutputsParams(choice=list(source.choice.values))
    if kind is None:
        raise RequestRejected("sampling.structured_output: has no constraint")
    return StructuredOutputsParams(**{str(kind): getattr(source, kind)})


def _transfer_params(request: EngineRequest) -> dict[str, Any]:
    """Returns what the connector and the scheduler read as request.kv_transfer_params."""
    return request_params.encode(
        send=request.send,
        receive=request.receive,
        only_cached=request.only_cached,
        num_needed_tokens=request.num_needed_tokens,
        # By the clock of vLLM's Request.arrival_time.
        due_at=time.time() + request.due_in_s,
        itl_s=request.itl_s,
    )


def logprobs(positions: Sequence[Any]) -> list[list[Logprob]]:
    return [
        [
            Logprob(token, entry.logprob, entry.rank or 0, entry.decoded_token or "")
            for token, entry in (position or {}).items()
        ]
        for position in positions
    ]
