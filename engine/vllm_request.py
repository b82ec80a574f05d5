"""One request in vLLM's terms, and its results in ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from baton.engine.base import EngineRequest, Logprob, RequestRejected
from baton.v1 import common_pb2


def sampling_params(request: EngineRequest) -> SamplingParams:
    """The client's parameters as vLLM's, over the whole output."""
    source = request.sampling
    present = {
        name: getattr(source, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "skip_special_tokens",
            "logprobs",
            "prompt_logprobs",
        )
        if source.HasField(name)
    }
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


def transfer_params(request: EngineRequest, *, num_coming: int | None = None) -> dict[str, Any]:
    """What the connector reads as request.kv_transfer_params.

    Args:
        request: as the engine core gets it.
        num_coming: it is to wait for a note that says with which tokens, so many, it goes on; None:
            it is not.
    """
    params: dict[str, Any] = {}
    if request.send is not None:
        params["baton_send"] = {
            "handoff_id": request.send.handoff_id.hex(),
            "offset": request.send.offset,
            "num_tokens": request.send.num_tokens,
            "skip_tokens": request.send.skip_tokens,
        }
    if request.receive is not None:
        params["baton_receive"] = {
            "handoff_id": request.receive.handoff_id.hex(),
            "num_tokens": request.receive.num_tokens,
            "skip_tokens": request.receive.skip_tokens,
            "timeout_s": request.receive.timeout_s,
            "num_coming": num_coming,
        }
    return params


def logprobs(positions: Sequence[Any]) -> list[list[Logprob]]:
    return [
        [
            Logprob(token, entry.logprob, entry.rank or 0, entry.decoded_token or "")
            for token, entry in (position or {}).items()
        ]
        for position in positions
    ]
