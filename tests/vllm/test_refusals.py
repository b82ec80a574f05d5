"""Models and settings that Baton cannot hand over are refused by name, without weights.

Each model is only a config.json. vLLM reads it, and inspects the class that it names.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.vllm_programs import Program, fork, run_baton

# vLLM inspects a model class for the first time in a separate process, and caches the result.
pytestmark = [pytest.mark.vllm]

DECODER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
LLAMA = {**DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 16,
        "torch_dtype": "float32",
    },
    "jamba": {
        **DECODER,
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": 51865,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "torch_dtype": "float32",
    },
    "bert": {**DECODER, "architectures": ["BertModel"], "model_type": "bert"},
    "mistral": {
        **DECODER,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 128,
    },
    "deepseek": {
        **DECODER,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    },
    "gemma": {
        **DECODER,
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "minimax": {
        **DECODER,
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    # It has two MTP modules.
    "multi module": {
        **DECODER,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "num_nextn_predict_layers": 2,
    },
    "llama": LLAMA,
    "qwen3 moe": {
        **DECODER,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "chunked": {**LLAMA, "attention_chunk_size": 128},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFT_MODEL = {"method": "draft_model", "model": "{llama}", "num_speculative_tokens": 2}
EAGLE = {**DRAFT_MODEL, "method": "eagle"}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
# Settings of drafts with a KV cache: the model, and vLLM's speculative_config.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("llama", DRAFT_MODEL),
    "eagle": ("llama", EAGLE),
    "one module": ("multi module", {**MTP, "num_speculative_tokens": 1}),
    "several modules": ("multi module", MTP),
    "block drop": ("llama", {**EAGLE, "disable_eagle_block_drop": False}),
    "parallel": ("llama", {**DRAFT_MODEL, "parallel_drafting": True}),
    "windows": ("mistral", DRAFT_MODEL),
    "draft's cache": ("llama", {**EAGLE, "kv_cache_dtype": "fp8"}),
    "other kind": ("deepseek", DRAFT_MODEL),
}
# Case name: the model, and vLLM's engine arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in MODELS if name != "qwen3 moe"},
    "window switched off": ("mistral", {"disable_sliding_window": True}),
    "pooling": ("llama", {"runner": "pooling"}),
    "data-parallel": ("llama", {"data_parallel_size": 3}),
    "data-parallel rank": ("qwen3 moe", {"data_parallel_size": 3, "data_parallel_rank": 1}),
    "stages": ("llama", {"pipeline_parallel_size": 2}),
    "stages with drafts": ("llama", {"pipeline_parallel_size": 2, "speculative_config": NGRAM}),
    "stages with offloading": ("llama", {"pipeline_parallel_size": 2, "kv_offloading_size": 0.1}),
    "prefill_context_parallel_size": ("llama", {"prefill_context_parallel_size": 2}),
    "decode_context_parallel_size": ("llama", {"decode_context_parallel_size": 2}),
    "nnodes": ("llama", {"nnodes": 2}),
    "ray": ("llama", {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}),
    "external_launcher": ("llama", {"distributed_executor_backend": "external_launcher"}),
    "scheduler_cls": ("llama", {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
    "scheduling_policy": ("llama", {"scheduling_policy": "fcfs"}),
    "worker_extension_cls": ("llama", {"worker_extension_cls": "somebodys.Extension"}),
    "kv_connector": ("llama", {"kv_transfer_config": {"kv_connector": "ExampleConnector"}}),
    "kv_cache_dtype": ("llama", {"kv_cache_dtype": "int8_per_token_head"}),
    "kv_cache_dtype_skip_layers": ("llama", {"kv_cache_dtype_skip_layers": ["0"]}),
    "sparse": ("deepseek", {"hf_overrides": {"index_topk": 64}}),
    "ngram": ("llama", {"speculative_config": NGRAM}),
    "hidden states": (
        "llama",
        {"speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1}},
    ),
    **{name: (model, {"speculative_config": draft}) for name, (model, draft) in DRAFTS.items()},
    "profiler": ("llama", {"profiler_config": {"profiler": "cuda"}}),
    "profiler_config": ("llama", {"profiler_config": {"torch_profiler_shapes": True}}),
}
# The same for adapters a and b; {adapter} stands for the directory of one.
ADAPTER_CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "no directory": ({"a": "/nowhere/a"}, {}),
    "no adapter": ({"a": "{llama}"}, {}),
    "enable_lora": ({"a": "{adapter}"}, {"enable_lora": False}),
    "max_cpu_loras": ({"a": "{adapter}", "b": "{adapter}"}, {"max_cpu_loras": 1}),
    "max_loras": ({"a": "{adapter}", "b": "{adapter}"}, {"max_loras": 2}),
}
PLAIN = "serve it with plain vLLM"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return {name: str(root / name) for name in (*MODELS, "adapter")}


@pytest.fixture(scope="module")
def said(directories: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Errors of the engine's start, by case."""
    cases = {name: (directories[model], args, {}) for name, (model, args) in CASES.items()} | {
        name: (directories["llama"], args, adapters)
        for name, (adapters, args) in ADAPTER_CASES.items()
    }
    text = json.dumps(cases).replace("{adapter}", directories["adapter"])
    given = json.loads(text.replace("{llama}", directories["llama"]))
    directory = tmp_path_factory.mktemp("refusals")
    with Program("refusals_program", given, directory=directory) as program:
        messages: dict[str, str] = program.result()
    return messages


@pytest.mark.parametrize(
    ("model", "architecture", "state"),
    [
        ("whisper", "WhisperForConditionalGeneration", "is an encoder-decoder model"),
        ("bert", "BertModel", "generates no tokens (its runner is 'pooling')"),
        ("chunked", "LlamaForCausalLM", "uses chunked local attention"),
        ("minimax", "TransformersMoEForCausalLM", "has recurrent layers whose state vLLM"),
    ],
)
def test_a_model_with_other_state_is_refused_by_name(
    said: dict[str, str], directories: dict[str, str], model: str, architecture: str, state: str
) -> None:
    message = said[model]
    assert message.startswith(f"model: {directories[model]} ({architecture}) {state}")
    assert PLAIN in message
    assert "\n" not in message


def test_a_pooling_runner_is_refused(said: dict[str, str]) -> None:
    assert "(LlamaForCausalLM) generates no tokens (its runner is 'pooling')" in said["pooling"]


@pytest.mark.parametrize(
    "name",
    [
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    ],
)
def test_parallel_settings_that_split_the_cache_otherwise_are_refused(
    said: dict[str, str], name: str
) -> None:
    assert said[name].startswith(f"engine_args.{name}: is 2; Baton supports 1, because ")


@pytest.mark.parametrize(
    ("name", "what_to_do"),
    [
        ("data-parallel", "start 3 workers instead (baton up --workers 3)"),
        (
            "data-parallel rank",
            "divide the experts among the ranks of one worker (tensor_parallel_size: 3, "
            "enable_expert_parallel: true), or start 3 workers that hold all experts "
            "(baton up --workers 3)",
        ),
    ],
)
def test_data_parallel_ranks_are_refused_with_what_to_do_instead(
    said: dict[str, str], name: str, what_to_do: str
) -> None:
    assert said[name].startswith("engine_args.data_parallel_size: is 3; ")
    assert said[name].endswith(what_to_do)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stages with drafts", "with speculative_config Baton supports 1"),
        ("stages with offloading", "offloading supports 1"),
    ],
)
def test_stages_are_refused_with_what_was_not_checked_with_them(
    said: dict[str, str], name: str, why: str
) -> None:
    assert said[name].startswith(f"engine_args.pipeline_parallel_size: is 2; {why}")


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_executors_that_may_place_ranks_on_other_hosts_are_refused(
    said: dict[str, str], backend: str
) -> None:
    message = said[backend]
    assert message.startswith(f"engine_args.distributed_executor_backend: is {backend!r}; ")
    assert "every rank must be on its worker's host" in message


def test_another_scheduler_class_is_refused(said: dict[str, str]) -> None:
    assert said["scheduler_cls"].startswith(
        "engine_args.scheduler_cls: is 'vllm.v1.core.sched.scheduler.Scheduler'; Baton supports "
    )


@pytest.mark.parametrize("name", ["scheduling_policy", "worker_extension_cls"])
def test_arguments_that_baton_sets_itself_are_refused(said: dict[str, str], name: str) -> None:
    assert said[name] == f"engine_args.{name}: is set by Baton and cannot be passed through"


def test_a_connector_that_cannot_be_inside_baton_s_is_refused(said: dict[str, str]) -> None:
    message = said["kv_connector"]
    assert message.startswith("engine_args.kv_transfer_config.kv_connector: is 'ExampleConnector'")


def test_a_cache_type_with_separate_scales_is_refused(said: dict[str, str]) -> None:
    assert said["kv_cache_dtype"] == (
        "engine_args.kv_cache_dtype: is 'int8_per_token_head'; Baton hands over caches of auto, "
        "bfloat16, fp8, fp8_e4m3, fp8_e5m2"
    )


def test_a_cache_with_a_different_type_in_some_layers_is_refused(said: dict[str, str]) -> None:
    message = said["kv_cache_dtype_skip_layers"]
    assert message.startswith("engine_args.kv_cache_dtype_skip_layers: is ['0']; Baton hands over ")


def test_sparse_attention_with_an_indexer_cache_is_refused(said: dict[str, str]) -> None:
    assert "(DeepseekV2ForCausalLM) uses sparse attention: its indexer" in said["sparse"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hidden states", "method is 'extract_hidden_states', whose draft keeps a KV cache of a"),
        ("several modules", "num_speculative_tokens is 2, by several MTP modules"),
        ("block drop", "disable_eagle_block_drop is False; must be True"),
        ("parallel", "parallel_drafting is True; Baton hands over drafts that draft one token"),
        ("windows", "method is 'draft_model', and MistralForCausalLM has layers with sliding"),
        ("draft's cache", "kv_cache_dtype is 'fp8'; must be that of the model, 'auto'"),
        ("other kind", "method is 'draft_model'; only one of LlamaForCausalLM and DeepseekV2For"),
    ],
)
def test_drafts_that_cannot_be_handed_over_are_refused_with_the_reason(
    said: dict[str, str], name: str, message: str
) -> None:
    assert said[name].startswith(f"engine_args.speculative_config: {message}")


def test_profiler_settings_that_baton_sets_or_vllm_rejects_are_refused(
    said: dict[str, str],
) -> None:
    assert said["profiler"] == "engine_args.profiler_config.profiler: is set by Baton"
    assert said["profiler_config"].startswith("engine_args.profiler_config: ")
    assert "torch_profiler_shapes" in said["profiler_config"]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral", "window switched off", "gemma", "jamba", "ngram", "deepseek"),
        *("draft_model", "eagle", "one module", "stages"),
    ],
)
def test_supported_models_fail_only_at_their_missing_files(said: dict[str, str], name: str) -> None:
    assert said[name].startswith("vLLM could not start: ")
    assert "tokenizer" in said[name]


def test_baton_worker_prints_the_refusal_and_exits_with_code_1(
    directories: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["worker", "--role", "prefill", "--coordinator", "127.0.0.1:1"]
    log = tmp_path / "worker.log"
    process = fork(run_baton, *arguments, "--model", directories["whisper"], log=log)
    try:
        process.join(TIMEOUT_S)
        said = log.read_text()
        assert process.exitcode == 1, said[-3000:]
    finally:
        process.kill()
        process.join()
    last = said.splitlines()[-1]
    kind = "(WhisperForConditionalGeneration) is an encoder-decoder model"
    assert f": engine: model: {directories['whisper']} {kind}" in last, said[-3000:]
    assert PLAIN in last


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no directory", "lora_adapters.a: is '/nowhere/a'; there is no such directory"),
        ("no adapter", "lora_adapters.a: is "),
        ("enable_lora", "engine_args.enable_lora: is False; lora_adapters needs it"),
        ("max_cpu_loras", "engine_args.max_cpu_loras: is 1; must be at least 2"),
        ("max_loras", "engine_args.max_loras: is 2; must be at least 3 on a CPU"),
    ],
)
def test_settings_that_contradict_the_configured_adapters_are_refused(
    said: dict[str, str], case: str, message: str
) -> None:
    assert said[case].startswith(message)


def test_the_connector_describes_each_kind_of_cache_and_refuses_others(tmp_path: Path) -> None:
    """The connector checks the cache itself, whatever the model's configuration says."""
    with Program("cache_specs_program", directory=tmp_path) as program:
        described = program.result()
    keys_and_values, latents = 64 * 2 * 64 * 2, 64 * 64 * 2
    assert described == {
        # Kind, layers, block bytes, window, block table of each group.
        "full": [["full", 2, keys_and_values, 0, 0]],
        "full with a window": [["full", 2, keys_and_values, 0, 0]],
        "latent": [["full", 2, latents, 0, 0]],
        "window": [["window", 2, keys_and_values, 16, 0]],
        "state": [["state", 2, 3 * 5 * 2 + 7 * 4, 0, 0]],
        "state with drafts": "MambaSpec with drafts",
        "window and full": [
            ["window", 2, keys_and_values, 16, 0],
            ["full", 2, keys_and_values, 0, 1],
        ],
        "two sizes in one table": [["full", 1, keys_and_values, 0, 0], ["full", 1, latents, 0, 0]],
        "several tokens in one state": "MLAAttentionSpec",
        "chunks": "ChunkedLocalAttentionSpec",
    }
