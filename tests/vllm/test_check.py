"""`baton check` with vLLM's own configuration code, without weights."""

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.runtime import demo_model
from baton.runtime.config import load
from tests.vllm.test_refusals import DECODER, MODELS
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm]

TIMEOUT_S = 200
# Staging for two blocks of the demo model (256 KiB each), and for its longest prompt.
SMALL_BYTES = 2 * 256 * 2**10


class Told:
    """The answers of all commands, and the files that they were given and wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.demo = demo_model.ensure("demo", weights=False, root=directory / "models")
        for name in ("mamba", "mistral", "whisper"):
            (directory / name).mkdir()
            (directory / name / "config.json").write_text(json.dumps(MODELS[name]))
        (directory / "empty").mkdir()
        self.small, self.made = directory / "small.yaml", directory / "made.yaml"
        transfer = {"send_bytes": SMALL_BYTES, "receive_bytes": 2 * SMALL_BYTES}
        self.small.write_text(
            yaml.safe_dump({"model": self.demo, "log_level": "error", "kv_transfer": transfer})
        )
        taken = directory / "taken.yaml"
        taken.write_text("model: mine\n")
        pools = directory / "pools.yaml"
        pools.write_text(
            yaml.safe_dump({"model": self.demo, "decode": {"engine_args": {"block_size": 64}}})
        )
        # Two KV heads, so neighbouring ranks of four hold the same one.
        for name, model, sizes in (
            ("ranks", self.demo, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
            ("state ranks", "mamba", {"tensor_parallel_size": 2}),
        ):
            decode = {"engine_args": sizes}
            values = {"model": str(directory / model), "decode": decode}
            (directory / f"{name}.yaml").write_text(yaml.safe_dump(values))
        speculation = {
            "method": "draft_model", "model": self.demo, "num_speculative_tokens": 2,
        }  # fmt: skip
        arguments = {"engine_args": {"speculative_config": speculation}}
        for name, drafts in (("drafts", arguments), ("one draft", {"decode": arguments})):
            values = {"model": self.demo, **drafts}
            (directory / f"{name}.yaml").write_text(yaml.safe_dump(values))
        runner, windows = "runner=pooling", "disable_sliding_window=true"
        commands = {
            "small": ["--config", str(self.small), "--write", str(self.made), "--json"],
            "state": [str(directory / "mamba")],
            "whisper": [str(directory / "whisper")],
            "whisper as json": [str(directory / "whisper"), "--json"],
            "window": [str(directory / "mistral")],
            "pooling": [self.demo, "--engine-arg", runner, "--json"],
            "window off": [str(directory / "mistral"), "--engine-arg", windows],
            "argument": [self.demo, "--engine-arg", "max_modle_len=10"],
            "vllm": [self.demo, "--engine-arg", "max_model_len=-5"],
            "type": [self.demo, "--engine-arg", "max_model_len=abc", "--engine-arg", "dtype=half1"],
            "nowhere": ["/nowhere/model"],
            "empty": [str(directory / "empty")],
            "hub": ["nobody/nothing"],
            "pools": ["--config", str(pools)],
            "ranks": ["--config", str(directory / "ranks.yaml")],
            "state ranks": ["--config", str(directory / "state ranks.yaml")],
            "drafts": ["--config", str(directory / "drafts.yaml")],
            "one draft": ["--config", str(directory / "one draft.yaml"), "--json"],
            "taken": [self.demo, "--write", str(taken)],
        }
        with Program("check_program", commands, directory=directory) as program:
            self.answers: dict[str, dict[str, Any]] = program.result()

    def json(self, name: str) -> Any:
        return json.loads(self.answers[name]["out"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("check"))


def test_a_model_that_can_be_served_is_described_without_weights(told: Told) -> None:
    assert not list(Path(told.demo).glob("*.safetensors"))
    assert told.answers["small"]["code"] == 0
    found = told.json("small")
    assert found["can_be_served"]
    assert (found["model"], found["architecture"]) == (told.demo, "LlamaForCausalLM")
    # 4 layers, 2 heads of 64 keys and 64 values, in bfloat16.
    assert found["bytes_per_token"] == 4 * 2 * 128 * 2
    block_tokens = found["layout"]["block_size_tokens"]
    assert found["bytes_per_block"] == block_tokens * 2048
    assert found["prompt_tokens"] == 4000
    num_blocks = -(-4000 // block_tokens)
    assert found["prompt_bytes"] == num_blocks * found["bytes_per_block"]


def test_the_transports_of_this_host_are_measured(told: Told) -> None:
    by_name = {each["name"]: each for each in told.json("small")["transports"]}
    configured = [name for name, each in by_name.items() if each["configured"]]
    assert configured == ["shm", "nixl", "grpc"]
    has_nixl = importlib.util.find_spec("nixl") is not None
    if not has_nixl:
        assert by_name["nixl"]["note"].startswith("not usable here: not installed")
        assert by_name["nixl"]["handoff_s"] is None
    for name in ("shm", "nixl", "grpc") if has_nixl else ("shm", "grpc"):
        # The measured handoff has the size of the prompt's.
        moved = by_name[name]["bytes_per_s"] * by_name[name]["handoff_s"]
        assert moved == pytest.approx(told.json("small")["prompt_bytes"])
    assert by_name["nccl"]["handoff_s"] is None
    # torch's CPU build has no NCCL, but gloo.
    assert by_name["nccl"]["note"].startswith("not usable here: ")
    assert by_name["gloo"]["note"].startswith("not measured; ")


def test_staging_that_is_too_small_is_enlarged_in_the_written_configuration(told: Told) -> None:
    found = told.json("small")
    staging = found["staging"]
    block_tokens = found["layout"]["block_size_tokens"]
    # The smaller side decides.
    assert staging["max_prompt_tokens"] == SMALL_BYTES // found["bytes_per_block"] * block_tokens
    assert not staging["fits"]
    assert staging["suggested_prompt_tokens"] == found["max_model_len"] == 4096
    written = load(str(told.made))
    assert written.model == told.demo
    assert written.log_level == "error"
    assert written.engine_args == {"max_model_len": 4096}
    assert written.kv_transfer.send_bytes == staging["suggested_bytes"]
    assert written.kv_transfer.receive_bytes == staging["suggested_bytes"]


def test_baton_up_accepts_the_written_configuration(told: Told) -> None:
    command = ["up", "--config", str(told.made), "--engine", "simulated"]
    command += ["--listen", "127.0.0.1:0", "--no-http"]
    up = subprocess.Popen(
        [sys.executable, "-m", "baton.cli", *command],
        stdout=subprocess.PIPE,
        env=os.environ | {"HOME": str(told.directory)},
        text=True,
    )
    try:
        assert up.stdout is not None
        assert select.select([up.stdout], [], [], TIMEOUT_S)[0]
        assert up.stdout.readline().startswith("ready grpc=127.0.0.1:")
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    finally:
        up.kill()
        up.communicate()


def test_a_refused_model_names_its_kind_and_what_to_do(told: Told) -> None:
    refused = told.answers["whisper"]
    assert (refused["code"], refused["out"]) == (2, "")
    kind = "(WhisperForConditionalGeneration) is an encoder-decoder model"
    assert f"baton: model: {told.directory / 'whisper'} {kind}: " in refused["err"]
    assert "serve it with plain vLLM" in refused["err"]
    assert told.answers["whisper as json"]["code"] == 2
    as_json = told.json("whisper as json")
    assert not as_json["can_be_served"]
    assert kind in as_json["reason"]


def test_a_recurrent_state_is_listed(told: Told) -> None:
    answer = told.answers["state"]
    assert answer["code"] == 0, answer["err"]
    assert "(MambaForCausalLM) can be served, on cpu" in answer["out"]
    assert "recurrent state" in answer["out"]


def test_an_engine_argument_may_cause_a_refusal(told: Told) -> None:
    assert told.answers["pooling"]["code"] == 2
    assert "generates no tokens" in told.json("pooling")["reason"]


def test_windows_are_listed_beside_layers_that_keep_every_token(told: Told) -> None:
    window, layers = MODELS["mistral"]["sliding_window"], DECODER["num_hidden_layers"]
    windowed, full = told.answers["window"], told.answers["window off"]
    assert (windowed["code"], full["code"]) == (0, 0)
    assert "(MistralForCausalLM) can be served, on cpu" in windowed["out"]
    # 4 layers, 2 heads of 16 keys and 16 values, in bfloat16.
    size = f"{layers * window * 2 * 32 * 2 / 2**10:.1f} KiB"
    [row] = [line for line in windowed["out"].splitlines() if line.startswith("window of 128")]
    assert row.split()[4:] == [*size.split(), f"{layers}", "layers"]
    assert "window of" not in full["out"]
    # Without a sliding window, the context is as long as the window was.
    assert f"max_model_len is {window:,}" in full["out"]
    assert f"{layers} layers" in full["out"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("argument", "engine_args.max_modle_len: is no vLLM engine argument; did you mean"),
        ("vllm", "vLLM refuses it: engine_args.max_model_len is -5: Input should be "),
        ("type", "vLLM refuses it: engine_args.dtype is 'half1': Input should be 'auto', "),
        ("type", "; engine_args.max_model_len is 'abc': Input should be a valid integer"),
        ("nowhere", "model: is '/nowhere/model'; there is no such directory"),
        ("empty", "this directory has none of config.json, params.json"),
        ("hub", "model: nobody/nothing: cannot be read from the hub: "),
        ("pools", "decode workers could not load the KV caches of prefill workers: "),
        ("state ranks", "decode workers could not load the KV caches of prefill workers: "),
        ("taken", "--write: "),
    ],
)
def test_a_refusal_takes_one_line_and_exits_with_code_2(
    told: Told, name: str, expected: str
) -> None:
    answer = told.answers[name]
    assert (answer["code"], answer["out"]) == (2, "")
    assert expected in answer["err"]
    assert "Traceback" not in answer["err"]


def test_a_file_that_exists_is_kept(told: Told) -> None:
    assert (told.directory / "taken.yaml").read_text() == "model: mine\n"
    assert "exists already" in told.answers["taken"]["err"]


def test_pools_whose_caches_differ_are_refused_with_both_values(told: Told) -> None:
    assert "block_size_tokens is 64, here 128" in told.answers["pools"]["err"]


def test_pools_of_different_ranks_are_accepted_unless_the_model_keeps_states(told: Told) -> None:
    assert told.answers["ranks"]["code"] == 0, told.answers["ranks"]["err"]
    assert "tp_size is 2, here 1" in told.answers["state ranks"]["err"]


def test_it_is_told_whether_the_kv_cache_of_a_draft_is_handed_over(told: Told) -> None:
    """A prefill pool without the draft that the decode pool has is accepted."""
    both = told.answers["drafts"]
    assert both["code"] == 0, both["err"]
    assert "Speculative draft: its KV cache is handed over with the prompt\n" in both["out"]
    one = told.json("one draft")
    assert one["can_be_served"]
    assert one["draft"].startswith("its KV cache is left out of handoffs, because prefill.engine")
    assert told.json("small")["draft"] == ""
