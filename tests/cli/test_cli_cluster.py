"""The command line against a whole simulated cell, used as a person would use it."""

import contextlib
import gzip
import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

# Timeouts in seconds that only bound a test that hangs.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
UP = ("up", "--engine", "simulated", "--listen", "127.0.0.1:0", "--http-port", "0")
# Small staging memory, because a worker reserves 512 MB by default.
CONFIG = "kv_transfer: {send_bytes: 8388608, receive_bytes: 8388608}\n"


class Process:
    """A command in its own process group, whose output is read line by line."""

    def __init__(self, *arguments, home, address="", stderr=None):
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        env |= {"HOME": str(home)} | ({"BATON_ADDRESS": address} if address else {})
        self._log = (Path(home) / f"{arguments[0]}.log").open("w+")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log if stderr is None else stderr,
            text=True,
            env=env,
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def line(self, pattern, timeout_s=START_TIMEOUT_S):
        """Returns the match of the next line of standard output that matches."""
        while (line := self._lines.get(timeout=timeout_s)) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended with {self.popen.wait()}: {self.err()[-3000:]}")

    def err(self):
        self._log.seek(0)
        return self._log.read()

    def stop(self, number=signal.SIGINT):
        """Ends the command; returns its exit code and the child processes that still run."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.send_signal(number)
        try:
            code = self.popen.wait(STOP_TIMEOUT_S)
            _, left = psutil.wait_procs(children, STOP_TIMEOUT_S)
        finally:
            self.close()
            for child in children:
                if child.is_running():
                    child.kill()
        return code, left

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join()
        self._log.close()

    def _read(self):
        with self.popen.stdout:
            for line in self.popen.stdout:
                self._lines.put(line)
        self._lines.put(None)


def start_up(*arguments, home, config=CONFIG, **options):
    path = home / "baton.yaml"
    path.write_text(config)
    return Process(*UP, "--config", str(path), *arguments, home=home, **options)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a running `baton up`; none of its processes may remain afterwards."""
    home = tmp_path_factory.mktemp("up")
    # The long timeout keeps a stopped worker attached while slow commands inspect it.
    up = start_up(
        home=home, config=f"{CONFIG}elastic: false\ncoordinator: {{worker_timeout_s: 600}}\n"
    )
    try:
        yield up.line(r"^ready grpc=(127\.0\.0\.1:\d+) http=http://127\.0\.0\.1:\d+$").group(1)
        assert up.stop() == (0, []), up.err()[-3000:]
    finally:
        up.close()


@pytest.fixture
def ask(baton_here, cluster):
    """Runs a command in this process, which saves starting one."""
    return lambda *arguments: baton_here(*arguments, env={"BATON_ADDRESS": cluster})


@pytest.fixture
def ask_apart(baton, cluster):
    """Runs a command in its own process, because it handles signals."""
    return lambda *arguments, **keywords: baton(
        *arguments, env={"BATON_ADDRESS": cluster}, **keywords
    )


def test_generate_prints_text_and_a_last_newline(ask_apart):
    result = ask_apart("generate", "hello", "--max-tokens", "8", "--timeout", "120")
    assert result.code == 0, result.err
    assert result.out.strip()
    assert result.out.endswith("\n")
    again = ask_apart("generate", "-", "--max-tokens", "8", stdin="hello")
    assert again.out == result.out


def test_generate_json_is_one_event_per_line(ask):
    result = ask("generate", "--tokens", "5,6,7", "--max-tokens", "4", "--json")
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in (events[0], events[-1])] == ["accepted", "finished"]
    assert events[0]["prompt_tokens"] == 3
    assert sum(len(event["token_ids"]) for event in events[1:-1]) == 4
    assert (events[-1]["reason"], events[-1]["usage"]["completion_tokens"]) == ("length", 4)


def test_an_answer_without_max_tokens_ends_by_itself(ask):
    answers = [
        [json.loads(line) for line in ask("generate", "hello", "--json").out.splitlines()]
        for _ in range(2)
    ]
    (tokens, reason), again = (
        ([token for event in one[1:-1] for token in event["token_ids"]], one[-1]["reason"])
        for one in answers
    )
    assert reason == "stop"
    assert 100 <= len(tokens) <= 300
    assert again == (tokens, reason)


def test_the_timeline_covers_the_whole_request(ask):
    result = ask("generate", "hello", "--max-tokens", "16", "--timeline", "--chat")
    assert result.code == 0, result.err
    stages = re.findall(r"^(\w[\w ]*?) +([\d.]+) ms +([\d.]+) ms +", result.out, re.MULTILINE)
    assert {"prefill", "decode"} <= {stage for stage, _, _ in stages}
    total_ms = float(re.search(r"total ([\d.]+) ms", result.out).group(1))
    assert sum(float(time) for _, _, time in stages) == pytest.approx(total_ms, abs=1.0)


def test_pools_workers_and_requests(ask):
    pools = json.loads(ask("pools", "--json").out)
    assert {pool["role"]: pool["num_serving"] for pool in pools["pools"]} == {
        "prefill": 1,
        "decode": 1,
    }
    workers = json.loads(ask("workers", "--json").out)
    assert sorted(worker["role"] for worker in workers) == ["decode", "prefill"]
    assert {worker["state"] for worker in workers} == {"serving"}
    for command, heading in (("pools", "POOL"), ("workers", "WORKER")):
        result = ask(command)
        assert result.code == 0
        assert result.out.startswith(heading)
    ask("generate", "hello", "--max-tokens", "2", "--request-id", "seen", "--tenant", "acme")
    assert ask("requests").out == "no requests running\n"
    ended = {request["request_id"]: request for request in json.loads(listed(ask))}
    assert ended["seen"]["state"] == "finished"
    assert ended["seen"]["completion_tokens"] == 2
    assert ended["seen"]["tenant"] == "acme"


def test_impossible_sizes_are_refused_and_targets_are_shown(ask):
    result = ask("scale", "decode", "99")
    assert result.code == 1
    assert "workers is 99; scaling.decode allows 1 to 16" in result.err
    result = ask("flip", "unknown-id", "decode")
    assert result.code == 2
    assert "no worker 'unknown-id'; attached: decode-0, prefill-0" in result.err
    result = ask("targets", "--ttft-ms", "400", "--percentile", "90")
    shown = r"^interactive +400 ms +50 ms +90 +60 ms  long gaps are for elastic cells"
    assert re.search(shown, result.out, re.MULTILINE)
    result = ask("targets", "--ttft-ms-per-1k-tokens", "40")
    shown = r"^interactive +400 ms \+ 40 ms/1k +50 ms +90 "
    assert re.search(shown, result.out, re.MULTILINE)
    result = ask("targets", "--lane", "batch", "--ttft-ms-per-1k-tokens", "40")
    assert result.code == 2
    assert "targets[0].ttft_ms_per_1k_tokens is 40; must be 0 for a lane without" in result.err
    ask("targets", "--ttft-ms-per-1k-tokens", "0")
    assert "autoscaling is off: 1 wanted" in ask("why", "prefill").out


def test_watching_is_one_line_of_json_per_change_until_interrupted(cluster, ask, tmp_path):
    watching = Process("pools", "--watch", "--json", home=tmp_path, address=cluster)
    try:
        first = json.loads(watching.line(r"^.*$").group(0))
        assert {pool["desired"] for pool in first["pools"]} == {1}
        ask("targets", "--itl-ms", "60")
        while json.loads(watching.line(r"^.*$").group(0))["targets"][0]["itl_ms"] != 60:
            pass
        assert watching.stop() == (130, [])
    finally:
        watching.close()


def test_workers_shows_the_transports_between_workers(ask):
    ask("generate", "hello", "--max-tokens", "2")

    def peers():
        workers = json.loads(ask("workers", "--json").out)
        return {worker["role"]: worker["peers"] for worker in workers}

    # The worker's next load report contains the peer.
    found = eventually(lambda: peers()["prefill"] and peers())
    assert found["decode"] == []
    (peer,) = found["prefill"]
    assert (peer["worker_id"], peer["transport"], peer["reason"]) == ("decode-0", "shm", "")
    row = next(line for line in ask("workers").out.splitlines() if peer["worker_id"] in line[10:])
    assert row.split() == ["prefill-0", "decode-0", "shm", "-"]


def test_a_stopped_worker_is_shown_as_silent(ask):
    pids = {one["worker_id"]: one["pid"] for one in json.loads(ask("workers", "--json").out)}
    os.kill(pids["decode-0"], signal.SIGSTOP)
    try:
        shown = eventually(lambda: "silent" in (out := ask("workers").out) and out)
        assert re.search(r"^decode-0 +decode +silent ", shown, re.MULTILINE)
        assert "decode-0 is silent; its requests wait for it" in shown
        assert re.search(r"^decode-0 +decode +silent ", ask("top", "--once").out, re.MULTILINE)
    finally:
        os.kill(pids["decode-0"], signal.SIGCONT)
    eventually(lambda: re.search(r"^decode-0 +decode +serving ", ask("workers").out, re.MULTILINE))


def test_workers_shows_measured_step_times(ask):
    for _ in range(3):
        ask("generate", "hello", "--max-tokens", "8")

    def measured():
        prefill, decode = (one["latency"] for one in json.loads(ask("workers", "--json").out))
        # Both workers are of one kind, so they share the measurements.
        assert prefill == decode
        return prefill["num_samples"] and prefill

    latency = eventually(measured)
    assert latency["num_cold"] >= 3
    assert latency["step_base_ms"] >= 0
    assert latency["error_p90"] >= latency["error_p50"]
    assert latency["mixed_base_ms"] >= 0
    assert latency["decode_errors"]["p90"] >= latency["decode_errors"]["p50"]
    assert re.search(r"^prefill-0 .* [\d.e+]+/[\d.e+]+ ms ±\d+% ", ask("workers").out, re.MULTILINE)


def mooncake(path, *requests):
    """Writes a Mooncake trace of (time in ms, prompt tokens, hash IDs)."""
    rows = (
        {"timestamp": at, "input_length": length, "output_length": 4, "hash_ids": ids}
        for at, length, ids in requests
    )
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_bench_and_replay_measure_and_their_results_compare(ask, ask_apart, tmp_path):
    out, goals = str(tmp_path / "bench.json"), ("--ttft-ms", "600000", "--itl-ms", "600000")
    load = ("--rate", "50", "--requests", "20", "--burstiness", "0.5", "--batch-share", "0.4")
    lengths = ("--prompt-tokens", "20-200", "--output-tokens", "8")
    result = ask_apart("bench", *load, *lengths, *goals, "--tenant", "load", "--out", out)
    assert result.code == 0, result.err
    assert re.search(r"^requests +20, 0 failed$", result.out, re.MULTILINE)
    found = json.loads(Path(out).read_text())
    assert (found["num_ended"], found["attained"], found["num_failed"]) == (20, 1, 0)
    assert sum(one["num_requests"] for one in found["lanes"].values()) == 20
    assert set(found["lanes"]) == {"interactive", "batch"}
    assert 0 < found["ttft_ms"]["50"] < found["e2e_ms"]["50"]
    assert found["itl_ms"]["50"] > 1
    assert sum(one["tenant"] == "load" for one in json.loads(listed(ask))) == 20

    # Prompts with the same hash ids share their KV blocks, those without share none.
    alike = mooncake(tmp_path / "a", *((n * 1000, 600 + n, [0, n + 1]) for n in range(5)))

    def cached_share():
        result = ask_apart("replay", alike, "--speed", "10", "--json")
        assert result.code == 0, result.err
        replayed = json.loads(result.out)
        assert (replayed["kind"], replayed["num_ended"]) == ("replay", 5)
        return replayed["cached_share"]

    # On a busy machine a request may come before the previous prompt is in the cache.
    eventually(lambda: 0.5 < cached_share() < 0.75)
    different = mooncake(tmp_path / "d", *((n * 100, 600, [n, n + 9]) for n in range(3)))
    other = tmp_path / "replay.json"
    assert ask_apart("replay", different, "--out", str(other)).code == 0
    assert json.loads(other.read_text())["cached_share"] == 0

    compared = ask_apart("bench", "compare", out, str(other), "--json")
    assert compared.code == 0, compared.err
    rows = {row["figure"]: row for row in json.loads(compared.out)}
    assert (rows["requests"]["a"], rows["requests"]["b"]) == (20, 3)
    assert rows["TTFT p50, ms"]["b_over_a"] > 0


def test_a_trace_that_ends_within_the_warm_up_is_told_apart_from_failures(ask_apart, tmp_path):
    result = ask_apart("replay", mooncake(tmp_path / "trace", (0, 10, [])), "--warm-up", "60")
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "baton: no request was due after the first 60 s (--warm-up), so there are no figures",
    )


def test_a_full_disk_does_not_lose_the_printed_figures(ask_apart):
    load = ("--rate", "50", "--requests", "3", "--prompt-tokens", "20", "--output-tokens", "2")
    result = ask_apart("bench", *load, "--out", "/dev/full")
    # On a busy machine the first line says that the load generator was late.
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "baton: cannot write: No space left on device",
    )
    assert re.search(r"^requests +3, 0 failed$", result.out, re.MULTILINE)


def test_ctrl_c_prints_what_bench_has_measured(ask, cluster, tmp_path):
    arguments = ("bench", "--concurrency", "2", "--prompt-tokens", "30", "--output-tokens", "4")
    process = Process(*arguments, "--tenant", "interrupted", home=tmp_path, address=cluster)
    try:
        eventually(lambda: '"interrupted"' in listed(ask))
        assert process.stop() == (130, []), process.err()
        assert int(process.line(r"^requests +(\d+), 0 failed").group(1)) > 0
        assert process.line(r"^lasted .* \(interrupted\)")
    finally:
        process.close()
    eventually(lambda: ask("requests").out == "no requests running\n")


@pytest.mark.parametrize("command", [("bench", "--rate", "1"), ("replay", "TRACE")])
def test_load_without_a_coordinator_is_exit_3(baton, unused_address, tmp_path, command):
    trace = mooncake(tmp_path / "trace", (0, 10, []))
    command = [trace if one == "TRACE" else one for one in command]
    result = baton(*command, "--address", unused_address)
    assert result.code == 3
    assert result.err.startswith(f"baton: cannot reach the coordinator at {unused_address}")


def test_one_request_and_the_whole_cell_are_explained(ask):
    ask("generate", "hello", "--max-tokens", "16", "--request-id", "explained")
    found = json.loads(ask("explain", "explained", "--json").out)
    assert sum(found["stages_ms"].values()) == pytest.approx(found["total_ms"], rel=0.02)
    assert "\ndecode " in ask("explain", "explained").out
    missing = ask("explain", "unknown-id")
    assert missing.code == 2
    assert "unknown-id" in missing.err
    told = json.loads(ask("doctor", "--json").out)
    assert ask("doctor").code == (0 if told["healthy"] else 1)
    drawn = ask("top", "--once").out
    assert "prefill-0" in drawn
    assert "interactive" in drawn


def test_top_draws_once_on_a_terminal_without_cursor_control(cluster):
    terminal, ours = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli", "top", "--address", cluster],
            stdin=ours,
            stdout=ours,
            stderr=subprocess.PIPE,
            env=os.environ | {"TERM": "dumb"},
            timeout=START_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert b"prefill-0" in os.read(terminal, 2**16)
    finally:
        os.close(ours)
        os.close(terminal)


def test_a_profile_is_a_file_and_an_interrupted_profile_leaves_no_file(ask, cluster, tmp_path):
    out = tmp_path / "trace.json.gz"
    recording = Process(
        "profile", "decode-0", "--seconds", "60", "--out", str(out), home=tmp_path, address=cluster
    )
    try:
        eventually(lambda: recording.err() == "recording decode-0 for 60 s\n")
        busy = ask("profile", "decode-0", "--out", str(tmp_path / "other"))
        assert (busy.code, "profiled already" in busy.err) == (1, True)
        assert recording.stop() == (130, [])
    finally:
        recording.close()
    # The interrupt reaches the worker, which can record the next profile at once.
    result = ask("profile", "decode-0", "--seconds", "1", "--out", str(out), "--json")
    assert result.code == 0, result.err
    (found,) = json.loads(result.out)
    assert (found["rank"], found["path"]) == (0, str(out))
    assert found["bytes"] == out.stat().st_size
    assert json.loads(gzip.decompress(out.read_bytes()))["engine"] == "simulated"
    assert {path.name for path in tmp_path.iterdir()} == {"profile.log", out.name}
    assert ask("profile", "unknown-id", "--out", str(out)).code == 2
    assert ask("profile", "decode-0", "--seconds", "61").code == 2
    assert ask("profile", "decode-0", "--out", str(tmp_path)).code == 2


def eventually(question, timeout_s=START_TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return answer


def listed(ask):
    return ask("requests", "--all", "--json").out


def test_a_wrong_request_names_the_field_and_is_exit_2(ask):
    result = ask("generate", "hello", "--temperature", "-1")
    assert result.code == 2
    assert result.err.startswith("baton: ")
    assert "sampling.temperature" in result.err


def test_a_model_that_is_not_served_is_exit_2(ask):
    result = ask("generate", "hello", "--model", "other")
    assert result.code == 2
    assert result.err == "baton: model is 'other'; this coordinator serves 'glossary'\n"


def test_a_deadline_is_exit_1(ask):
    result = ask("generate", "hello", "--max-tokens", "4000", "--timeout", "0.3", "--ignore-eos")
    assert result.code == 1
    assert result.err.startswith("baton: ")
    assert "0.3 s" in result.err or "deadline" in result.err.lower()


def test_ctrl_c_cancels_the_request_and_is_exit_130(ask, cluster, tmp_path):
    arguments = ("generate", "hello", "--max-tokens", "4000", "--ignore-eos", "--json")
    process = Process(*arguments, "--request-id", "interrupted", home=tmp_path, address=cluster)
    try:
        process.line('"tokens"')
        assert process.stop() == (130, [])
    finally:
        process.close()
    ended = {request["request_id"]: request for request in json.loads(listed(ask))}
    assert ended["interrupted"]["state"] == "cancelled"


def test_an_operator_cancels_a_request(ask, cluster, tmp_path):
    arguments = ("generate", "hello", "--max-tokens", "8000", "--ignore-eos", "--json")
    process = Process(*arguments, "--request-id", "unwanted", home=tmp_path, address=cluster)
    try:
        process.line('"tokens"')
        assert ask("cancel", "unwanted").out == "unwanted is cancelled\n"
        process.line('"reason": "cancelled"')
        assert process.popen.wait(STOP_TIMEOUT_S) == 1
        assert process.err() == "baton: another client or an operator cancelled the request\n"
    finally:
        process.close()
    again = ask("cancel", "unwanted")
    assert (again.code, again.out) == (2, "")
    assert "'unwanted' is not running" in again.err


def test_a_port_in_use_is_one_line(baton, taken_address):
    result = baton("up", "--engine", "simulated", "--listen", taken_address, "--no-http")
    assert result.code == 2
    lines = [line for line in result.err.splitlines() if line.startswith("baton: ")]
    assert len(lines) == 1
    assert f"cannot listen on {taken_address}" in lines[0]
    assert result.out == ""


@pytest.mark.parametrize(
    "command", [("coordinator",), ("worker", "--role", "decode", "--coordinator", "127.0.0.1:1")]
)
def test_a_metrics_port_in_use_is_named(baton, taken_address, command):
    key = f"{command[0]}.metrics_listen"
    config = {"engine": "simulated", "coordinator": {"listen": "127.0.0.1:0"}}
    config.setdefault(command[0], {})["metrics_listen"] = taken_address
    result = baton(*command, "--config", "-", stdin=json.dumps(config))
    assert result.code == 2
    assert f"{key}: cannot listen on {taken_address}: Address already in use" in result.err


def test_a_missing_model_is_one_line(baton, tmp_path):
    result = baton(*UP, "--model", str(tmp_path / "no-such-model"))
    assert result.code in (1, 2)
    lines = [line for line in result.err.splitlines() if line.startswith("baton: ")]
    assert len(lines) == 1
    assert "no-such-model" in lines[0]
    assert result.out == ""


def test_metrics_are_found_and_a_killed_worker_leaves_nothing(tmp_path, short_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_path))
    up = start_up("--no-http", "--prefill", "0", home=tmp_path)
    try:
        up.line(r"^ready grpc=")
        # The log shows the metrics port that the system picked.
        told = re.search(r" coordinator .*\bmetrics=(127\.0\.0\.1:\d+)", up.err())
        with urllib.request.urlopen(
            f"http://{told.group(1)}/metrics", timeout=STOP_TIMEOUT_S
        ) as answer:
            assert b"gen_ai_server_time_to_first_token" in answer.read()
        (worker,) = psutil.Process(up.popen.pid).children()
        (service,) = worker.children()
        (segment,) = {
            Path(file.path) for file in service.open_files() if file.path.startswith("/dev/shm/")
        }
        (directory,) = short_path.glob("baton-*")
        worker.kill()
        service.wait(STOP_TIMEOUT_S)
        assert not segment.exists()
        # The coordinator starts another worker, which has another directory.
        assert not directory.exists()
        assert up.stop() == (0, []), up.err()[-3000:]
    finally:
        up.close()


def test_up_survives_a_closed_log_pipe(baton_here, tmp_path):
    """This happens to `baton up 2>&1 | tee log` when tee has ended."""
    read_end, write_end = os.pipe()
    up = start_up("--no-http", home=tmp_path, stderr=write_end)
    os.close(write_end)
    try:
        address = up.line(r"^ready grpc=(\S+)").group(1)
        os.close(read_end)

        def workers():
            found = json.loads(baton_here("workers", "--json", "--address", address).out)
            return {one["worker_id"]: one["pid"] for one in found if one["role"] == "decode"}

        # Log lines are lost from now on, but the coordinator still replaces dead workers.
        for name in ("decode-0", "decode-1"):
            os.kill(eventually(lambda name=name: workers().get(name)), signal.SIGKILL)
        # A killed worker is listed until the coordinator has seen its end.
        assert eventually(lambda: list(workers()) == ["decode-2"])
        assert up.stop() == (0, [])
    finally:
        up.close()


def test_a_second_ctrl_c_ends_all_processes_at_once(tmp_path):
    up = start_up(home=tmp_path)
    try:
        address = up.line(r"^ready grpc=(\S+)").group(1)
        endless = ("generate", "hello", "--max-tokens", "8000", "--ignore-eos", "--json")
        asking = Process(*endless, home=tmp_path, address=address)
        try:
            asking.line('"tokens"')
            gateway = next(
                child
                for child in psutil.Process(up.popen.pid).children()
                if "gateway" in child.cmdline()
            )
            up.popen.send_signal(signal.SIGINT)
            # The cell drains: the gateway has no request and ends, the workers still have one.
            gateway.wait(STOP_TIMEOUT_S)
            told = "draining: waiting at most 30 s for 1 request; a second Ctrl-C"
            eventually(lambda: told in up.err())
            assert up.stop() == (-signal.SIGINT, [])
        finally:
            asking.close()
    finally:
        up.close()


def test_a_single_elastic_worker_serves_and_sigterm_stops_up_too(tmp_path, baton_here):
    up = Process(*UP, "--workers", "1", home=tmp_path)
    try:
        here = {"BATON_ADDRESS": up.line(r"^ready grpc=(\S+)").group(1)}
        assert baton_here("generate", "hello", "--max-tokens", "8", env=here).out.strip()
        (worker,) = json.loads(baton_here("workers", "--json", env=here).out)
        assert worker["worker_id"] == "decode-0"
        assert up.stop(signal.SIGTERM) == (0, [])
    finally:
        up.close()


def test_up_serves_and_ends_while_nothing_reads_its_log(tmp_path):
    """As `baton up 2>&1 | less` on its first page, or a terminal after Ctrl-S."""
    reads, writes = os.pipe()
    try:
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writes, b"x")
        os.set_blocking(writes, True)
        up = start_up(home=tmp_path, stderr=writes)
        try:
            up.line(r"^ready ")
            assert up.stop() == (0, [])
        finally:
            up.close()
    finally:
        os.close(reads)
        os.close(writes)
