from pathlib import Path

import pytest
import typer
import yaml

from baton.cli import options
from baton.runtime.config import BatonConfig

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "examples").glob("*.yaml"))


def test_what_show_prints_check_accepts(baton, tmp_path):
    shown = baton("config", "show")
    assert shown.code == 0
    file = tmp_path / "all.yaml"
    file.write_text(shown.out)
    checked = baton("config", "check", str(file))
    assert (checked.code, checked.out) == (0, f"{file}: ok\n")
    assert baton("config", "show", "--config", str(file)).out == shown.out


def test_show_lays_a_file_over_the_defaults(baton):
    shown = baton("config", "show", "--config", "-", stdin="decode: {workers: 3}\n")
    values = yaml.safe_load(shown.out)
    assert values["decode"]["workers"] == 3
    assert values["prefill"]["workers"] == BatonConfig().prefill.workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coordinator: {lisen: x}", "coordinator.lisen: unknown key; did you mean 'listen'?"),
        ("prefil: {workers: 1}", "prefil: unknown key; did you mean 'prefill'?"),
        ("decode: {workers: -1}", "decode.workers: is -1; "),
        ("engine: gpt", "engine: is 'gpt'; "),
        ("coordinator: {listen: nowhere}", "coordinator.listen: is 'nowhere'; must be host:port"),
        ("a: [", "not YAML"),
        ("- 1", "must be a mapping"),
    ],
)
def test_check_says_what_is_wrong_on_one_line(baton, text, expected):
    checked = baton("config", "check", "-", stdin=text)
    assert checked.code == 2
    assert checked.out == ""
    assert checked.err.startswith("baton: -: ")
    assert expected in checked.err
    assert checked.err.count("\n") == 1


def test_every_wrong_key_has_its_line(baton):
    checked = baton("config", "check", "-", stdin="modle: x\ndecode: {worker: 1}\n")
    assert len(checked.err.splitlines()) == 2


def test_a_missing_file(baton, tmp_path):
    checked = baton("config", "check", str(tmp_path / "none.yaml"))
    assert checked.code == 2
    assert "cannot be read" in checked.err


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_right(baton, example):
    assert baton("config", "check", str(example)).code == 0


def test_engine_arguments_are_yaml_under_vllms_names():
    arguments = ["max-model-len=2048", "--enforce_eager=true", "dtype=float32", "x={a: [1]}"]
    assert options.parse_engine_args(arguments) == {
        "max_model_len": 2048,
        "enforce_eager": True,
        "dtype": "float32",
        "x": {"a": [1]},
    }
    for wrong in ("x", "=1", "x=["):
        with pytest.raises(typer.BadParameter):
            options.parse_engine_args([wrong])


def test_options_lie_over_the_file(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("model: a\nengine_args: {x: 1, y: 2}\ndecode: {workers: 2}\n")
    config = options.load_config(
        str(file), model="b", engine_args=["x=3"], num_prefill=4, listen="127.0.0.1:0"
    )
    assert (config.model, config.engine_args) == ("b", {"x": 3, "y": 2})
    assert (config.prefill.workers, config.decode.workers) == (4, 2)
    assert config.coordinator.listen == "127.0.0.1:0"
