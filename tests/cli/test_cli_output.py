"""Messages, tables and latency budgets as text and as JSON."""

import io
import json
import re

import pytest
from google.protobuf import duration_pb2

from baton.cli import exit_codes, generate, output, pool_sizes, rollout, timeline
from baton.client import LatencyBudget, StageTime, Tokens
from baton.client.errors import make
from baton.runtime.config_error import ConfigError
from baton.v1 import admin_pb2, cluster_pb2, common_pb2

SPARE = ("ENGINE", "ROLE")


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of a given width."""

    def set_width(width):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))

    return set_width


def test_messages_as_json():
    worker = admin_pb2.WorkerInfo(
        worker_id="w",
        incarnation=0xABC,
        role=common_pb2.ROLE_DECODE,
        state=cluster_pb2.WORKER_STATE_SERVING,
        silent_for=duration_pb2.Duration(nanos=500_000_000),
        startup_ms={"engine": 2000},
    )
    worker.attached_at.FromSeconds(0)
    values = output.plain(worker)
    assert (values["role"], values["state"]) == ("decode", "serving")
    assert values["incarnation"] == "0000000000000abc"
    assert values["silent_for_s"] == 0.5
    assert values["attached_at"] == "1970-01-01T00:00:00Z"
    assert values["startup_ms"] == {"engine": 2000}
    assert (values["model"], values["num_requests"]) == (None, 0)
    json.dumps(values)
    pools = output.plain(admin_pb2.ListPoolsResponse(pools=[admin_pb2.PoolInfo(num_serving=2)]))
    assert pools["pools"][0]["num_serving"] == 2
    # An unset size is null, which differs from a size of 0.
    assert pools["pools"][0]["size_by_hand"] is None
    by_hand = output.plain(admin_pb2.PoolInfo(size_by_hand=0))
    assert by_hand["size_by_hand"] == 0
    assert pools["lanes"] == []


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_survives_a_terminal_that_lacks_characters(monkeypatch, encoding):
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    monkeypatch.setattr("sys.stdout", written)
    output.print_json({"\u00e9": "\u4e2d"})
    written.seek(0)
    assert json.load(written) == {"\u00e9": "\u4e2d"}
    written.seek(0)
    written.truncate()
    generate._print_event(Tokens((7,), "\u4e2d", 0))
    written.seek(0)
    assert json.load(written)["text"] == "\u4e2d"


def test_tables_are_plain_off_a_terminal(capsys):
    output.print_table(("NAME", ">COUNT"), [("a", "1"), ("long", "12345")], "none")
    assert capsys.readouterr().out == "NAME  COUNT\na         1\nlong  12345\n"
    output.print_table(("NAME",), [], "none")
    assert capsys.readouterr().out == "none\n"


@pytest.mark.parametrize("width", [30, 45, 60, 80, 200])
def test_a_narrow_terminal_cuts_no_name(terminal, capsys, width):
    terminal(width)
    columns = ("WORKER", "ROLE", ">KV USED", "ENGINE", "WHY")
    why = "a long reason that may be wrapped wherever there is no room for the whole of it"
    output.print_table(
        columns, [("decode-long-0", "decode", "97 %", "vllm 0.32.0", why)], "", SPARE
    )
    shown = _uncoloured(capsys.readouterr().out)
    assert "decode-long-0" in shown
    assert "97 %" in shown
    assert "…" not in shown
    assert ("vllm 0.32.0" in shown) is (width >= 80)
    assert ("ENGINE (--json prints all)" in shown) is (width < 80)
    if width >= 60:
        assert max(map(len, shown.splitlines())) <= width


def test_the_timeline_adds_up(capsys):
    budget = LatencyBudget(
        (
            StageTime("queue", 0, 10, ""),
            StageTime("prefill", 10, 40, "p0"),
            StageTime("decode", 50, 50, "d0"),
        ),
        ttft_ms=50,
        total_ms=100,
        itl_p50_ms=5,
        itl_max_ms=9,
    )
    timeline.print_timeline(budget)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["queue", "prefill", "handoff", "decode"]
    assert "40 %" in lines[2]
    assert lines[2].endswith("p0")
    assert lines[3].split()[1:5] == ["50.0", "ms", "0.0", "ms"]
    assert lines[5].startswith("first token 50.0 ms, total 100.0 ms")
    for start_ms, duration_ms in ((0, 100), (99, 1), (100, 0), (50, 80), (0, 0)):
        assert len(timeline.bar(start_ms, duration_ms, 100, 32)) == 32


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("worker", ["d0", "decode-0", "a-worker-with-a-longer-name"])
def test_a_timeline_fits_the_terminal(terminal, capsys, width, worker):
    terminal(width)
    stages = (
        StageTime("queue", 0, 2340.5, ""),
        StageTime("prefill_queue", 2340.5, 46.4, worker),
        StageTime("prefill", 2386.9, 1000, worker),
        StageTime("decode", 3386.9, 20_000, worker),
    )
    budget = LatencyBudget(
        stages, ttft_ms=3386.9, total_ms=23_386.9, itl_p50_ms=512.5, itl_max_ms=10_222.5
    )
    timeline.print_timeline(budget)
    lines = _uncoloured(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "ms" in line and line.split()[0] in ("prefill", "decode")]
    assert [row.split()[-1] for row in rows] == [worker] * 3
    has_bars = width == 120 or (width == 80 and len(worker) < 12)
    assert any("█" in row for row in rows) is has_bars
    assert " ".join(lines).count("between tokens p50 512.5 ms, max 10222.5 ms") == 1


@pytest.mark.parametrize("width", [60, 80])
def test_the_targets_fit_the_terminal(terminal, monkeypatch, capsys, width):
    why = "2 workers; long gaps are for at most 3"
    found = [
        admin_pb2.LaneTargets(
            lane=common_pb2.LANE_INTERACTIVE,
            ttft_ms=500,
            itl_ms=50,
            percentile=95,
            longest_gap_ms=60,
            longest_gap_reason=why,
        )
    ]
    monkeypatch.setattr("baton.cli.pool_sizes.call_admin", lambda *_: found)
    terminal(width)
    pool_sizes.targets()
    lines = _uncoloured(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if "interactive" in line)
    assert row.split() == ["interactive", "500", "ms", "50", "ms", "95", "60", "ms"]


@pytest.mark.parametrize("width", [1, 12, 60])
def test_sentences_break_between_words(terminal, capsys, width):
    terminal(width)
    text = "token 1 came from prefill-0,\nthe other tokens came from another-decode-worker"
    output.print_text(text)
    printed = capsys.readouterr().out
    assert printed.split() == text.split()
    assert max(map(len, printed.splitlines())) <= max(width, len("another-decode-worker"))


def test_the_status_of_a_rollout_fits_the_terminal(terminal, monkeypatch, capsys):
    times = admin_pb2.Percentiles(num=1016, p50_us=36_900, p95_us=48_000, p99_us=48_500)
    lane = admin_pb2.RevisionLane(lane=common_pb2.LANE_INTERACTIVE, ttft=times, itl=times)
    pool = admin_pb2.RevisionPool(num_serving=1, num_starting=1)
    revisions = [
        admin_pb2.RevisionStatus(name=name, pools=[pool, pool], lanes=[lane])
        for name in ("1", "r2")
    ]
    found = admin_pb2.RolloutStatus(
        phase=admin_pb2.ROLLOUT_PHASE_WAITING,
        stable_revision="1",
        stable=revisions[0],
        canary=revisions[1],
    )
    monkeypatch.setattr("baton.cli.rollout.call_admin", lambda *_: found)
    terminal(80)
    rollout.status()
    told = _uncoloured(capsys.readouterr().out)
    assert max(map(len, told.splitlines())) <= 80
    assert told.count("1 serving, 1 starting") == 4
    assert "columns left out: P99, GAPS (" in told


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("   - lost attempts: 1", ["   - lost", "     attempts: 1"]),
        ("1. tokens are late", ["1. tokens are", "   late"]),
        ("  draining 0, serving 1", ["  draining 0,", "  serving 1"]),
    ],
)
def test_a_broken_line_goes_on_below_its_first_word(terminal, capsys, text, lines):
    terminal(17)
    output.print_text(text)
    assert capsys.readouterr().out.splitlines() == lines


def test_the_reasons_of_a_size_break_between_words(terminal, monkeypatch, capsys):
    decision = admin_pb2.ScalingDecision(
        role=common_pb2.ROLE_DECODE,
        to_workers=1,
        reason="autoscaling is off: 1 wanted; 0 requests at a time: a worker takes 64 at a time",
        inputs={"draining": 0, "itl_target_ms": 50, "kv_reserved_share": 0, "requests": 0},
    )
    monkeypatch.setattr("baton.cli.pool_sizes.call_admin", lambda *_: [decision])
    terminal(60)
    pool_sizes.why()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).endswith(
        "a worker takes 64 at a time draining 0, itl_target_ms 50, kv_reserved_share 0, requests 0"
    )


def _uncoloured(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_handoff_that_took_no_time_follows_the_prefill(capsys):
    """One worker of an elastic cell computed the prompt and decoded."""
    stages = (
        ("tokenize", 0, 1),
        ("decode_queue", 1, 2),
        ("prefill", 3, 40),
        ("network", 43, 5),
        ("decode", 48, 45),
    )
    budget = LatencyBudget(
        tuple(StageTime(name, start_ms, lasted_ms, "d0") for name, start_ms, lasted_ms in stages),
        ttft_ms=43,
        total_ms=93,
        itl_p50_ms=5,
        itl_max_ms=9,
    )
    timeline.print_timeline(budget)
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:8]]
    assert rows == ["tokenize", "queue", "decode queue", "prefill", "network", "handoff", "decode"]


def test_exit_codes():
    assert exit_codes.exit_code(ConfigError("x")) == 2
    assert exit_codes.exit_code(make(3, "wrong field")) == 2
    assert exit_codes.exit_code(make(14, "no server")) == 3
    assert exit_codes.exit_code(make(13, "bug")) == 1
    assert exit_codes.exit_code(RuntimeError("bug")) is None


@pytest.mark.parametrize("group", [(), ("bench",), ("rollout",), ("config",), ("keys",)])
def test_help_describes_every_command_in_a_whole_sentence(baton_here, group):
    listed = baton_here(*group, "--help").out.partition("Commands:\n")[2].splitlines()
    assert listed
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
