"""`baton up` with its gateway, and `baton gateway` alone, as processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request

import openai
import psutil
import pytest

from tests.gateway.baton_command import START_S, Process

# Bound hangs. No test may fail because a busy machine is slow.
BENCH_S = 300.0
UP = ("up", "--engine", "simulated", "--listen", "127.0.0.1:0", "--http-port", "0")
# Less than the default of 512 MB of staging per worker.
CONFIG = "kv_transfer: {send_bytes: 8388608, receive_bytes: 8388608}\n"
# Same as `vllm bench serve`, without its console script, which needs the package's metadata.
BENCH = """
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
for arguments in json.loads(sys.argv[1]):
    main(parser.parse_args(arguments))
"""


def start_up(*arguments, directory):
    config = directory / "baton.yaml"
    config.write_text(CONFIG)
    return Process(*UP, "--config", str(config), *arguments, directory=directory)


@pytest.fixture(scope="module")
def up(tmp_path_factory, model):
    directory = tmp_path_factory.mktemp("up")
    process = start_up("--model", model, "--served-model-name", "demo", directory=directory)
    try:
        found = process.ready(r"^ready grpc=(127\.0\.0\.1:\d+) http=(http://127\.0\.0\.1:\d+)$")
        process.grpc, process.url = found.groups()
        yield process
        assert process.stop() == (0, []), process.err()[-3000:]
    finally:
        process.close()


def client(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=START_S, **options)


def gateway_of(up):
    (found,) = (one for one in up.children() if "gateway" in one.cmdline())
    return found


def test_vllms_own_load_tool_works_unchanged(up, model, tmp_path):
    """By its own counts: all requests succeed with all tokens, TTFT and ITL are measured."""
    backends = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
    runs = []
    for backend, endpoint in backends.items():
        arguments = {
            "--backend": backend,
            "--endpoint": endpoint,
            "--base-url": up.url,
            "--model": "demo",
            "--tokenizer": model,
            "--dataset-name": "random",
            "--random-input-len": "40",
            "--random-output-len": "12",
            "--num-prompts": "12",
            "--max-concurrency": "6",
            "--result-dir": str(tmp_path),
            "--result-filename": f"{backend}.json",
        }
        flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        runs.append([*(part for pair in arguments.items() for part in pair), *flags])
    done = subprocess.run(
        [sys.executable, "-c", BENCH, json.dumps(runs)],
        capture_output=True,
        text=True,
        timeout=BENCH_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for backend in backends:
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (12, 0), result
        assert result["total_output_tokens"] == 12 * 12
        assert all(ttft > 0 for ttft in result["ttfts"])
        # Each chunk has the tokens of one delta; no chunk is without tokens.
        assert all(1 <= len(gaps) <= 11 for gaps in result["itls"])


def test_a_gateway_alone_serves_the_same_coordinator(up, tmp_path):
    alone = Process(
        *("gateway", "--coordinator", f"127.0.0.1:1,{up.grpc}", "--listen", "127.0.0.1:0"),
        directory=tmp_path,
    )
    try:
        url = alone.ready(r"^ready http=(http://127\.0\.0\.1:\d+)$").group(1)
        answers = [
            client(one).completions.create(model="demo", prompt=[5, 6, 7], max_tokens=6)
            for one in (up.url, url)
        ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        # gRPC logs an error if it has no experiment with a name that the gateway switches off.
        assert "experiment" not in alone.err()
        assert alone.stop() == (0, [])
    finally:
        alone.close()


def test_a_gateway_that_dies_is_replaced(up):
    old = gateway_of(up)
    old.kill()
    # The listening socket survives: connections wait for the next gateway process.
    answer = client(up.url, max_retries=5).completions.create(
        model="demo", prompt=[5, 6, 7], max_tokens=2
    )
    assert answer.usage.completion_tokens == 2
    assert gateway_of(up).pid != old.pid


def test_a_killed_gateway_cuts_its_streams_with_a_connection_error(up, tmp_path):
    alone = Process(
        *("gateway", "--coordinator", up.grpc, "--listen", "127.0.0.1:0"), directory=tmp_path
    )
    try:
        url = alone.ready(r"^ready http=(http://127\.0\.0\.1:\d+)$").group(1)
        chunks = iter(
            client(url, max_retries=0).completions.create(
                model="demo", prompt=[5, 6, 7], max_tokens=1000, stream=True
            )
        )
        next(chunks)
        alone.popen.kill()
        with pytest.raises(openai.APIConnectionError):
            list(chunks)
    finally:
        alone.close()


def test_a_low_limit_of_open_files_is_named(tmp_path):
    log = tmp_path / "log"
    gateway = [sys.executable, "-m", "baton.cli", "gateway", "--coordinator", "127.0.0.1:1"]
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 400; exec "$@"', "sh", *gateway, "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    with popen:
        assert popen.stdout.readline().startswith("ready ")
        popen.terminate()
        assert popen.wait(START_S) == 0
    assert "http.max_connections is 4096" in log.read_text()
    assert "only 400 files (RLIMIT_NOFILE): at most 300 connections" in log.read_text()


def test_sigterm_drains_streams(tmp_path, model):
    process = start_up("--model", model, directory=tmp_path)
    try:
        url = process.ready(r" http=(\S+)$").group(1)
        stream = client(url).completions.create(
            model="", prompt=[5, 6, 7], max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        stopping: list[tuple[int, list[psutil.Process]]] = []
        stopper = threading.Thread(target=lambda: stopping.append(process.stop()))
        stopper.start()
        last = list(chunks)[-1]
        assert last.choices[0].finish_reason == "length"
        stopper.join()
        assert stopping == [(0, [])], process.err()[-3000:]
        with pytest.raises(openai.APIConnectionError):
            client(url, max_retries=0).models.list()
    finally:
        process.close()


def test_without_a_gateway(tmp_path, model):
    process = start_up("--no-http", "--model", model, directory=tmp_path)
    try:
        process.ready(r"^ready grpc=\S+$")
        assert process.stop(signal.SIGINT) == (0, [])
    finally:
        process.close()


def test_a_port_in_use_is_an_error_before_anything_starts(up, tmp_path):
    port = up.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli", *UP[:-1], port],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert f"http.listen: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert done.stdout == ""


def test_a_parser_that_cannot_read_gpt_oss_is_an_error_at_the_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    command = ["up", "--engine", "vllm", "--model", str(tmp_path), "--tool-call-parser", "hermes"]
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli", *command, "--http-port", "0"],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 2
    wanted = "tool_call_parser: is 'hermes'; must be 'openai' for a gpt-oss model"
    assert wanted in done.stderr
    assert done.stdout == ""


def test_metrics_of_the_process(up):
    with urllib.request.urlopen(f"{up.url}/metrics", timeout=START_S) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        assert b"baton_http_requests_total" in answer.read()
