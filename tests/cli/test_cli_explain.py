"""`baton explain` and `baton doctor` as text and as JSON."""

import json
import re

import pytest
import typer

from baton.cli import doctor, explain
from baton.coordinator.state import events as ev
from baton.v1 import admin_pb2, common_pb2
from tests.coordinator.live_status import LiveCell


@pytest.fixture
def answers(monkeypatch):
    """Sets the coordinator's answer to the next call."""

    def answer(value):
        for command in (doctor, explain):
            monkeypatch.setattr(command, "call_admin", lambda address, question: value)

    return answer


@pytest.fixture(scope="module")
def stutters():
    """A cell whose decode workers compute prompts between the tokens."""
    cell = LiveCell(decode={"local_prefill": True}, lanes={"interactive": {"itl_ms": 1000}})
    cell.workers(max_num_batched_tokens=2048)
    return cell.load(3, 100, 100).load(14, 2000, 2).after(11)


@pytest.fixture
def stalled(stutters) -> admin_pb2.RequestInfo:
    infos = (stutters.explain(f"r{number}") for number in range(len(stutters.outcomes)))
    return next(
        info
        for info in infos
        if info.finish_reason
        and any(one.cause == admin_pb2.STALL_CAUSE_PREFILL for one in info.stalls)
    )


def test_the_route_of_a_request_is_told(answers, stalled, capsys):
    stalled.route = "/v1/messages"
    answers(stalled)
    explain.explain(stalled.request_id)
    assert capsys.readouterr().out.splitlines()[0].endswith("tenant default, /v1/messages")


def test_a_waterfall_and_its_stalls(answers, stalled, capsys):
    answers(stalled)
    explain.explain(stalled.request_id)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"{stalled.request_id}: finished (length), interactive, tenant default"
    assert "first token in time: the target is 500 ms" in lines
    assert any(
        re.fullmatch(r"placed: prompt on .*, decode on d0 \(predicted: [0-9.]+ ms per step\)", line)
        for line in lines
    )
    total_ms = stalled.budget.total_us / 1e3
    assert f"the stages add up to {total_ms:.1f} of {total_ms:.1f} ms" in lines
    stages = {line.split()[0] for line in lines if line}
    assert {"queue", "prefill", "handoff", "decode", "network"} <= stages
    assert "the longest gaps over the target of 50 ms:" in lines
    assert "a prompt of r" in out
    assert "(2000 tokens) was computed on the same worker" in out


def test_tokens_from_disk_are_told(answers, stalled, capsys):
    info = admin_pb2.RequestInfo()
    info.CopyFrom(stalled)
    info.placement.disk_tokens, info.placement.disk_bytes_per_s = 48, 1_234_000_000
    info.placement.fetched_tokens, info.placement.fetched_from = 16, "d1"
    info.prompt_sources.CopyFrom(admin_pb2.PromptTokens(device=16, host=32, disk=48, computed=4))
    answers(info)
    explain.explain(info.request_id)
    out = capsys.readouterr().out
    assert "48 tokens on disk at 1.23 GB/s and 16 tokens fetched from d1, decode on" in out
    sources = "16 from the device cache, 32 from host memory, 48 from disk, 4 computed"
    assert f"prompt tokens: {sources}" in out


def test_a_request_that_left_a_worker_that_flips_was_not_preempted(answers, capsys):
    cell = LiveCell(scaling={"targets": {"interactive": {"itl_ms": 20}}}).workers(num_decode=2)
    cell.submit(1500, 9000)
    cell.after(2)
    worker_id = cell.explain("r0").decode_worker_id
    cell.post(ev.FlipRequested(worker_id, common_pb2.ROLE_PREFILL))
    cell.after(60)
    moved = cell.explain("r0")
    assert moved.decode_worker_id != worker_id
    answers(moved)
    explain.explain("r0")
    out = capsys.readouterr().out
    assert "or because the worker changed its role" in out


def test_the_same_for_programs(answers, stalled, capsys):
    answers(stalled)
    explain.explain(stalled.request_id, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["total_ms"] == pytest.approx(sum(found["stages_ms"].values()), rel=0.02)
    assert found["stalls"][0]["cause"] == "prefill"
    assert found["stalls"][0]["why"].startswith("a prompt of r")
    assert found["itl_target_s"] == 0.05


def test_a_request_without_stalls_or_targets(answers, capsys):
    cell = LiveCell().workers()
    cell.submit(100, 5)
    cell.after(1)
    info = cell.explain("r0")
    answers(info)
    explain.explain("r0")
    out = capsys.readouterr().out
    assert "no gap between tokens was over the target of 50 ms" in out
    computation_ms = info.placement.computation.ToNanoseconds() / 1e6
    assert computation_ms > 0
    placed = f"placed: prompt on p0 (predicted: queue 0.0 ms, computation {computation_ms:.1f} ms)"
    assert f"{placed}, decode on d0 (predicted: " in out
    info.ClearField("itl_target")
    explain.explain("r0")
    assert "no target for the gap between tokens" in capsys.readouterr().out


def test_the_doctor_s_words_and_exit_codes(answers, stutters, capsys):
    answers(stutters.status())
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1. interactive: tokens are late: decode workers compute")
    assert lines[0].endswith("[decode_interference]")
    assert lines[1] == "   stage: decode"
    assert lines[2].startswith("   - ITL p50 ")
    assert lines[-1].startswith("   first: keep prompts off the decode workers")
    with pytest.raises(typer.Exit):
        doctor.doctor(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["findings"][0]["kind"]) == (False, "decode_interference")


def test_the_doctor_on_a_healthy_cell(answers, capsys):
    answers(LiveCell().workers().status())
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as ended:
            doctor.doctor(as_json=as_json)
        assert ended.value.exit_code == 0
    healthy, told = capsys.readouterr().out.split("\n", 1)
    assert healthy == "healthy; no request had a token in the last 60 s"
    assert json.loads(told)["findings"] == []
