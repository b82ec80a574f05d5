"""What a person sees when something is wrong: one line, and an exit code that says which kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def one_line(result):
    assert result.err.startswith("baton: "), result.err
    assert result.err.count("\n") == 1, result.err
    return result.err


@pytest.mark.parametrize("command", [("generate", "hi"), ("pools",), ("workers",), ("requests",)])
def test_an_unreachable_coordinator_is_exit_3(baton, unused_address, command):
    result = baton(*command, "--address", unused_address)
    assert result.code == 3
    assert f"cannot reach the coordinator at {unused_address}" in one_line(result)
    assert result.out == ""


def test_the_address_comes_from_the_environment_too(baton, unused_address):
    result = baton("pools", env={"BATON_ADDRESS": unused_address})
    assert result.code == 3
    assert unused_address in result.err


def test_an_address_that_is_none(baton):
    result = baton("pools", "--address", "here")
    assert result.code == 2
    assert "must be host:port" in one_line(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "hi", "--tokens", "1"),
        ("generate", "--tokens", "1,x"),
        ("generate", "hi", "--lane", "fast"),
        ("generate", "hi", "--max-tokens", "many"),
        ("up", "--prefill", "-1"),
        ("up", "--engine-arg", "x"),
        ("worker", "--role", "prefill"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_2(baton, arguments):
    result = baton(*arguments)
    assert result.code == 2
    assert "Usage:" in result.err


def test_a_value_that_no_request_can_hold(baton, unused_address):
    result = baton("generate", "hi", "--max-tokens", "-5", "--address", unused_address)
    assert result.code == 2
    assert "sampling.max_tokens is -5" in one_line(result)


def test_a_prompt_that_is_no_text(baton, unused_address):
    result = baton("generate", os.fsdecode(b"h\xffi"), "--address", unused_address)
    assert result.code == 2
    assert "must be valid UTF-8" in one_line(result)


def test_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "baton.cli", "config", "show"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "baton: cannot write: No space left on device\n"


def test_closed_standard_input():
    closed = [
        sys.executable,
        "-c",
        "import os, sys\n"
        "os.close(0)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'baton.cli', 'generate', '-'])",
    ]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "standard input, which is closed" in done.stderr


def test_a_bad_key_stops_up_before_anything_starts(baton):
    result = baton("up", "--config", "-", stdin="engin: simulated\n")
    assert result.code == 2
    assert "did you mean 'engine'?" in one_line(result)


@pytest.mark.parametrize("command", ["--help", "generate --help", "config show", "--version"])
def test_light_commands_do_not_import_grpc(baton, command):
    code = (
        "import sys\n"
        "from baton.cli.main import main\n"
        f"sys.argv = ['baton', *{command.split()!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'grpc', 'torch', 'vllm', 'transformers', 'rich.console'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_worker_that_dies_while_loading_is_exit_1_and_the_last_line(baton):
    """An address of no interface here: the worker's transfer service cannot listen."""
    config = "engine: simulated\nkv_transfer: {listen: '192.0.2.1:0'}\n"
    config += "security: {allow_insecure: true}\n"
    result = baton("up", "--listen", "127.0.0.1:0", "--no-http", "--config", "-", stdin=config)
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert last.startswith("baton: worker "), last
    assert "-0 exited with code 1: transfer service: " in last
    assert "192.0.2.1:0" in last
