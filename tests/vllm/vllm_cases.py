"""Requests whose outputs through the cluster must equal those of one plain vLLM.

Each case is a plain dict, so that the reference process gets it as JSON: `prompt` (token IDs),
`sampling` (by vLLM's names; `json_schema`, `choice` and `structural_tag` for grammars), and the
name of a LoRA `adapter`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

NUM_GPUS = torch.cuda.device_count()
# Several engines share a GPU; vLLM wants this share to be free when it starts.
SHARED_GPU = {"gpu_memory_utilization": 0.05} if NUM_GPUS else {}
BLOCK_SIZE = 32
CHUNK = 256
MAX_MODEL_LEN = 1024
# The demo model has at least this many token IDs.
VOCAB_SIZE = 430
# The first IDs are special tokens: beginning and end of a sequence, and the chat roles.
NUM_SPECIAL = 5

NUM_FAULTS = 20

JSON_SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"string","maxLength":6},'
    '"n":{"type":"integer","minimum":0,"maximum":99}},"required":["a","n"],'
    '"additionalProperties":false}'
)

# The form in which a required tool call is requested.
STRUCTURAL_TAG = (
    '{"type":"structural_tag","format":{"type":"tag","begin":"<tool_call>","content":'
    '{"type":"json_schema","json_schema":' + JSON_SCHEMA + '},"end":"</tool_call>"}}'
)
# An answer to this schema has about 150 tokens.
LIST_SCHEMA = (
    '{"type":"array","items":{"type":"integer","minimum":0,"maximum":99},'
    '"minItems":60,"maxItems":60}'
)

Case = dict[str, Any]


def num_ranks(wanted: int) -> int:
    """Returns the ranks of an engine: on GPUs, at most one for each of them."""
    return min(wanted, NUM_GPUS) if NUM_GPUS else wanted


def prompt(length: int, seed: int) -> list[int]:
    """Returns random token IDs, the same for the same arguments."""
    source = random.Random(f"{length}-{seed}")
    return [source.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(length)]


def greedy(name: str, ids: list[int], max_tokens: int = 24, **sampling: Any) -> Case:
    sampling = {"temperature": 0, "max_tokens": max_tokens, **sampling}
    return {"name": name, "prompt": ids, "sampling": sampling}


def length_cases() -> list[Case]:
    """Prompts around every boundary: block, several blocks, prefill chunk, context."""
    lengths = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 5 * BLOCK_SIZE - 1]
    lengths += [5 * BLOCK_SIZE + 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 33]
    lengths += [3 * CHUNK + 5, MAX_MODEL_LEN - 24]
    return [greedy(f"length-{n}-{seed}", prompt(n, seed)) for n in lengths for seed in (1, 2)]


def concurrent_cases() -> list[Case]:
    """Prompts of mixed lengths, which are sent eight at a time."""
    return [
        greedy(f"concurrent-{index}", prompt(17 + 41 * index, 7), max_tokens=16 + index)
        for index in range(16)
    ]


def prefix_cases() -> list[Case]:
    """The same prompt twice, and prompts that share a prefix of whole and of partial blocks."""
    base = prompt(6 * BLOCK_SIZE, 11)
    shared = [
        base,
        base,
        base + prompt(20, 12),
        base + prompt(20, 13),
        base[: 3 * BLOCK_SIZE] + prompt(50, 14),
        base[: 3 * BLOCK_SIZE + 5] + prompt(50, 15),
        base + prompt(CHUNK, 16),
        base + prompt(CHUNK, 16),
    ]
    return [greedy(f"prefix-{index}", ids) for index, ids in enumerate(shared)]


def sampling_cases() -> list[Case]:
    """Sampling parameters whose meaning must not change across the split."""
    ids = [prompt(40 + 9 * index, 21) for index in range(6)]
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    cases = [
        greedy("max-tokens-1", ids[0], max_tokens=1),
        greedy("max-tokens-2", ids[0], max_tokens=2),
        greedy("min-tokens", ids[1], min_tokens=8, max_tokens=12),
        greedy("ignore-eos", ids[2], ignore_eos=True, max_tokens=40),
        greedy("logprobs", ids[3], logprobs=3, max_tokens=10),
        greedy("prompt-logprobs", ids[3], prompt_logprobs=2, max_tokens=4),
        greedy("penalties", ids[4], **penalties),
        greedy("repetition-penalty", ids[5], repetition_penalty=1.4),
        greedy("bad-words", ids[5], bad_words=["the", "st"]),
        greedy("logit-bias", ids[5], logit_bias={"40": 4.0, "41": -3.0}),
        greedy("json", ids[0], json_schema=JSON_SCHEMA, max_tokens=48),
        greedy("structural-tag", ids[3], structural_tag=STRUCTURAL_TAG, max_tokens=48),
        # Every character is split across tokens; the first one is split across the two workers.
        greedy("multi-byte", ids[1], choice=["żółw", "été 🐢"], max_tokens=32),
        greedy("multi-byte-2", ids[2], choice=["日本語"], max_tokens=32),
    ]
    for seed in (1, 2, 3, 4):
        base = {"temperature": 1.0, "seed": seed, "max_tokens": 20}
        cases.append(greedy(f"seed-{seed}", ids[seed], **base))
        cases.append(greedy(f"seed-penalties-{seed}", ids[seed], **base, **penalties))
    cases.append(greedy("seed-top", ids[0], temperature=0.8, seed=5, top_p=0.9, top_k=40))
    cases.append(
        greedy("seed-json", ids[0], temperature=1.0, seed=9, json_schema=JSON_SCHEMA, max_tokens=48)
    )
    cases.append(
        greedy("seed-min-tokens", ids[3], temperature=1.0, seed=6, min_tokens=10, logprobs=2)
    )
    return cases


def chunked_seed_cases() -> list[Case]:
    """Seeded requests whose prompts take several prefill chunks."""
    base = {"temperature": 1.0, "max_tokens": 16}
    return [
        greedy(f"chunked-seed-{seed}", prompt(length, 41), seed=seed, **base)
        for seed, length in ((1, CHUNK + 1), (2, 2 * CHUNK + 33), (3, 3 * CHUNK))
    ]


def flip_cases() -> list[Case]:
    """Prompts for the role change test only: prompts return to the worker that computed them."""
    return [
        *(greedy(f"flip-{index}", prompt(230, 3000 + index), 12) for index in range(3)),
        *(
            greedy(f"flip-chunked-{index}", prompt(3 * CHUNK + 5, 3100 + index))
            for index in range(2)
        ),
    ]


def fault_cases() -> list[Case]:
    """Prompts of the tests that alter, lose or delay handoffs."""
    spoiled = [
        greedy(f"fault-{index}", prompt(230, 2000 + index), 12) for index in range(NUM_FAULTS)
    ]
    lost = prompt(6 * BLOCK_SIZE + 5, 9000)
    seeded = {"temperature": 1.0, "seed": 3}
    return [
        *spoiled,
        *(
            greedy(f"lost-{index}", prompt(6 * BLOCK_SIZE + 5, 9000 + index), 12)
            for index in range(5)
        ),
        *(
            greedy(f"staging-{role}", prompt(6 * BLOCK_SIZE + 5, 9100 + index), 12)
            for index, role in enumerate(("prefill", "decode"))
        ),
        greedy("lost-seeded", [*lost, 17], 12, **seeded),
        *(
            greedy(f"outgrow-{index}", prompt(180 + index, 7000 + index), 160, ignore_eos=True)
            for index in range(8)
        ),
        *(
            greedy(f"hit-{index}", prompt(5 * BLOCK_SIZE, 8000) + more, 8)
            for index, more in enumerate(([], prompt(70, 8001)))
        ),
    ]


def killed_cases() -> list[Case]:
    """Long outputs for tests that kill the worker of a running stream.

    Some continue as prompt and known tokens, others with forced tokens.
    """
    seeded = {"temperature": 1.0, "seed": 8}
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    return [
        greedy("killed-greedy", prompt(40, 9500), 200, ignore_eos=True),
        greedy("killed-seeded", prompt(40, 9501), 200, ignore_eos=True, **seeded, **penalties),
        greedy("killed-grammar", prompt(40, 9502), 200, json_schema=LIST_SCHEMA, **seeded),
    ]


def stop_candidates() -> list[Case]:
    """Greedy outputs from which the reference builds stop strings across tokens."""
    return [greedy(f"stop-{index}", prompt(30 + index, 31), max_tokens=20) for index in range(24)]


def adapter_cases(names: Sequence[str]) -> list[Case]:
    """Prompts around the boundaries, for the base model and each adapter in turn."""
    lengths = (1, BLOCK_SIZE + 1, 6 * BLOCK_SIZE, CHUNK + 1)
    return [
        {**greedy(f"adapter-{n}-{name}", prompt(n, 3), 16), "adapter": name}
        for n in lengths
        for name in names
    ]
