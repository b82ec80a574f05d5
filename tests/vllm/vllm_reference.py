"""One plain vLLM without any connector, in one process."""

from __future__ import annotations

import os
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.vllm import vllm_cases as cases
from tests.vllm.forked_engines import fork_engines

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": cases.BLOCK_SIZE,
    # No chunks: vLLM on a CPU crashes on a seeded request that is prefilled in several chunks.
    "max_num_batched_tokens": cases.MAX_MODEL_LEN,
    "max_model_len": cases.MAX_MODEL_LEN,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 32 * 2**20,
    **cases.SHARED_GPU,
}


ADAPTERS: dict[str, LoRARequest] = {}


def sampling_params(sampling: dict[str, Any]) -> SamplingParams:
    arguments = dict(sampling)
    grammar = {}
    for ours, theirs in (("json_schema", "json"), ("choice", "choice"), ("structural_tag",) * 2):
        if constraint := arguments.pop(ours, None):
            grammar[theirs] = constraint
    if grammar:
        arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
    if bias := arguments.pop("logit_bias", None):
        arguments["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(**arguments)


def run(llm: LLM, case: cases.Case) -> dict[str, Any]:
    prompt = {"prompt_token_ids": case["prompt"]}
    adapter = ADAPTERS.get(case.get("adapter", ""))
    (made,) = llm.generate(
        [prompt], sampling_params(case["sampling"]), use_tqdm=False, lora_request=adapter
    )
    output = made.outputs[0]
    return {
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish": output.finish_reason,
        "stop": "" if output.stop_reason is None else str(output.stop_reason),
        "logprobs": logprobs(output.logprobs),
        "prompt_logprobs": logprobs(made.prompt_logprobs),
    }


def logprobs(positions: Any) -> list[list[tuple[int, float]]]:
    return [
        [(token, entry.logprob) for token, entry in (position or {}).items()]
        for position in positions or []
    ]


def stop_cases(llm: LLM, candidates: list[cases.Case]) -> list[cases.Case]:
    """Returns stop strings that begin in one token of a greedy output and end in the next."""
    tokenizer, found = llm.get_tokenizer(), []
    for case in candidates:
        ids = run(llm, case)["token_ids"]
        for split in (1, 2, 5):
            before, through = tokenizer.decode(ids[:split]), tokenizer.decode(ids[: split + 1])
            if "\ufffd" in through or not before or len(through) == len(before):
                continue
            stop = through[len(before) - 1 : len(before) + 1]
            for include in (False, True):
                sampling = {**case["sampling"], "stop": [stop, "never said, but long"]}
                sampling["include_stop_str_in_output"] = include
                name = f"{case['name']}-at-{split}-{'kept' if include else 'cut'}"
                found.append({**case, "name": name, "sampling": sampling})
    return found


def main(model: str, given: dict[str, Any]) -> list[cases.Case]:
    """Returns the cases with their answers.

    Args:
        model: A local directory.
        given: `cases`, which may name a LoRA adapter as their `adapter`; optional: `adapters`,
            directories by name, and `stop_candidates`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    fork_engines()
    for number, (name, path) in enumerate(given.get("adapters", {}).items(), start=1):
        ADAPTERS[name] = LoRARequest(name, number, path)
    tuned = {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": 8}
    llm = LLM(model=model, **ENGINE_ARGS, **(tuned if ADAPTERS else {}))
    all_cases = given["cases"] + stop_cases(llm, given.get("stop_candidates", []))
    return [{**case, "expected": run(llm, case)} for case in all_cases]
