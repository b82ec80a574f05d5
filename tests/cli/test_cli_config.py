import json
import os
import re
from pathlib import Path

import pytest
import typer
import yaml

from baton.cli import options
from baton.cli.effective_config import load_config
from baton.cli.engine_args import parse_engine_args
from baton.runtime.config import BatonConfig, dump, parse
from baton.runtime.config_error import ConfigError
from baton.worker.main import vllm_model

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "examples").glob("*.yaml"))


def test_what_show_prints_check_accepts(baton, tmp_path):
    shown = baton("config", "show")
    assert shown.code == 0
    file = tmp_path / "all.yaml"
    file.write_text(shown.out)
    checked = baton("config", "check", str(file))
    assert (checked.code, checked.out) == (0, f"{file}: ok\n")
    assert baton("config", "show", "--config", str(file)).out == shown.out


def test_keys_says_what_each_means(baton_here):
    everything = json.loads(baton_here("config", "keys", "--json").out)
    assert [one["name"] for one in everything if not one["meaning"]] == []
    shown = yaml.safe_load(baton_here("config", "show").out)
    parts = (".NAME.", "[].")
    known = {
        one["name"]: one["default"]
        for one in everything
        if not any(part in one["name"] for part in parts)
    }
    assert known == dict(leaves(shown, known))
    some = baton_here("config", "keys", "batch.share").out.splitlines()
    assert some[0].split() == ["KEY", "DEFAULT", "MEANING"]
    assert some[1].startswith("lanes.batch.share  0.05     Share of all tokens")
    assert "tenants.NAME.weight" in baton_here("config", "keys", "tenants").out
    assert "http.cells[].coordinators" in baton_here("config", "keys", "http").out
    missing = baton_here("config", "keys", "lanes.batch.shares")
    assert (missing.code, missing.out) == (2, "")
    assert "did you mean 'lanes.batch.share'?" in missing.err


def leaves(values, known, above=""):
    """Keys and values of what is printed, sections opened as far as keys are known."""
    for name, value in values.items():
        if f"{above}{name}" in known:
            yield f"{above}{name}", value
        else:
            yield from leaves(value, known, f"{above}{name}.")


def test_show_lays_a_file_over_the_defaults(baton_here):
    shown = baton_here("config", "show", "--config", "-", stdin="decode: {workers: 3}\n")
    values = yaml.safe_load(shown.out)
    assert values["decode"]["workers"] == 3
    assert values["prefill"]["workers"] == BatonConfig().prefill.workers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coordinator: {lisen: x}", "coordinator.lisen: unknown key; did you mean 'listen'?"),
        ("prefil: {workers: 1}", "prefil: unknown key; did you mean 'prefill'?"),
        ("decode: {workers: -1}", "decode.workers: is -1; "),
        ("lanes: {batch: {max_queued: 10000000000}}", "lanes.batch.max_queued: is 10000000000; "),
        ("prefill: 3", "prefill: is 3; must be a mapping of keys"),
        ("model: null", "model: is null; must be a valid string"),
        ("model: ''", "model: is ''; "),
        ("worker: {revision: a b}", "must be 1 to 64 characters of [A-Za-z0-9._-]"),
        ("model: 2024-99-99", "not YAML: month must be in 1..12"),
        ("decode: {workers: 1}\ndecode: {workers: 2}", "found the key 'decode' a second time"),
        ("engine: gpt", "engine: is 'gpt'; "),
        ("coordinator: {listen: nowhere}", "coordinator.listen: is 'nowhere'; must be host:port"),
        (
            "http: {cells: [{coordinators: a:1}, {coordinators: nonsense}]}",
            "-: http.cells[1].coordinators: is 'nonsense'; must be host:port",
        ),
        (
            "http: {cells: [{coordinators: a:1}, {coordinators: a:1}]}",
            "cells must have different coordinators",
        ),
        (
            "prefill: {workers: 3}\nscaling: {autoscale: true, prefill: {max_workers: 2}}",
            "-: prefill.workers: is 3; must be at most 2, scaling.prefill.max_workers",
        ),
        ("scaling: {max_gpus: 1}", "-: scaling.max_gpus: is 1; must be at least 2"),
        ("security: {ca_file: /dev/null}", "-: security.ca_file: "),
        (f"security: {{api_keys_file: /{'a' * 300}}}", "-: security.api_keys_file: '/aaa"),
        ("security: {metrics_token_file: /dev/null}", "-: security.metrics_token_file: /dev/null "),
        ("a: [", "not YAML"),
        ("- 1", "must be a mapping"),
    ],
)
def test_check_says_what_is_wrong_on_one_line(baton_here, text, expected):
    checked = baton_here("config", "check", "-", stdin=text)
    assert checked.code == 2
    assert checked.out == ""
    assert checked.err.startswith("baton: -: ")
    assert expected in checked.err
    assert checked.err.count("\n") == 1


def test_check_names_the_file_in_front_of_each_warning(baton_here):
    text = "http: {listen: '0.0.0.0:8000'}\nsecurity: {allow_insecure: true}\n"
    checked = baton_here("config", "check", "-", stdin=text)
    assert (checked.code, checked.out) == (0, "-: ok\n")
    told = "baton: -: warning: http.listen 0.0.0.0:8000 is open to other hosts without TLS\n"
    assert checked.err == told


def test_check_names_the_files_that_are_not_on_this_host(baton_here, tmp_path):
    """It may run on another host than the cell, so that they are no error."""
    (token := tmp_path / "token").write_text("f" * 64)
    text = f"""
security:
  ca_file: {tmp_path}/ca.pem
  cert_file: {token}
  key_file: {token}
  cluster_token_file: {token}
  api_keys_file: {tmp_path}/keys.yaml
  jwt: {{key_file: {tmp_path}/jwks.json, issuer: a, audience: b}}
"""
    checked = baton_here("config", "check", "-", stdin=text)
    assert (checked.code, checked.out) == (0, "-: ok\n")
    assert checked.err == (
        "baton: -: not checked, because absent or not readable here: "
        f"security.ca_file ({tmp_path}/ca.pem), "
        f"security.jwt.key_file ({tmp_path}/jwks.json), "
        f"security.api_keys_file ({tmp_path}/keys.yaml)\n"
    )
    token.write_text("")
    assert baton_here("config", "check", "-", stdin=text).code == 2


def test_what_is_commented_out_whole_is_as_good_as_absent(baton_here):
    text = "security:\n  # ca_file: x\nprefill:\nengine_args:\ntenants:\n  acme:\n"
    text += "kv_transfer:\n  transports:\n  # - shm\n"
    assert baton_here("config", "check", "-", stdin=text).code == 0
    shown = yaml.safe_load(baton_here("config", "show", "--config", "-", stdin=text).out)
    assert shown["prefill"] == BatonConfig().prefill.model_dump()
    assert shown["tenants"]["acme"]["weight"] == 1
    assert shown["kv_transfer"] == BatonConfig().kv_transfer.model_dump()


def test_what_lies_over_a_merged_key_is_not_there_twice(baton_here):
    text = """
prefill:
  engine_args: &prefill
    <<: &common {max_model_len: 100, dtype: float32}
    max_model_len: 200
engine_args: {<<: *prefill, seed: 1}
"""
    shown = yaml.safe_load(baton_here("config", "show", "--config", "-", stdin=text).out)
    assert shown["engine_args"] == {"max_model_len": 200, "dtype": "float32", "seed": 1}


def test_a_model_where_one_stands_has_its_directorys_name(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path / "llama")
    assert BatonConfig(model=".").model_name == "llama"
    assert BatonConfig(model="..").model_name == tmp_path.name


def test_what_is_nested_too_deeply_to_be_read_is_refused(baton_here):
    checked = baton_here("config", "check", "-", stdin=f"a: {5000 * '['}")
    assert (checked.code, checked.err) == (2, "baton: -: is nested too deeply\n")
    with pytest.raises(typer.BadParameter, match="value is not YAML"):
        parse_engine_args([f"x={5000 * '['}"])


def test_what_contains_itself_is_refused(baton_here):
    checked = baton_here(
        "config", "check", "-", stdin="engine_args: &all\n  seed: 1\n  more: *all\n"
    )
    assert checked.code == 2
    assert "not YAML: found a value that contains itself" in checked.err
    assert (
        baton_here("config", "check", "-", stdin="prefill: &one {workers: 2}\ndecode: *one").code
        == 0
    )


def test_every_wrong_key_has_its_line(baton_here):
    checked = baton_here("config", "check", "-", stdin="modle: x\ndecode: {worker: 1}\n")
    assert len(checked.err.splitlines()) == 2


def test_a_missing_file(baton_here, tmp_path):
    checked = baton_here("config", "check", str(tmp_path / "none.yaml"))
    assert checked.code == 2
    assert (
        checked.err == f"baton: {tmp_path}/none.yaml: cannot be read: No such file or directory\n"
    )
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff")
    checked = baton_here("config", "check", str(tmp_path / "picture.yaml"))
    assert (checked.code, "it is not text in UTF-8" in checked.err) == (2, True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_right(baton_here, example):
    assert baton_here("config", "check", str(example)).code == 0


def test_engine_arguments_are_yaml_under_vllms_names():
    arguments = ["max-model-len=2048", "--enforce_eager=true", "dtype=float32", "x={a: [1]}"]
    assert parse_engine_args(arguments) == {
        "max_model_len": 2048,
        "enforce_eager": True,
        "dtype": "float32",
        "x": {"a": [1]},
    }
    for wrong in ("x", "=1", "x=["):
        with pytest.raises(typer.BadParameter):
            parse_engine_args([wrong])


@pytest.mark.parametrize("value", ["2024-01-01", ".nan", "{x: .inf}", "!!binary aGk="])
def test_an_engine_argument_that_json_cannot_hold_is_refused(value):
    """A rollout sends the arguments as JSON."""
    with pytest.raises(typer.BadParameter, match="a text may need quotes"):
        parse_engine_args([f"revision={value}"])
    assert parse_engine_args(["revision='2024-01-01'"]) == {"revision": "2024-01-01"}


def test_options_lie_over_the_file(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("model: a\nengine_args: {x: 1, y: 2}\ndecode: {workers: 2}\n")
    config = load_config(
        str(file), model="b", engine_args=["x=3"], num_prefill=4, listen="127.0.0.1:0"
    )
    assert (config.model, config.engine_args) == ("b", {"x": 3, "y": 2})
    assert (config.prefill.workers, config.decode.workers) == (4, 2)
    assert config.coordinator.listen == "127.0.0.1:0"


def test_an_engine_argument_replaces_that_of_the_file_whole(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("engine_args: {seed: 1, tensor_parallel_size: 2, x: {a: 1, b: null}, y: 2}\n")
    given = ["seed=null", "tensor_parallel_size=", "x={c: null}"]
    config = load_config(str(file), engine_args=given)
    # null stands for vLLM's default, which vLLM takes when it does not get the argument.
    expected = {"x": {"c": None}, "y": 2}
    assert vllm_model(config, config.prefill).engine_args == expected
    assert config.num_ranks(config.prefill) == 1
    shown = parse(yaml.safe_load(dump(config)), "shown")
    assert vllm_model(shown, shown.decode).engine_args == expected


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("prefill: 3", "prefill: is 3"),
        ("http: false", "http: is False"),
        ("coordinator: 0.0.0.0:7070", "coordinator: is '0.0.0.0:7070'"),
        ("scaling: {targets: 200}", "scaling.targets: is 200"),
        ("engine_args: foo", "engine_args: is 'foo'"),
        ("worker: r2", "worker: is 'r2'"),
        ("scaling: {targets: {interactive: []}}", "scaling.targets.interactive: is []"),
    ],
)
def test_options_do_not_replace_a_section_that_is_no_mapping(tmp_path, text, key):
    (file := tmp_path / "baton.yaml").write_text(text)
    for given in ({}, {"num_prefill": 2, "http_listen": "127.0.0.1:1", "engine_args": ["x=1"]}):
        with pytest.raises(ConfigError, match=re.escape(f"{key}; must be a mapping of keys")):
            load_config(str(file), **given)


def test_what_is_no_file_is_not_replaced(tmp_path):
    """As /dev/null, which is one no more once root has had a file take its place."""
    os.mkfifo(pipe := tmp_path / "out")
    options.check_writable(pipe, "--out")
    with pytest.raises(typer.BadParameter, match="is not a regular file"):
        options.check_writable(pipe, "--out", replaced=True)


@pytest.mark.parametrize("writable", ["file", "directory"])
def test_what_is_replaced_needs_room_beside_it(tmp_path, monkeypatch, writable):
    """As the traces of `baton profile`; what is written into needs the file alone."""
    (out := tmp_path / "out").touch()
    path = {"file": out, "directory": tmp_path}[writable]
    monkeypatch.setattr("os.access", lambda one, mode: one == path)
    for replaced, needed in ((False, "file"), (True, "directory")):
        if needed == writable:
            options.check_writable(out, "--out", replaced=replaced)
        else:
            with pytest.raises(typer.BadParameter, match="cannot be written"):
                options.check_writable(out, "--out", replaced=replaced)
