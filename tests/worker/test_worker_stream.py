import asyncio
import os
import re
import secrets

import grpc
import psutil
import pytest
from google.rpc import code_pb2
from prometheus_client import generate_latest

from baton.engine.sim_tokens import expected_tokens
from baton.runtime.security import dev_certs
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from baton.worker import attach
from baton.worker.metrics import (
    DEVICE,
    DISK,
    CacheCounts,
    RunnerCounts,
    Snapshot,
    TierCounts,
    WorkerCollector,
)
from tests.worker.scripted_coordinator import WAIT_S, ScriptedCoordinator, plan, spec, tokens_of

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SLOW = {"time_scale": 1.0, "step_base_ms": 20, "prefill_base_ms": 20}


def decode(name: str, prompt: list[int], **sampling: object) -> cluster_pb2.DecodeCommand:
    return cluster_pb2.DecodeCommand(spec=spec(name, prompt, **sampling))


def transfer_services() -> list[psutil.Process]:
    """Transfer services of the workers in this process."""
    found = psutil.Process(os.getpid()).children()
    return [one for one in found if "baton.kvtransfer.service" in one.cmdline()]


async def some_outputs(stream, count: int) -> list[cluster_pb2.RequestOutput]:
    found: list[cluster_pb2.RequestOutput] = []
    while len(found) < count and not (found and found[-1].WhichOneof("end")):
        found += (await stream.next_of("step")).step.outputs
    return found


async def test_a_broken_stream_neither_loses_nor_repeats_outputs(
    coordinator, start_worker, vocabulary
):
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6, 7], max_tokens=30))
    outputs = await some_outputs(stream, 3)
    while outputs[-1].WhichOneof("end") is None:
        stream.end()
        await stream.ended.wait()
        while not stream._inbox.empty():
            outputs += stream._inbox.get_nowait().step.outputs
        if outputs[-1].WhichOneof("end"):
            break
        stream = await coordinator.stream()
        assert stream.hello.generation == coordinator.generation
        assert stream.hello.ack == 1
        outputs += await some_outputs(stream, 4)
    assert tokens_of(outputs) == expected_tokens(vocabulary, [5, 6, 7], 30)


async def test_a_worker_takes_commands_of_any_size(coordinator, start_worker, vocabulary):
    """The coordinator's configuration bounds commands, and the worker's may differ."""
    start_worker(simulated={"max_model_len": 10_000_000, "kv_tokens": 20_000_000})
    stream = await coordinator.stream()
    large = decode("large", [5, 6, 7], max_tokens=3)
    large.spec.chat.messages.add(role="user").parts.add(image=bytes(20 * 2**20))
    await coordinator.command(stream, decode=large)
    assert tokens_of(await stream.outputs("large")) == expected_tokens(vocabulary, [5, 6, 7], 3)


async def test_a_worker_leaves_a_silent_stream_and_loses_nothing(
    coordinator, start_worker, vocabulary, monkeypatch
):
    """The stream stays open and answers pings, as behind a proxy or with a blocked event loop."""
    with monkeypatch.context() as patch:
        # Counts for the first stream only: a slow machine may delay heartbeats of the second one.
        patch.setattr(attach, "_SILENT_S", 0.5)
        worker = start_worker(simulated=SLOW)
        stream = await coordinator.stream()
        await stream.loads(1)
    await coordinator.command(stream, decode=decode("r", [5, 6, 7], max_tokens=40))
    outputs = await some_outputs(stream, 2)
    worker.hold_outputs()
    stream.fall_silent()
    second = await coordinator.stream()
    async with asyncio.timeout(WAIT_S):
        await stream.ended.wait()
    while not stream._inbox.empty():
        outputs += stream._inbox.get_nowait().step.outputs
    assert second.hello.ack == 1
    worker.release_outputs()
    outputs += await second.outputs("r")
    assert tokens_of(outputs) == expected_tokens(vocabulary, [5, 6, 7], 40)


async def test_a_short_silence_does_not_end_a_stream(
    coordinator, start_worker, vocabulary, monkeypatch
):
    # Longer than a slow machine takes for this test.
    monkeypatch.setattr(attach, "_SILENT_S", 600.0)
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    stream.fall_silent()
    # In this time the coordinator misses many heartbeats.
    await stream.loads(20)
    await coordinator.command(stream, decode=decode("r", [5, 6, 7], max_tokens=5))
    assert tokens_of(await stream.outputs("r")) == expected_tokens(vocabulary, [5, 6, 7], 5)


async def test_batches_deliver_the_same_as_single_messages(coordinator, start_worker, vocabulary):
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    commands = [decode(f"r{index}", [5, 6, index], max_tokens=30) for index in range(3)]
    await coordinator.command_batch(stream, *({"decode": command} for command in commands))
    await some_outputs(stream, 6)
    stream.end()
    await stream.ended.wait()
    # The coordinator forgets all messages; it has acknowledged none, so all of them come again.
    coordinator.received, outputs = 0, []
    stream = await coordinator.stream()
    while sum(output.WhichOneof("end") is not None for output in outputs) < 3:
        outputs += (await stream.next_of("step")).step.outputs
    for index in range(3):
        of_one = [output for output in outputs if output.request_id == f"r{index}"]
        assert tokens_of(of_one) == expected_tokens(vocabulary, [5, 6, index], 30)
    assert max(coordinator.batches) > 1


async def test_a_new_coordinator_adopts_some_requests_and_the_others_end(
    coordinator, start_worker, vocabulary
):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    for handle, name in enumerate(("keep", "end"), start=1):
        command = decode(name, [5, 6, 7], max_tokens=40)
        command.spec.handle = handle
        await coordinator.command(stream, decode=command)
    num_tokens = 0
    while num_tokens < 6:
        step = (await stream.next_of("step")).step
        num_tokens += len(step.outputs) + len(step.tokens.token_ids)
    assert step.tokens.handles
    worker.hold_outputs()
    address = coordinator.address
    await coordinator.stop()

    second = ScriptedCoordinator(generation=2)
    second.adopted = [cluster_pb2.AdoptedRequest(request_id="keep", attempt=1)]
    await second.start(address)
    try:
        stream = await second.stream()
        running = {one.request_id: one for one in stream.hello.running}
        assert set(running) == {"keep", "end"}
        expected = expected_tokens(vocabulary, [5, 6, 7], 40)
        kept = running["keep"]
        assert kept.decoding
        num_tokens = len(kept.token_ids)
        assert list(kept.token_ids) == expected[:num_tokens]
        assert kept.last_text == vocabulary.tokenizer.decode(expected[:num_tokens])
        assert kept.num_text_chars == len(kept.last_text)
        # Outputs name the request: the second coordinator has its own handles.
        worker.release_outputs()
        outputs = await stream.outputs("keep")
        assert outputs[0].delta.offset == num_tokens
        assert list(kept.token_ids) + tokens_of(outputs) == expected
        await stream.idle()
    finally:
        await second.stop()


async def test_an_output_that_ends_without_a_coordinator_is_reported_to_the_next(
    coordinator, start_worker, vocabulary
):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6, 7], max_tokens=5))
    await some_outputs(stream, 2)
    address = coordinator.address
    await coordinator.stop()
    # The last tokens are computed while no coordinator is attached.
    await worker.computes_nothing()
    second = ScriptedCoordinator(generation=2)
    await second.start(address)
    try:
        stream = await second.stream()
        (ended,) = stream.hello.running
        expected = expected_tokens(vocabulary, [5, 6, 7], 5)
        assert list(ended.token_ids) == expected
        assert ended.last_text == vocabulary.tokenizer.decode(expected)
        assert ended.finished.reason == common_pb2.FINISH_REASON_LENGTH
        await stream.idle()
    finally:
        await second.stop()
    # An acknowledged end is not reported again.
    third = ScriptedCoordinator(generation=3)
    await third.start(address)
    try:
        assert not (await third.stream()).hello.running
    finally:
        await third.stop()


async def test_a_fenced_worker_stops_at_once(coordinator, start_worker, capsys):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5], max_tokens=900))
    await some_outputs(stream, 1)
    # gRPC hides the reason if the stream ends during a write. The worker then attaches again, and a
    # coordinator refuses that for the same reason.
    coordinator.refusal = (grpc.StatusCode.ABORTED, "it was silent")
    stream.end(*coordinator.refusal)
    assert await worker.exit_code() == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "baton worker w1: fenced by the coordinator: it was silent"
    )


async def test_a_refused_worker_reports_the_reason(coordinator, start_worker, capsys):
    coordinator.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "model is 'a'; here 'b'")
    assert await start_worker().exit_code() == 1
    assert "model is 'a'; here 'b'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "refusal",
    [
        # The coordinator has the new token and was restarted; the worker gets the token later.
        (grpc.StatusCode.UNAUTHENTICATED, "the credential is not valid here"),
        # A server without the service, for example a proxy, answers while the coordinator restarts.
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    ],
)
async def test_a_worker_that_was_attached_outlives_a_passing_refusal(
    coordinator, start_worker, refusal
):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=30))
    await some_outputs(stream, 1)
    coordinator.refusal = refusal
    stream.end()
    async with asyncio.timeout(WAIT_S):
        await coordinator.refused.wait()
    coordinator.refused.clear()
    attached = asyncio.create_task(coordinator.stream())
    refused_again = asyncio.create_task(coordinator.refused.wait())
    await asyncio.wait([worker.task, refused_again], return_when=asyncio.FIRST_COMPLETED)
    assert not worker.task.done()
    coordinator.refusal = None
    again = await attached
    assert [one.request_id for one in again.hello.running] == ["r"]


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.UNAUTHENTICATED, "workers need the cluster token"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    ],
)
async def test_a_worker_ends_if_its_first_attempt_is_refused(
    coordinator, start_worker, capsys, refusal
):
    coordinator.refusal = refusal
    assert await start_worker().exit_code() == 1
    assert refusal[1] in capsys.readouterr().err.splitlines()[-1]


async def test_no_coordinator_is_a_clear_error(coordinator, start_worker, capsys):
    worker = start_worker(worker={"attach_timeout_s": 0.3}, address="127.0.0.1:9")
    assert await worker.exit_code() == 3
    assert re.search(
        r"no coordinator at 127.0.0.1:9 within 0.3 s: Connection refused( \(111\))?$",
        capsys.readouterr().err,
    )


async def test_a_worker_logs_at_once_why_it_does_not_attach(
    coordinator, start_worker, tmp_path, caplog
):
    dev_certs.make(str(tmp_path))
    start_worker(
        worker={"attach_timeout_s": 600},
        security={"ca_file": str(tmp_path / "ca.pem"), "server_name": "baton"},
    )
    async with asyncio.timeout(WAIT_S):
        while "it does not speak TLS; retrying for up to 600 s" not in caplog.text:
            await asyncio.sleep(0.05)


async def test_a_coordinator_gone_for_longer_than_the_grace_ends_the_requests(
    coordinator, start_worker
):
    coordinator.grace_s = 0.2
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5], max_tokens=900))
    await some_outputs(stream, 1)
    address = coordinator.address
    await coordinator.stop()
    # The worker fails the request by itself, and reports that when the coordinator is back.
    await worker.computes_nothing()
    await coordinator.start(address)
    stream = await coordinator.stream()
    outputs = await stream.outputs("r")
    assert outputs[-1].failed.code == code_pb2.UNAVAILABLE
    await stream.idle()


async def test_a_draining_worker_finishes_its_requests_and_leaves(
    coordinator, start_worker, vocabulary
):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=15))
    await some_outputs(stream, 1)
    drain = cluster_pb2.DrainCommand(reason="scale down")
    drain.timeout.FromSeconds(round(WAIT_S))
    await coordinator.command(stream, drain=drain)
    outputs: list[cluster_pb2.RequestOutput] = []
    states = []
    async with asyncio.timeout(WAIT_S):
        while len(states) < 2:
            message = await stream._inbox.get()
            outputs += message.step.outputs
            if message.HasField("state_changed"):
                if not states:
                    await coordinator.command(stream, release=cluster_pb2.ReleaseCommand())
                states.append((message.state_changed.state, len(outputs)))
    (draining, num_before), (stopped, num_after) = states
    assert draining == cluster_pb2.WORKER_STATE_DRAINING
    assert stopped == cluster_pb2.WORKER_STATE_STOPPED
    assert num_before < num_after == 14
    assert tokens_of(outputs) == expected_tokens(vocabulary, [5, 6], 15)[1:]
    assert await worker.exit_code() == 0


async def test_a_draining_worker_accepts_requests_that_are_assigned_to_it(
    coordinator, start_worker, vocabulary
):
    """Another worker is computing the prompt, so the draining worker cannot know of the decode."""
    worker = start_worker()
    stream = await coordinator.stream()
    await stream.load_after()
    worker.stop.set()
    change = (await stream.next("state_changed")).state_changed
    assert change.state == cluster_pb2.WORKER_STATE_DRAINING
    for _ in range(3):
        await stream.load_after()
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=5))
    await coordinator.command(stream, release=cluster_pb2.ReleaseCommand())
    assert tokens_of(await stream.outputs("r")) == expected_tokens(vocabulary, [5, 6], 5)
    assert await worker.exit_code() == 0


async def test_a_draining_worker_keeps_a_handoff_that_is_not_yet_sent(
    coordinator, start_worker, vocabulary
):
    """The prefill worker's request has ended, and the receiver has not taken its KV cache yet."""
    second = ScriptedCoordinator()
    await second.start()
    try:
        start_worker(DECODE, "d", address=second.address)
        takes = await second.stream()
        (service,) = transfer_services()
        worker = start_worker(PREFILL, "p")
        gives = await coordinator.stream()
        service.suspend()
        prompt = [3 + index % 90 for index in range(100)]
        handoff = plan(secrets.token_bytes(16), takes.hello.kv_address, len(prompt))
        command = cluster_pb2.PrefillCommand(spec=spec("r", prompt, max_tokens=10), handoff=handoff)
        await coordinator.command(gives, prefill=command)
        known = tokens_of(await gives.outputs("r"))
        worker.stop.set()
        change = (await gives.next_of("state_changed")).state_changed
        assert change.state == cluster_pb2.WORKER_STATE_DRAINING
        await coordinator.command(gives, release=cluster_pb2.ReleaseCommand())
        for _ in range(3):
            assert (await gives.load_after()).staging_bytes_used
        service.resume()
        report = (await gives.next_of("handoff")).handoff
        assert report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        assert await worker.exit_code() == 0
        goes_on = cluster_pb2.DecodeCommand(
            spec=spec("r", prompt, known=known, max_tokens=10), handoff=handoff
        )
        await second.command(takes, decode=goes_on)
        rest = await takes.outputs("r")
        assert known + tokens_of(rest) == expected_tokens(vocabulary, prompt, 10)
        assert rest[0].timings.num_handoff_tokens == 100
    finally:
        for one in transfer_services():
            one.resume()
        await second.stop()


async def test_a_draining_worker_does_not_wait_for_a_coordinator_that_is_gone(
    coordinator, start_worker
):
    worker = start_worker()
    await (await coordinator.stream()).load_after()
    await coordinator.stop()
    worker.stop.set()
    assert await worker.exit_code() == 0


async def test_a_drain_ends_at_its_time_limit(coordinator, start_worker):
    worker = start_worker(simulated=SLOW, worker={"drain_timeout_s": 0.2})
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=900))
    await some_outputs(stream, 1)
    worker.stop.set()
    draining = (await stream.next_of("state_changed")).state_changed
    assert draining.state == cluster_pb2.WORKER_STATE_DRAINING
    stopped = (await stream.next_of("state_changed")).state_changed
    assert (stopped.state, stopped.failed) == (cluster_pb2.WORKER_STATE_STOPPED, False)
    assert await worker.exit_code() == 0


async def begin_long_drain(coordinator, stream, reason):
    """Lets the worker drain for an hour at most, while it serves a long output."""
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=900))
    await some_outputs(stream, 1)
    drain = cluster_pb2.DrainCommand(reason=reason)
    drain.timeout.FromSeconds(3600)
    await coordinator.command(stream, drain=drain)
    draining = (await stream.next_of("state_changed")).state_changed
    assert draining.state == cluster_pb2.WORKER_STATE_DRAINING


async def test_a_stop_signal_shortens_a_long_drain(coordinator, start_worker):
    """An operator drains the worker for an hour; then its process manager stops the process."""
    worker = start_worker(simulated=SLOW, worker={"drain_timeout_s": 0.2})
    stream = await coordinator.stream()
    await begin_long_drain(coordinator, stream, "drained by hand")
    worker.stop.set()
    stopped = (await stream.next_of("state_changed")).state_changed
    assert (stopped.state, stopped.failed) == (cluster_pb2.WORKER_STATE_STOPPED, False)
    assert await worker.exit_code() == 0


async def test_a_later_drain_command_shortens_a_long_drain(coordinator, start_worker):
    """The coordinator removes the worker soon after the time limit of its latest command."""
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await begin_long_drain(coordinator, stream, "scale down")
    drain = cluster_pb2.DrainCommand(reason="drained by hand")
    drain.timeout.FromMilliseconds(200)
    await coordinator.command(stream, drain=drain)
    stopped = (await stream.next_of("state_changed")).state_changed
    assert (stopped.state, stopped.failed) == (cluster_pb2.WORKER_STATE_STOPPED, False)
    assert await worker.exit_code() == 0


async def test_a_worker_ends_with_its_transfer_service(coordinator, start_worker, capsys):
    worker = start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    await coordinator.command(stream, decode=decode("r", [5, 6], max_tokens=900))
    await some_outputs(stream, 1)
    for process in transfer_services():
        process.kill()
    change = (await stream.next_of("state_changed")).state_changed
    assert (change.state, change.failed) == (cluster_pb2.WORKER_STATE_STOPPED, True)
    assert await worker.exit_code() == 1
    assert "transfer service" in capsys.readouterr().err.splitlines()[-1]


async def test_a_bad_model_is_reported_in_one_line(coordinator, start_worker, capsys, tmp_path):
    assert await start_worker(model=str(tmp_path)).exit_code() == 1
    assert "tokenizer.json" in capsys.readouterr().err.splitlines()[-1]


def test_metrics_come_from_the_last_snapshot():
    collector = WorkerCollector("demo", "prefill")
    load = cluster_pb2.LoadReport(num_steps=7, kv_tokens_used=5, kv_tokens_total=10)
    collector.snapshot = Snapshot(
        load,
        counts=RunnerCounts(
            num_tokens=3,
            num_ended={"finished": 2},
        ),
        caches=CacheCounts(
            tiers={DEVICE: TierCounts(num_removed=6), DISK: TierCounts(num_blocks=4)},
            disk_failed=True,
        ),
    )
    text = generate_latest(collector.registry()).decode()
    labels = 'model="demo",role="prefill"'
    ended = 'model="demo",outcome="finished",role="prefill"'
    assert f"baton_worker_engine_steps_total{{{labels}}} 7.0" in text
    assert f"baton_worker_kv_cache_usage_ratio{{{labels}}} 0.5" in text
    assert f"baton_worker_requests_total{{{ended}}} 2.0" in text
    assert f"baton_worker_disk_kv_blocks{{{labels}}} 4.0" in text
    removed = 'model="demo",role="prefill",tier="device"'
    assert f"baton_worker_removed_kv_blocks_total{{{removed}}} 6.0" in text
    assert f"baton_worker_disk_failed{{{labels}}} 1.0" in text


async def test_the_engine_gets_the_targets_of_its_steps(coordinator, start_worker):
    def message(itl_ms: int) -> cluster_pb2.StepTargets:
        targets = cluster_pb2.StepTargets()
        targets.itl.FromMilliseconds(itl_ms)
        targets.longest_gap.FromMilliseconds(80)
        targets.prompt_step.FromMilliseconds(200)
        return targets

    coordinator.step_targets = message(50)
    worker = start_worker()
    stream = await coordinator.stream()
    await worker.step_targets_are(StepTargets(0.05, 0.08, 0.2))
    await coordinator.command(stream, step_targets=message(20))
    await worker.step_targets_are(StepTargets(0.02, 0.08, 0.2))
