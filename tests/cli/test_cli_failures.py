"""Errors print one line, and the exit code says which kind of error it is."""

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# Timeout in seconds that only bounds a test that hangs.
HANG_S = 120.0


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


@pytest.mark.parametrize("module", ["typer", "grpc"])
def test_an_interrupt_while_the_command_is_being_imported(module):
    program = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == module:
            raise KeyboardInterrupt

module = sys.argv[1]
sys.meta_path.insert(0, Interrupts())
sys.argv = ["baton", "pools"]
runpy.run_module("baton.cli", run_name="__main__")
"""
    command = [sys.executable, "-c", program, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_unknown_host_is_exit_3(baton):
    result = baton("pools", "--address", "no-such-host.invalid:7070")
    assert result.code == 3
    assert "cannot reach the coordinator at no-such-host.invalid:7070: " in one_line(result)


@pytest.mark.parametrize("address", ["here", "http://127.0.0.1:7070", "here:²"])
def test_a_malformed_address_is_exit_2(baton_here, address):
    result = baton_here("pools", "--address", address)
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
        ("up", "--workers", "2", "--decode", "1"),
        ("up", "--engine-arg", "x"),
        ("worker", "--role", "prefill"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_2(baton_here, arguments):
    result = baton_here(*arguments)
    assert result.code == 2
    assert "Usage:" in result.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("generate", "hi", "--max-tokens", "many"),
            "Invalid value for '--max-tokens': is 'many'; must be a valid integer",
        ),
        (
            ("generate", "hi", "--lane", "fast"),
            "Invalid value for '--lane': 'fast' is not one of 'interactive', 'batch'.",
        ),
        (
            ("profile", "w", "--seconds", "0"),
            "Invalid value for '--seconds': is '0'; must be greater than or equal to 1",
        ),
        (
            ("rollout", "start", "--revision", "r", "--share", "5%", "--prefill", "x"),
            "Invalid value for '--prefill': is 'x'; must be a valid integer",
        ),
        (("cache", "drop"), "Invalid value: set --tenant, --session or --all"),
        (
            ("cache", "drop", "--all", "--tenant", "a"),
            "Invalid value for --all: cannot be used with --tenant or --session",
        ),
    ],
)
def test_wrong_usage_names_the_option_the_value_and_what_is_allowed(baton_here, arguments, told):
    result = baton_here(*arguments)
    assert result.code == 2
    assert f"Error: {told}\n" in result.err


def test_invalid_request_values_are_exit_2(baton_here, unused_address):
    result = baton_here("generate", "hi", "--max-tokens", "-5", "--address", unused_address)
    assert result.code == 2
    assert "sampling.max_tokens is -5; must be 0 to 4294967295" in one_line(result)
    result = baton_here("generate", "hi", "--timeout", "1e300", "--address", unused_address)
    assert result.code == 2
    assert "timeout_s is 1e+300; must be a positive number of seconds" in one_line(result)


def test_an_invalid_worker_id_is_exit_2(baton_here):
    worker = ("worker", "--role", "prefill", "--coordinator", "127.0.0.1:1")
    result = baton_here(*worker, "--worker-id", "w\n1")
    assert result.code == 2
    assert r"--worker-id: is 'w\n1'; must be 1 to 128 characters of" in one_line(result)


def test_a_prompt_that_is_not_utf_8_is_exit_2(baton, unused_address):
    result = baton("generate", os.fsdecode(b"h\xffi"), "--address", unused_address)
    assert result.code == 2
    assert "must be valid UTF-8" in one_line(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "r\udcff"),
        ("cancel", "r", "--tenant", "t\udcff"),
        ("rollout", "start", "--revision", "r\udcff", "--share", "5%"),
        ("cache", "drop", "--session", "s\udcff"),
        ("pools", "--address", "host\udcff:7070"),
    ],
)
def test_an_argument_that_is_not_utf_8_is_exit_2(baton, unused_address, arguments):
    result = baton(*arguments, env={"BATON_ADDRESS": unused_address})
    assert result.code == 2
    assert r"\udcff" in one_line(result)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("generate", "hi", "--json", "--timeline"), "--timeline"),
        (("keys", "add", "k", "--name", "n", "--admin", "--lane", "batch"), "--lane"),
        (("keys", "add", "k", "--name", "n", "--admin", "--max-concurrent", "1"), "--max-conc"),
    ],
)
def test_an_option_without_effect_beside_another_is_exit_2(
    baton_here, unused_address, arguments, option, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = baton_here(*arguments, env={"BATON_ADDRESS": unused_address})
    assert result.code == 2
    assert f"Invalid value for {option}" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("scale", "decode", str(2**32)),
        ("targets", "--ttft-ms", str(2**32)),
        ("targets", "--ttft-ms-per-1k-tokens", str(2**32)),
        ("requests", "--limit", str(2**32)),
        ("why", "--limit", str(2**32)),
        ("rollout", "start", "--revision", "r", "--share", "5%", "--prefill", str(2**32)),
        ("keys", "add", "keys.yaml", "--name", "n", "--days", "99999999"),
        ("certs", "certs", "--days", "99999999"),
        ("bench", "--concurrency", "99999999999"),
        ("simulate", "trace", "--host-kv-tokens", "99999999999999999999"),
    ],
)
def test_a_number_beyond_uint32_is_exit_2(baton_here, unused_address, arguments):
    result = baton_here(*arguments, env={"BATON_ADDRESS": unused_address})
    assert result.code == 2
    assert "must be less than or equal to" in result.err


@pytest.mark.parametrize(
    "arguments",
    [("drain", "w", "--timeout", "inf"), ("rollout", "abort", "--drain-timeout", "1e20")],
)
def test_a_timeout_beyond_the_limit_is_exit_2(baton_here, unused_address, arguments):
    result = baton_here(*arguments, "--address", unused_address)
    assert result.code == 2
    assert "timeout is " in one_line(result)
    assert "must be at most 1e+08 s" in result.err


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_an_unwritable_output_file_fails_before_the_work(baton, tmp_path, option):
    trace = tmp_path / "trace.json"
    trace.write_text('[{"start_time": 0, "prompt_len": 9, "output_len": 2}]')
    missing = baton("simulate", str(trace), option, str(tmp_path / "none" / "out"))
    assert (missing.code, missing.out) == (2, "")
    assert f"there is no directory {tmp_path / 'none'}" in " ".join(missing.err.split())
    directory = baton("simulate", str(trace), option, str(tmp_path))
    assert (directory.code, directory.out) == (2, "")
    assert "is a directory" in directory.err


def test_standard_input_that_is_not_text_is_exit_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli", "generate", "-"],
        input=b"caf\xe9",
        capture_output=True,
        timeout=HANG_S,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 2
    assert b"standard input must be utf-8 text; it has a byte 0xe9" in done.stderr


def test_a_terminal_that_lacks_a_character(baton, tmp_path):
    file = tmp_path / "caf\u00e9.yaml"
    file.write_text("engine: simulated\n")
    checked = baton("config", "check", str(file), env={"PYTHONIOENCODING": "ascii:strict"})
    assert (checked.code, checked.out) == (0, f"{tmp_path}/caf?.yaml: ok\n")


def test_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "baton.cli", "config", "show"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S
        )
    assert done.returncode == 1
    assert done.stderr == "baton: cannot write: No space left on device\n"


INTERRUPTED_CHECK = """
import atexit, sys
from baton.cli.main import main
from baton.worker import model_check

def interrupt(*_):
    raise KeyboardInterrupt

atexit.register(print, "cleanup")
model_check.check = interrupt
sys.argv = ["baton", "check", "glossary"]
main()
"""


def test_an_interrupted_check_skips_its_cleanup():
    """A library of vLLM prints a page about its objects during the cleanup."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_CHECK], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


TERMINATED_CHECK = """
import os, signal, sys
from baton.cli.main import main
from baton.worker import model_check

def terminate(config, directory):
    print(os.listdir(directory.parent), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

model_check._configured = terminate
sys.argv = ["baton", "check", "glossary"]
main()
"""


def test_a_check_that_is_told_to_stop_leaves_no_directory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED_CHECK],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 130
    assert "baton-check-" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_closed_standard_input():
    closed = [
        sys.executable,
        "-c",
        "import os, sys\n"
        "os.close(0)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'baton.cli', 'generate', '-'])",
    ]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert "standard input, which is closed" in done.stderr


def test_top_with_closed_standard_input_on_a_terminal(unused_address):
    terminal, ours = pty.openpty()
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import os, sys\n"
                "os.close(0)\n"
                "os.execv(sys.executable, [sys.executable, '-m', 'baton.cli', *sys.argv[1:]])",
                *("top", "--address", unused_address),
            ],
            stdout=ours,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    finally:
        os.close(ours)
        os.close(terminal)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("baton: cannot reach the coordinator")


def test_closed_standard_output():
    closed = [
        sys.executable,
        "-c",
        "import os, sys\n"
        "os.close(1)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'baton.cli', 'config', 'keys'])",
    ]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_coordinator_serves_with_standard_input_closed():
    listen = ["coordinator", "--engine", "simulated", "--listen", "127.0.0.1:0"]
    closed = [
        sys.executable,
        "-c",
        "import os, sys\n"
        "os.close(0)\n"
        f"os.execv(sys.executable, [sys.executable, '-m', 'baton.cli', *{listen!r}])",
    ]
    process = subprocess.Popen(closed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("ready ")
        process.terminate()
        _, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.communicate()


def test_a_bad_key_stops_up_before_anything_starts(baton):
    result = baton("up", "--config", "-", stdin="engin: simulated\n")
    assert result.code == 2
    assert "did you mean 'engine'?" in one_line(result)


@pytest.mark.parametrize("command", ["--help", "gateway --help", "config show", "--version"])
def test_light_commands_do_not_import_grpc(baton, command):
    """The gateway sets a variable that gRPC reads when it is imported."""
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_that_finds_no_coordinator_is_exit_3(baton, unused_address):
    config = "engine: simulated\nworker: {attach_timeout_s: 0.2}\n"
    arguments = ("--role", "decode", "--worker-id", "w", "--coordinator", unused_address)
    result = baton("worker", *arguments, "--config", "-", stdin=config)
    assert result.code == 3
    assert f"\nbaton worker w: no coordinator at {unused_address} within " in f"\n{result.err}"


def test_a_worker_terminated_during_its_start_leaves_no_shared_memory(unused_address, tmp_path):
    with starting_worker(unused_address, tmp_path) as (worker, segment):
        worker.terminate()
        assert worker.wait(HANG_S) == 0
        assert not segment.exists()


def test_a_worker_killed_during_its_start_leaves_no_shared_memory(unused_address, tmp_path):
    with starting_worker(unused_address, tmp_path) as (worker, segment):
        (service,) = psutil.Process(worker.pid).children()
    deadline = time.monotonic() + HANG_S
    while segment.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = segment.exists()
    with contextlib.suppress(psutil.NoSuchProcess):
        service.kill()
    assert not left


@contextlib.contextmanager
def starting_worker(address, directory):
    """A worker whose transfer service has its segment but does not serve yet; killed at the end."""
    arguments = ["worker", "--role", "decode", "--coordinator", address]
    worker = subprocess.Popen(
        [sys.executable, "-m", "baton.cli", *arguments, "--engine", "simulated"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    try:
        yield worker, shared_memory_below(worker.pid)
    finally:
        worker.kill()
        worker.wait()


def shared_memory_below(pid):
    """Returns the shared memory segment of the transfer service as soon as it exists."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error, OSError):
                for link in Path(f"/proc/{child.pid}/fd").iterdir():
                    target = os.readlink(link)
                    if target.startswith("/dev/shm/baton-kv-"):
                        return Path(target)
        time.sleep(0.002)
    raise AssertionError("no shared memory")


def test_a_worker_that_dies_while_loading_is_exit_1_and_the_last_line(baton):
    """The transfer service cannot listen on an address that no interface of this host has."""
    config = "engine: simulated\nkv_transfer: {listen: '192.0.2.1:0'}\n"
    config += "security: {allow_insecure: true}\n"
    result = baton("up", "--listen", "127.0.0.1:0", "--no-http", "--config", "-", stdin=config)
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert last.startswith("baton: worker "), last
    assert "-0 exited with code 1: transfer service: " in last
    assert "192.0.2.1:0" in last
