import os
import secrets
import socket

import pytest
from google.rpc import code_pb2

from baton.engine.sim_tokens import expected_tokens
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.worker.scripted_coordinator import plan, spec, tokens_of

pytestmark = pytest.mark.usefixtures("forked_services")

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SLOW = {"time_scale": 1.0, "step_base_ms": 20, "prefill_base_ms": 20}


async def test_the_hello_describes_the_worker(coordinator, start_worker, model):
    start_worker(PREFILL, "w7")
    hello = (await coordinator.stream()).hello
    assert (hello.worker_id, hello.role, hello.pid) == ("w7", PREFILL, os.getpid())
    assert hello.state == cluster_pb2.WORKER_STATE_SERVING
    assert (hello.model.name, hello.model.tokenizer) == ("demo", model)
    assert hello.fingerprint.block_size_tokens == hello.capacity.block_size_tokens == 16
    assert hello.capacity.kv_tokens == 8192
    assert hello.kv_address.startswith("127.0.0.1:")
    assert hello.incarnation
    assert hello.host_id
    assert set(hello.startup_ms) == {"process", "transfer", "weights", "kv", "warm_up"}
    assert hello.labels["host"] == socket.gethostname()


async def test_a_worker_warms_up_before_it_attaches(coordinator, start_worker):
    start_worker()
    stream = await coordinator.stream()
    load = await stream.load_after()
    # The warm-up computes a prompt and a token; its requests are gone and its steps not reported.
    assert load.num_steps >= 2
    assert (load.kv_tokens_used, load.num_running, list(load.steps)) == (0, 0, [])


async def test_a_whole_request_on_a_decode_worker(coordinator, start_worker, vocabulary):
    start_worker()
    stream = await coordinator.stream()
    prompt = list(range(10, 50))
    command = cluster_pb2.DecodeCommand(spec=spec("r", prompt, max_tokens=12))
    await coordinator.command(stream, decode=command)
    outputs = await stream.outputs("r")
    assert tokens_of(outputs) == expected_tokens(vocabulary, prompt, 12)
    assert "".join(output.delta.text for output in outputs) == vocabulary.tokenizer.decode(
        tokens_of(outputs)
    )
    assert [output.HasField("timings") for output in outputs] == [True] + [False] * 11
    assert outputs[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    await stream.idle()
    load = await stream.load_after()
    assert load.num_steps >= 12
    assert load.resident_bytes > 0


async def test_prompt_logprobs_of_one_step_fill_several_messages(coordinator, start_worker):
    start_worker(simulated=SLOW | {"prefill_base_ms": 500})
    stream = await coordinator.stream()
    # The others arrive while the first prompt is computed, and so end in one step.
    for name in ("first", "a", "b", "c"):
        command = cluster_pb2.DecodeCommand(spec=spec(name, list(range(10, 40)), max_tokens=1))
        command.spec.sampling.prompt_logprobs = 1
        await coordinator.command(stream, decode=command)
    steps = {}
    while len(steps) < 4:
        step = (await stream.next_of("step")).step
        (output,) = step.outputs
        assert len(output.finished.prompt_logprobs) == 30
        steps[output.request_id] = step.step
    assert steps["a"] == steps["b"] == steps["c"] > steps["first"]


async def test_an_attempt_with_a_handle_reports_plain_tokens_in_columns(
    coordinator, start_worker, vocabulary
):
    start_worker()
    stream = await coordinator.stream()
    prompts = {11: list(range(10, 50)), 12: list(range(20, 40))}
    for handle, prompt in prompts.items():
        command = cluster_pb2.DecodeCommand(spec=spec(f"r{handle}", prompt, max_tokens=12))
        command.spec.handle = handle
        await coordinator.command(stream, decode=command)
    deltas, full, num_ended = {11: [], 12: []}, {11: 0, 12: 0}, 0
    while num_ended < len(prompts):
        step = (await stream.next_of("step")).step
        columns = step.tokens
        rows = zip(
            columns.handles,
            columns.offsets,
            columns.token_ids,
            columns.num_text_chars,
            columns.deltas,
            strict=True,
        )
        for handle, offset, token_id, num_chars, encoded in rows:
            delta = common_pb2.TokenDelta.FromString(encoded)
            assert (delta.offset, list(delta.token_ids)) == (offset, [token_id])
            assert len(delta.text) == num_chars
            deltas[handle].append(delta)
        for output in step.outputs:
            handle = int(output.request_id.removeprefix("r"))
            assert handle not in columns.handles
            deltas[handle].append(output.delta)
            full[handle] += 1
            num_ended += output.HasField("finished")
    for handle, prompt in prompts.items():
        tokens = [token for delta in deltas[handle] for token in delta.token_ids]
        assert tokens == expected_tokens(vocabulary, prompt, 12)
        text = "".join(delta.text for delta in deltas[handle])
        assert text == vocabulary.tokenizer.decode(tokens)
        # The first output has timings and the last one the end, so both are full messages.
        assert full[handle] == 2


async def test_a_step_is_one_message_for_all_its_requests(coordinator, start_worker):
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    commands = [
        cluster_pb2.DecodeCommand(spec=spec(name, [5, 6, 7], max_tokens=4)) for name in "abc"
    ]
    await coordinator.command_batch(stream, *({"decode": command} for command in commands))
    ended: set[str] = set()
    largest = 0
    while len(ended) < 3:
        step = (await stream.next("step")).step
        names = [output.request_id for output in step.outputs]
        assert len(names) == len(set(names))
        largest = max(largest, len(names))
        ended |= {output.request_id for output in step.outputs if output.WhichOneof("end")}
    assert largest == 3


async def test_a_superseded_attempt_that_the_engine_rejects_leaves_the_newer_one_alone(
    coordinator, start_worker, vocabulary
):
    start_worker()
    stream = await coordinator.stream()
    too_long = spec("r", [5] * 2000, attempt=1, max_tokens=4)
    fits = spec("r", [5, 6, 7], attempt=2, max_tokens=4)
    commands = [cluster_pb2.DecodeCommand(spec=one) for one in (too_long, fits)]
    await coordinator.command_batch(stream, *({"decode": command} for command in commands))
    outputs = await stream.outputs("r")
    assert {output.attempt for output in outputs} == {2}
    assert tokens_of(outputs) == expected_tokens(vocabulary, [5, 6, 7], 4)
    await stream.idle()


async def test_a_handoff_between_two_workers(coordinator, start_worker, vocabulary):
    start_worker(PREFILL, "p")
    prefill = await coordinator.stream()
    second = type(coordinator)(generation=1)
    await second.start()
    try:
        decode_worker = start_worker(DECODE, "d", address=second.address)
        decode = await second.stream()
        prompt, handoff_id = [3 + index % 90 for index in range(100)], secrets.token_bytes(16)
        handoff = plan(handoff_id, decode.hello.kv_address, len(prompt))
        await coordinator.command(
            prefill,
            prefill=cluster_pb2.PrefillCommand(
                spec=spec("r", prompt, max_tokens=10), handoff=handoff
            ),
        )
        first = await prefill.outputs("r")
        assert first[-1].finished.reason == common_pb2.FINISH_REASON_UNSPECIFIED
        sent = (await prefill.next_of("handoff")).handoff
        assert (sent.handoff_id, sent.request_id) == (handoff_id, "r")
        assert sent.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        assert sent.num_bytes == 4 * 7 * 1024
        known = tokens_of(first)
        await second.command(
            decode,
            decode=cluster_pb2.DecodeCommand(
                spec=spec("r", prompt, known=known, max_tokens=10), handoff=handoff
            ),
        )
        rest = await decode.outputs("r")
        assert known + tokens_of(rest) == expected_tokens(vocabulary, prompt, 10)
        assert rest[0].delta.offset == 1
        assert rest[0].timings.num_handoff_tokens == 100
        await prefill.idle()
        await decode.idle()
        assert not decode_worker.task.done()
    finally:
        await second.stop()


async def test_a_decode_does_not_wait_for_a_cancelled_handoff(
    coordinator, start_worker, vocabulary
):
    start_worker(DECODE)
    stream = await coordinator.stream()
    prompt, handoff = [5, 6, 7], plan(secrets.token_bytes(16), "", 3, commit_timeout_s=3600)
    known = expected_tokens(vocabulary, prompt, 1)
    decode = cluster_pb2.DecodeCommand(
        spec=spec("r", prompt, known=known, max_tokens=6), handoff=handoff
    )
    await coordinator.command(stream, decode=decode)
    cancel = cluster_pb2.CancelCommand(request_id="r", handoff_id=handoff.handoff_id)
    await coordinator.command(stream, cancel=cancel)
    # The output comes although the commit timeout has not passed.
    assert known + tokens_of(await stream.outputs("r")) == expected_tokens(vocabulary, prompt, 6)
    await stream.idle()


async def test_a_prefill_without_a_reservation_runs_and_reports_the_failed_handoff(
    coordinator, start_worker, vocabulary
):
    start_worker(PREFILL, kv_transfer={"send_bytes": 4096})
    stream = await coordinator.stream()
    prompt = list(range(5, 105))
    command = cluster_pb2.PrefillCommand(
        spec=spec("r", prompt, max_tokens=5),
        handoff=plan(secrets.token_bytes(16), "127.0.0.1:9", 100),
    )
    await coordinator.command(stream, prefill=command)
    report = (await stream.next("handoff")).handoff
    assert report.state == kv_transfer_pb2.HANDOFF_STATE_FAILED
    assert report.detail
    assert tokens_of(await stream.outputs("r")) == expected_tokens(vocabulary, prompt, 1)
    await stream.idle()


async def test_a_request_that_ends_with_its_first_token_releases_its_handoff(
    coordinator, start_worker
):
    start_worker(PREFILL)
    stream = await coordinator.stream()
    command = cluster_pb2.PrefillCommand(
        spec=spec("r", [5, 6, 7], max_tokens=1),
        handoff=plan(secrets.token_bytes(16), "127.0.0.1:9", 3),
    )
    await coordinator.command(stream, prefill=command)
    outputs = await stream.outputs("r")
    assert outputs[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    await stream.idle()


async def test_cancel_frees_a_request_at_every_stage(coordinator, start_worker):
    """Cancels while reserving, prefilling, waiting for a handoff, and decoding."""
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    long = [7] * 900
    ids = [secrets.token_bytes(16) for _ in range(3)]
    prefill = cluster_pb2.PrefillCommand(
        spec=spec("a", long, max_tokens=50), handoff=plan(ids[0], "127.0.0.1:9", 900)
    )
    await coordinator.command(stream, prefill=prefill)
    await coordinator.command(
        stream, cancel=cluster_pb2.CancelCommand(request_id="a", attempt=1, handoff_id=ids[0])
    )
    prefill.spec.request_id, prefill.handoff.handoff_id = "b", ids[1]
    await coordinator.command(stream, prefill=prefill)
    waiting = cluster_pb2.DecodeCommand(
        spec=spec("c", long, max_tokens=50), handoff=plan(ids[2], "127.0.0.1:9", 900)
    )
    await coordinator.command(stream, decode=waiting)
    decode = cluster_pb2.DecodeCommand(spec=spec("d", [5, 6], max_tokens=500))
    await coordinator.command(stream, decode=decode)
    while True:
        step = (await stream.next_of("step")).step
        if any(output.request_id == "d" for output in step.outputs):
            break
    for name, handoff_id in (("b", ids[1]), ("c", ids[2]), ("d", b"")):
        cancel = cluster_pb2.CancelCommand(request_id=name, attempt=1, handoff_id=handoff_id)
        await coordinator.command(stream, cancel=cancel)
    # An unknown request with a handoff that has not come.
    await coordinator.command(
        stream,
        cancel=cluster_pb2.CancelCommand(
            request_id="x", attempt=1, handoff_id=secrets.token_bytes(16)
        ),
    )
    await stream.load_after()
    await stream.idle()
    again = cluster_pb2.DecodeCommand(spec=spec("e", [5, 6], max_tokens=2))
    await coordinator.command(stream, decode=again)
    assert len(tokens_of(await stream.outputs("e"))) == 2


async def test_cancel_after_the_first_token_while_the_handoff_is_in_progress(
    coordinator, start_worker
):
    start_worker(PREFILL)
    stream = await coordinator.stream()
    # The kernel accepts connections on this port, and no process ever answers on them.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        handoff_id = secrets.token_bytes(16)
        command = cluster_pb2.PrefillCommand(
            spec=spec("r", list(range(5, 105)), max_tokens=5),
            handoff=plan(handoff_id, f"{host}:{port}", 100),
        )
        await coordinator.command(stream, prefill=command)
        outputs = await stream.outputs("r")
        assert outputs[-1].finished.reason == common_pb2.FINISH_REASON_UNSPECIFIED
        load = await stream.load_after()
        assert load.staging_bytes_used > 0
        # A worker that only sends fills this direction alone.
        assert load.staging_bytes_total == stream.hello.capacity.max_send_bytes
        cancel = cluster_pb2.CancelCommand(request_id="r", attempt=1, handoff_id=handoff_id)
        await coordinator.command(stream, cancel=cancel)
        await stream.load_after()
        await stream.idle()


async def test_the_worker_enforces_the_deadline(coordinator, start_worker):
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    command = cluster_pb2.DecodeCommand(spec=spec("r", [5], max_tokens=900, timeout_s=0.2))
    await coordinator.command(stream, decode=command)
    outputs = await stream.outputs("r")
    assert outputs[-1].failed.code == code_pb2.DEADLINE_EXCEEDED
    await stream.idle()


async def test_a_newer_attempt_ends_the_older(coordinator, start_worker, vocabulary):
    start_worker(simulated=SLOW)
    stream = await coordinator.stream()
    for attempt in (1, 2, 1):
        command = cluster_pb2.DecodeCommand(
            spec=spec("r", [5, 9], attempt=attempt, max_tokens=900 if attempt == 1 else 5)
        )
        await coordinator.command(stream, decode=command)
    outputs = await stream.outputs("r")
    newer = [output for output in outputs if output.attempt == 2]
    assert outputs[-1].attempt == 2
    assert tokens_of(newer) == expected_tokens(vocabulary, [5, 9], 5)
    await stream.idle()


async def test_a_rejected_request_does_not_affect_others(coordinator, start_worker):
    start_worker(elastic=False, decode={"max_requests_per_worker": 1}, simulated=SLOW)
    stream = await coordinator.stream()
    bad = cluster_pb2.DecodeCommand(spec=spec("bad", [10**6], max_tokens=5))
    await coordinator.command(stream, decode=bad)
    outputs = await stream.outputs("bad")
    assert outputs[-1].failed.code == code_pb2.INVALID_ARGUMENT
    assert "token id" in outputs[-1].failed.message
    await stream.idle()
    # A worker holds twice its pool's limit, so the third of three is refused.
    commands = [cluster_pb2.DecodeCommand(spec=spec(one, [5], max_tokens=5)) for one in "abc"]
    await coordinator.command_batch(stream, *({"decode": command} for command in commands))
    ended: dict[str, int] = {}
    while len(ended) < 3:
        for output in (await stream.next("step")).step.outputs:
            if output.WhichOneof("end"):
                ended[output.request_id] = output.failed.code
    assert ended == {"a": 0, "b": 0, "c": code_pb2.RESOURCE_EXHAUSTED}


async def test_a_role_change_is_confirmed(coordinator, start_worker):
    start_worker(DECODE)
    stream = await coordinator.stream()
    await coordinator.command(stream, set_role=cluster_pb2.SetRoleCommand(role=PREFILL))
    change = (await stream.next("state_changed")).state_changed
    assert (change.role, change.state) == (PREFILL, cluster_pb2.WORKER_STATE_SERVING)
    command = cluster_pb2.PrefillCommand(spec=spec("r", [5, 6], max_tokens=5))
    await coordinator.command(stream, prefill=command)
    outputs = await stream.outputs("r")
    assert outputs[-1].finished.reason == common_pb2.FINISH_REASON_UNSPECIFIED
    await stream.idle()
