"""The attach stream: welcome, refusal, replay, acknowledgement, fencing and health."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from baton.coordinator.server import link as worker_link
from baton.coordinator.server.admin import AdminService
from baton.coordinator.server.server import Coordinator
from baton.coordinator.state import events as ev
from baton.runtime.network import rpc
from baton.runtime.process import long_tasks
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
)
from tests.coordinator.scripted_worker import WAIT_S, ScriptedWorker, add_running, answer, attached

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def generate(**fields) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="the fox", sampling=common_pb2.SamplingParams(max_tokens=4), **fields
    )


async def first_status(channel, message) -> tuple[grpc.StatusCode, str]:
    call = cluster_pb2_grpc.ClusterStub(channel).Attach()
    await call.write(message)
    async with asyncio.timeout(WAIT_S):
        return await call.code(), await call.details()


async def events_of(call) -> list[inference_pb2.GenerateEvent]:
    """Returns all remaining events of a call."""
    found = []
    while (event := await call.read()) is not grpc.aio.EOF:
        found.append(event)
    return found


def tokens_of(events: list[inference_pb2.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


async def test_first_message_must_be_hello(channel):
    message = cluster_pb2.WorkerMessage(load=cluster_pb2.LoadReport())
    code, details = await first_status(channel, message)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Hello" in details


async def test_hello_is_checked(channel, say_hello):
    wrong = ("worker_id", ""), ("worker_id", "w\n1"), ("worker_id", "w\x1b[2J")
    for name, value in (*wrong, ("incarnation", 0), ("role", 7), ("kv_address", "")):
        hello = say_hello("p", PREFILL, **{name: value})
        code, details = await first_status(channel, cluster_pb2.WorkerMessage(hello=hello))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"hello.{name}" in details


async def test_other_layout_is_refused(coordinator, channel, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)):
        hello = say_hello("d", DECODE)
        hello.fingerprint.dtype = "bfloat16"
        code, details = await first_status(channel, cluster_pb2.WorkerMessage(hello=hello))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "fingerprint.dtype is 'bfloat16', here 'float32'" in details


async def test_welcome_tells_generation_and_heartbeat(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        assert worker.welcome.generation == coordinator.shell.generation != 0
        assert worker.welcome.heartbeat_interval.ToMilliseconds() == 200
        assert worker.welcome.adoption_grace.ToSeconds() == 30
        assert worker.welcome.role == PREFILL
        assert not worker.welcome.adopted


async def test_reconnect_loses_nothing_either_way(coordinator, channel, say_hello):
    inference = inference_pb2_grpc.InferenceStub(channel)
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    async with attached(coordinator.address, *hellos, auto=False) as (p, d):
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        await p.step(answer((await p.command("prefill")).spec, 0, 1, 0))
        spec = (await d.command("decode")).spec
        await call.read()
        await d.disconnect()
        # The worker keeps this message, because there is no stream, and sends it later.
        d.seq += 1
        step = cluster_pb2.StepOutputs(outputs=[answer(spec, 1, 1)])
        d.kept.append(cluster_pb2.WorkerMessage(seq=d.seq, step=step))
        await d.connect()
        assert list((await call.read()).delta.token_ids) == [1]
        # The coordinator keeps the command, because there is no stream.
        await d.disconnect()
        call.cancel()
        await p.command("cancel")
        await d.connect()
        assert (await d.command("cancel")).request_id == spec.request_id
        # A duplicate is acknowledged and not applied again.
        await d.raw(d.kept[0])
    assert coordinator.shell.core.num_requests == 0


async def test_commands_waiting_for_a_worker_come_as_one_message(coordinator, channel, say_hello):
    inference = inference_pb2_grpc.InferenceStub(channel)
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    async with attached(coordinator.address, *hellos) as (p, _):
        await p.disconnect()
        calls = [inference.Generate(generate(), timeout=WAIT_S) for _ in range(3)]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        await p.connect()
        for call in calls:
            assert tokens_of(await events_of(call)) == [0, 1, 2, 3]
        assert p.batches == [3]


async def test_messages_in_a_batch_are_taken_one_by_one(coordinator, channel, say_hello):
    inference = inference_pb2_grpc.InferenceStub(channel)
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    async with attached(coordinator.address, *hellos, auto=False) as (p, d):
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        await p.step(answer((await p.command("prefill")).spec, 0, 1, 0))
        spec = (await d.command("decode")).spec
        steps = [
            cluster_pb2.WorkerMessage(
                seq=number,
                step=cluster_pb2.StepOutputs(
                    outputs=[answer(spec, number, 1, LENGTH if number == 3 else None)]
                ),
            )
            for number in (1, 2, 3)
        ]
        await d.raw(steps[0])
        # The first message of the batch is a duplicate.
        await d.raw(cluster_pb2.WorkerMessage(batch=steps, ack=d.received))
        events = await events_of(call)
        assert tokens_of(events) == [0, 1, 2, 3]
        assert events[-1].finished.reason == LENGTH
        skipping = [cluster_pb2.WorkerMessage(seq=seq) for seq in (4, 6)]
        await d.raw(cluster_pb2.WorkerMessage(batch=skipping))
        code, details = await d.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "seq is 6; must be 5" in details


async def test_workers_that_return_or_join_later_learn_the_step_targets_in_force(
    coordinator, say_hello
):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (first,):
        core = coordinator.shell.core
        assert first.welcome.step_targets == core.step_targets()
        await first.disconnect()
        targets = replace(core.targets.by_lane["interactive"], itl_s=0.02)
        coordinator.shell.post(ev.TargetsRequested({"interactive": targets}))
        await first.connect()
        assert first.welcome.step_targets.itl.ToMilliseconds() == 20
        # The command that was sent meanwhile follows.
        assert await first.command("step_targets") == core.step_targets()
        async with attached(coordinator.address, say_hello("d", DECODE)) as (second,):
            assert second.welcome.step_targets == core.step_targets()


async def test_newer_stream_takes_over_from_a_half_open_one(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (first,):
        second = ScriptedWorker(coordinator.address, say_hello("p", PREFILL))
        second.welcome = first.welcome
        await second.connect()
        assert (await first.ended())[0] is grpc.StatusCode.OK
        worker = coordinator.shell.core.workers.by_id("p")
        assert worker.connected
        await second.close()


@pytest.mark.parametrize("still_runs", [False, True])
async def test_a_worker_that_returns_from_another_coordinator_begins_anew(
    coordinator, channel, say_hello, still_runs
):
    """Both ends number their messages anew, and only what the worker still runs goes on."""
    inference = inference_pb2_grpc.InferenceStub(channel)
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    async with attached(coordinator.address, *hellos, auto=False) as (p, d):
        call = inference.Generate(generate(request_id="r1"), timeout=WAIT_S)
        await call.read()
        spec = (await p.command("prefill")).spec
        await p.step(answer(spec, 0, 1, 0))
        await d.command("decode")
        await d.step(answer(spec, 1, 1))
        assert [list((await call.read()).delta.token_ids) for _ in range(2)] == [[0], [1]]
        hello = say_hello("d", DECODE)
        if still_runs:
            add_running(hello, 1, [0, 1], spec.prompt_token_ids, spec.sampling, spec.tenant)
        again = ScriptedWorker(coordinator.address, hello, auto=False)
        again.welcome = cluster_pb2.Welcome(generation=77)
        try:
            await again.connect()
            assert again.welcome.ack == 0
            # The older stream, whose end the coordinator had not noticed, has no effect.
            assert (await d.ended())[0] is grpc.StatusCode.OK
            adopted = [(one.request_id, one.attempt) for one in again.welcome.adopted]
            if still_runs:
                assert adopted == [("r1", 1)]
            else:
                assert not adopted
                assert (await p.command("cancel")).attempt == 1
                prompt = (await p.command("prefill")).spec
                await p.step(answer(prompt, 0, 1, 0))
                spec = (await again.command("decode")).spec
                assert (spec.attempt, list(spec.known_token_ids)) == (2, [0, 1])
            await again.step(answer(spec, 2, 2, LENGTH))
            events = await events_of(call)
            assert tokens_of(events) == [2, 3]
            assert events[-1].finished.reason == LENGTH
            assert coordinator.shell.core.stats.num_workers_lost == 0
        finally:
            await again.close()


async def test_cache_events_reach_the_core_in_order(coordinator, say_hello, monkeypatch):
    heard, handle = [], coordinator.shell.core.handle

    def watch(event, now):
        if isinstance(event, ev.WorkerCache):
            heard.append((event.worker[0], event.changes))
        return handle(event, now)

    monkeypatch.setattr(coordinator.shell.core, "handle", watch)
    told = [
        cluster_pb2.CacheEvents(reset=True, stored=[1, 2**64 - 1]),
        cluster_pb2.CacheEvents(stored=[3], removed=[2**64 - 1]),
    ]
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        for events in told:
            await worker.say(cache=events)
        async with asyncio.timeout(WAIT_S):
            while worker.acked < len(told):
                await asyncio.sleep(0.01)
    assert heard == [("p", events) for events in told]


async def test_a_skipped_sequence_number_fences(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        await worker.raw(cluster_pb2.WorkerMessage(seq=2, step=cluster_pb2.StepOutputs()))
        code, details = await worker.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "seq is 2; must be 1" in details
        assert coordinator.shell.core.workers.by_id("p") is None


async def test_an_unknown_role_fences(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        change = cluster_pb2.WorkerStateChanged(role=7)
        await worker.raw(cluster_pb2.WorkerMessage(seq=1, state_changed=change))
        code, details = await worker.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "state_changed.role is 7; must be ROLE_PREFILL or ROLE_DECODE" in details


async def test_tokens_in_columns_of_different_length_fence(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("d", DECODE)) as (worker,):
        tokens = cluster_pb2.StepTokens(
            handles=[1, 2], offsets=[1, 1], token_ids=[5], num_text_chars=[1, 1], deltas=[b"", b""]
        )
        await worker.raw(
            cluster_pb2.WorkerMessage(seq=1, step=cluster_pb2.StepOutputs(tokens=tokens))
        )
        code, details = await worker.ended()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "len(step.tokens.token_ids) is 1; must be as many as" in details


async def test_a_message_that_cannot_be_applied_is_not_asked_for_again(
    coordinator, say_hello, monkeypatch
):
    def broken(event: ev.WorkerStep) -> None:
        raise ValueError("a bug")

    monkeypatch.setitem(coordinator.shell.core._handlers, ev.WorkerStep, broken)
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        await worker.step()
        code, details = await worker.ended()
        assert code is grpc.StatusCode.INTERNAL
        assert "a bug" in details
        assert coordinator.shell.core.workers.by_id("p") is None
        with pytest.raises((AssertionError, grpc.RpcError), match="fenced"):
            await worker.connect()


async def test_a_worker_that_is_sent_too_much_as_it_attaches_is_fenced(
    coordinator, channel, say_hello, monkeypatch
):
    monkeypatch.setattr(worker_link, "_MAX_KEPT_MESSAGES", 0)
    async with attached(coordinator.address, say_hello("d", DECODE)):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate())
        assert (await call.read()).HasField("accepted")
        message = cluster_pb2.WorkerMessage(hello=say_hello("p", PREFILL))
        code, details = await first_status(channel, message)
        assert code is grpc.StatusCode.ABORTED
        assert details == "worker p is fenced: this incarnation does not acknowledge commands"
        assert coordinator.shell.core.workers.by_id("p") is None
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            await coordinator.shell.idle()


async def test_acknowledgements_in_a_hello_make_room_for_new_commands(
    coordinator, channel, say_hello, monkeypatch
):
    inference = inference_pb2_grpc.InferenceStub(channel)
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    async with attached(coordinator.address, *hellos, auto=False) as (p, d):
        first = inference.Generate(generate())
        await p.command("prefill")
        await d.load()
        await p.disconnect()
        async with asyncio.timeout(WAIT_S):
            while coordinator.shell.core.workers.by_id("p").connected:
                await asyncio.sleep(0.01)
        second = inference.Generate(generate())
        assert (await second.read()).HasField("accepted")
        with monkeypatch.context() as patch:
            patch.setattr(worker_link, "_MAX_KEPT_MESSAGES", 1)
            await p.connect()
            await p.command("prefill")
        for call in (first, second):
            call.cancel()
        async with asyncio.timeout(WAIT_S):
            await coordinator.shell.idle()


async def test_everything_is_acknowledged(coordinator, say_hello):
    async with attached(coordinator.address, say_hello("p", PREFILL)) as (worker,):
        for _ in range(200):
            await worker.step()
        async with asyncio.timeout(WAIT_S):
            while worker.acked < 200:
                await asyncio.sleep(0.01)


async def test_silent_and_vanished_workers_are_lost_then_fenced(coordinator_config, say_hello):
    config = coordinator_config(worker_timeout_s=1.0, worker_silent_s=1.0, heartbeat_s=0.1)
    async with Coordinator(config) as coordinator:
        hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
        async with attached(coordinator.address, *hellos) as (p, d):
            await d.disconnect()
            code, details = await p.ended()
            assert code is grpc.StatusCode.ABORTED
            assert "was silent for 1 s" in details
            async with asyncio.timeout(WAIT_S):
                while len(coordinator.shell.core.workers):
                    await asyncio.sleep(0.01)
            async with rpc.channel(coordinator.address) as channel:
                message = cluster_pb2.WorkerMessage(hello=say_hello("d", DECODE))
                code, details = await first_status(channel, message)
            assert code is grpc.StatusCode.ABORTED
            assert "was gone for 1 s" in details


async def test_newer_incarnation_replaces(coordinator, channel, say_hello):
    hellos = say_hello("p", PREFILL, 1), say_hello("p", PREFILL, 2)
    async with attached(coordinator.address, *hellos) as (old, _new):
        assert (await old.ended())[0] is grpc.StatusCode.ABORTED
        message = cluster_pb2.WorkerMessage(hello=say_hello("p", PREFILL, 1))
        assert (await first_status(channel, message))[0] is grpc.StatusCode.ALREADY_EXISTS


async def test_health_follows_the_pools(coordinator, channel, say_hello):
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
    assert (await watch.read()).status == NOT_SERVING
    overall = await health.Check(health_pb2.HealthCheckRequest())
    assert overall.status == SERVING
    async with attached(coordinator.address, say_hello("p", PREFILL), say_hello("d", DECODE)):
        assert (await watch.read()).status == SERVING
    async with asyncio.timeout(WAIT_S):
        assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_health_and_history_survive_an_error(
    coordinator_config, say_hello, monkeypatch, caplog
):
    monkeypatch.setattr(long_tasks, "_FIRST_PAUSE_S", 0.05)
    broken = {"set": HealthServicer.set, "sample": AdminService.sample}

    def once(owner: type, name: str) -> None:
        def fail(self, *arguments):
            monkeypatch.setattr(owner, name, broken.pop(name))
            raise ValueError(f"{name} is broken")

        monkeypatch.setattr(owner, name, fail)

    once(AdminService, "sample")
    async with (
        Coordinator(coordinator_config()) as coordinator,
        rpc.channel(coordinator.address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
        assert (await watch.read()).status == NOT_SERVING
        once(HealthServicer, "set")
        async with attached(coordinator.address, say_hello("p", PREFILL), say_hello("d", DECODE)):
            async with asyncio.timeout(WAIT_S):
                assert (await watch.read()).status == SERVING
            watch.cancel()
        admin, history = admin_pb2_grpc.AdminStub(channel), []
        asked = admin_pb2.GetStatusRequest(include_history=True)
        async with asyncio.timeout(WAIT_S):
            # One sample is made for the answer.
            while len(history) < 2:
                history = (await admin.GetStatus(asked)).history
    assert not broken
    assert {"health failed", "history failed"} <= {
        record.getMessage().partition(";")[0] for record in caplog.records
    }


async def test_metrics_endpoint(coordinator, channel, say_hello):
    inference = inference_pb2_grpc.InferenceStub(channel)
    async with attached(coordinator.address, say_hello("p", PREFILL), say_hello("d", DECODE)):
        async for _ in inference.Generate(generate(), timeout=WAIT_S):
            pass
        url = f"http://{coordinator.metrics_address}/metrics"

        def fetch() -> str:
            with urllib.request.urlopen(url) as response:
                return response.read().decode()

        text = await asyncio.to_thread(fetch)
    for line in (
        'gen_ai_server_time_to_first_token_seconds_count{lane="interactive"} 1.0',
        'baton_inter_token_latency_seconds_count{lane="interactive"} 3.0',
        'baton_requests_total{lane="interactive",outcome="length"} 1.0',
        'baton_tokens_total{kind="output"} 4.0',
        'baton_workers{pool="decode",state="serving"} 1.0',
        "baton_elastic 0.0",
        'baton_queue_depth{lane="batch"} 0.0',
        'baton_wait_ratio{lane="interactive"} 1.0',
    ):
        assert line in text
