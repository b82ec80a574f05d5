"""A worker fetches a prompt's first tokens from another worker that has them cached."""

import contextlib
import secrets
import socket

import pytest

from baton.engine.sim_tokens import expected_tokens
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.worker.scripted_coordinator import (
    WAIT_S,
    ScriptedCoordinator,
    plan,
    send_prefix,
    spec,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("forked_services")

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
RELEASED = kv_transfer_pb2.HANDOFF_STATE_RELEASED
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
BLOCK = 16
TURN = [3 + index % 90 for index in range(100)]
# 100 tokens and an answer of 12, of which the last was never computed: 6 full blocks.
ANSWER, HELD = 12, 96
NEXT = [20 + index % 70 for index in range(40)]
BLOCK_BYTES = 4 * 1024
# A prompt of nearly as many tokens evicts everything else from the device.
DEVICE_TOKENS = 1024
OTHER = [7 + index % 83 for index in range(DEVICE_TOKENS - 8)]


class Workers:
    """A holder, a reader, and the worker that gets the reader's handoffs."""

    def __init__(self, streams, vocabulary):
        self.holder, self.reader, self.decoder = streams
        self._vocabulary = vocabulary

    async def tell(self, which, **command):
        coordinator, stream = which
        await coordinator.command(stream, **command)

    def address(self, which):
        return which[1].hello.kv_address

    def expected(self, prompt, count):
        return expected_tokens(self._vocabulary, prompt, count)

    async def computes(self, which, name, prompt, max_tokens=ANSWER):
        """A worker computes a whole request; returns its tokens."""
        command = cluster_pb2.DecodeCommand(spec=spec(name, prompt, max_tokens=max_tokens))
        await self.tell(which, decode=command)
        tokens = tokens_of(await which[1].outputs(name))
        assert tokens == self.expected(prompt, max_tokens)
        return tokens

    async def asks(
        self, prompt, num_tokens, skip_tokens=0, target=None, least_tokens=0, handoff_id=b""
    ):
        """Tells the holder to send tokens of a prompt to the reader; returns the handoff's id."""
        handoff_id = handoff_id or secrets.token_bytes(16)
        handoff = plan(handoff_id, target or self.address(self.reader), num_tokens)
        handoff.skip_tokens, handoff.least_tokens = skip_tokens, least_tokens
        await self.tell(self.holder, send_prefix=send_prefix(prompt, handoff))
        return handoff.handoff_id

    async def idle(self):
        for _, stream in (self.holder, self.reader, self.decoder):
            await stream.idle()


def fetch(handoff_id, num_tokens, skip_tokens=0, timeout_s=WAIT_S):
    made = cluster_pb2.FetchPlan(
        handoff_id=handoff_id, num_tokens=num_tokens, skip_tokens=skip_tokens
    )
    made.timeout.FromMicroseconds(round(timeout_s * 1e6))
    return made


@pytest.fixture
async def workers(coordinator, start_worker, vocabulary):
    async with contextlib.AsyncExitStack() as stack:
        started = []
        for name in ("h", "r", "d"):
            own = ScriptedCoordinator()
            await own.start()
            stack.push_async_callback(own.stop)
            start_worker(
                DECODE,
                name,
                address=own.address,
                simulated={"kv_tokens": DEVICE_TOKENS},
                kv_store={"host_bytes": 2**25},
            )
            started.append((own, await own.stream()))
        yield Workers(started, vocabulary)


async def reads(workers, name, prompt, plan, max_tokens=8):
    """The reader computes a request that fetches; returns its timings."""
    command = cluster_pb2.DecodeCommand(spec=spec(name, prompt, max_tokens=max_tokens), fetch=plan)
    await workers.tell(workers.reader, decode=command)
    return await read(workers, name, prompt, max_tokens)


async def read(workers, name, prompt, max_tokens=8):
    outputs = await workers.reader[1].outputs(name)
    assert tokens_of(outputs) == workers.expected(prompt, max_tokens)
    return outputs[0].timings


async def conversation(workers):
    """The holder serves a turn; returns the prompt of the next one."""
    return [*TURN, *await workers.computes(workers.holder, "turn 1", TURN), *NEXT]


async def test_the_next_turn_loads_what_another_worker_has_computed(workers):
    prompt = await conversation(workers)
    handoff_id = await workers.asks(prompt, HELD)
    timings = await reads(workers, "turn 2", prompt, fetch(handoff_id, HELD))
    assert (timings.num_fetched_tokens, timings.num_cached_tokens) == (HELD, 0)
    assert (timings.num_handoff_tokens, timings.num_host_tokens) == (0, 0)
    sent = (await workers.holder[1].next_of("handoff")).handoff
    received = (await workers.reader[1].next_of("handoff")).handoff
    assert (sent.state, received.state) == (COMMITTED, RELEASED)
    assert sent.num_bytes == received.num_bytes == HELD // BLOCK * BLOCK_BYTES
    assert (sent.handoff_id, received.handoff_id) == (handoff_id, handoff_id)
    await workers.idle()
    # The fetched blocks are in the reader's prefix cache.
    again = cluster_pb2.DecodeCommand(spec=spec("again", prompt, max_tokens=3))
    await workers.tell(workers.reader, decode=again)
    assert (await read(workers, "again", prompt, 3)).num_cached_tokens == 144


async def test_tokens_that_the_reader_has_are_left_out(workers):
    prompt = await conversation(workers)
    await workers.computes(workers.reader, "beginning", prompt[:50], 1)
    handoff_id = await workers.asks(prompt, HELD, 48)
    timings = await reads(workers, "turn 2", prompt, fetch(handoff_id, HELD, 48))
    assert (timings.num_fetched_tokens, timings.num_cached_tokens) == (HELD - 48, 48)
    assert (await workers.holder[1].next_of("handoff")).handoff.num_bytes == 3 * BLOCK_BYTES
    await workers.idle()


async def test_tokens_in_the_reader_s_host_memory_are_left_out(workers):
    prompt = await conversation(workers)
    await workers.computes(workers.reader, "beginning", prompt[:50], 1)
    await workers.computes(workers.reader, "other", OTHER, 1)
    handoff_id = await workers.asks(prompt, HELD, 48)
    plan_ = fetch(handoff_id, HELD, 48)
    plan_.host_tokens = 48
    timings = await reads(workers, "turn 2", prompt, plan_)
    assert (timings.num_fetched_tokens, timings.num_host_tokens) == (HELD - 48, 48)
    assert timings.num_cached_tokens == 0
    assert (await workers.holder[1].next_of("handoff")).handoff.num_bytes == 3 * BLOCK_BYTES
    await workers.idle()


async def held(workers, num_tokens):
    """Waits until the reader holds this many tokens on its device for requests."""
    while (await workers.reader[1].load_after()).kv_tokens_used != num_tokens:
        pass


@pytest.mark.parametrize("where", ["device", "host"])
async def test_left_out_tokens_stay_on_the_device_until_the_fetch_is_there(workers, where):
    prompt = await conversation(workers)
    await workers.computes(workers.reader, "beginning", prompt[:50], 1)
    handoff_id = secrets.token_bytes(16)
    plan_ = fetch(handoff_id, HELD, 48)
    if where == "host":
        await workers.computes(workers.reader, "other", OTHER, 1)
        plan_.host_tokens = 48
    command = cluster_pb2.DecodeCommand(spec=spec("turn 2", prompt, max_tokens=8), fetch=plan_)
    await workers.tell(workers.reader, decode=command)
    await held(workers, 48)
    # These would evict everything that the device does not hold for a request.
    for number in range(3):
        await workers.computes(workers.reader, f"meanwhile {number}", OTHER[number:-64], 1)
    await workers.asks(prompt, HELD, 48, handoff_id=handoff_id)
    timings = await read(workers, "turn 2", prompt)
    assert timings.num_fetched_tokens == HELD - 48
    assert timings.num_cached_tokens + timings.num_host_tokens == 48
    await workers.idle()
    await held(workers, 0)


@pytest.mark.parametrize("way", ["cancelled", "too late"])
async def test_left_out_tokens_are_let_go_when_the_fetch_does_not_come(workers, way):
    prompt = await conversation(workers)
    await workers.computes(workers.reader, "beginning", prompt[:50], 1)
    timeout_s = WAIT_S if way == "cancelled" else 0.5
    plan_ = fetch(secrets.token_bytes(16), HELD, 48, timeout_s)
    command = cluster_pb2.DecodeCommand(spec=spec("turn 2", prompt, max_tokens=8), fetch=plan_)
    await workers.tell(workers.reader, decode=command)
    if way == "cancelled":
        await held(workers, 48)
        cancel = cluster_pb2.CancelCommand(request_id="turn 2", attempt=1)
        await workers.tell(workers.reader, cancel=cancel)
    else:
        assert (await read(workers, "turn 2", prompt)).num_fetched_tokens == 0
    await workers.idle()
    await held(workers, 0)
    assert await workers.computes(workers.reader, "whole device", OTHER, 1)


async def test_a_prompt_is_computed_when_host_memory_lost_what_was_left_out(workers):
    prompt = await conversation(workers)
    handoff_id = await workers.asks(prompt, HELD, 48)
    plan_ = fetch(handoff_id, HELD, 48)
    plan_.host_tokens = 48
    timings = await reads(workers, "turn 2", prompt, plan_)
    assert (timings.num_fetched_tokens, timings.num_host_tokens) == (0, 0)
    await workers.idle()


async def test_a_request_is_cancelled_while_its_own_blocks_are_loaded(workers):
    prompt = await conversation(workers)
    await workers.computes(workers.reader, "beginning", prompt[:50], 1)
    await workers.computes(workers.reader, "other", OTHER, 1)
    plan_ = fetch(secrets.token_bytes(16), HELD, 48)
    plan_.host_tokens = 48
    command = cluster_pb2.DecodeCommand(spec=spec("turn 2", prompt, max_tokens=8), fetch=plan_)
    await workers.tell(workers.reader, decode=command)
    await workers.tell(
        workers.reader, cancel=cluster_pb2.CancelCommand(request_id="turn 2", attempt=1)
    )
    await workers.idle()
    # Nothing holds their blocks on the device any more.
    assert await workers.computes(workers.reader, "again", OTHER, 1)


async def test_a_prompt_is_computed_when_the_reader_lost_what_was_left_out(workers):
    prompt = await conversation(workers)
    handoff_id = await workers.asks(prompt, HELD, 48)
    timings = await reads(workers, "turn 2", prompt, fetch(handoff_id, HELD, 48))
    assert (timings.num_fetched_tokens, timings.num_cached_tokens) == (0, 0)
    await workers.idle()


async def test_a_prompt_of_a_fetch_is_handed_over_in_turn(workers):
    prompt = await conversation(workers)
    handoff_id = await workers.asks(prompt, HELD)
    handoff = plan(secrets.token_bytes(16), workers.address(workers.decoder), len(prompt))
    made = spec("turn 2", prompt, max_tokens=8)
    command = cluster_pb2.PrefillCommand(spec=made, handoff=handoff, fetch=fetch(handoff_id, HELD))
    await workers.tell(workers.reader, prefill=command)
    first = await workers.reader[1].outputs("turn 2")
    assert first[0].timings.num_fetched_tokens == HELD
    made.known_token_ids.extend(tokens_of(first))
    command = cluster_pb2.DecodeCommand(spec=made, handoff=handoff)
    await workers.tell(workers.decoder, decode=command)
    rest = await workers.decoder[1].outputs("turn 2")
    assert tokens_of(first) + tokens_of(rest) == workers.expected(prompt, 8)
    assert rest[0].timings.num_handoff_tokens == len(prompt)
    await workers.idle()


async def half_held(workers):
    """The holder has three of six blocks; returns the prompt."""
    prompt = [*TURN, *workers.expected(TURN, ANSWER), *NEXT]
    await workers.computes(workers.holder, "turn 1", TURN[: 3 * BLOCK + 1], 1)
    return prompt


@pytest.mark.parametrize(("skip_tokens", "least_tokens"), [(0, BLOCK), (0, 48), (BLOCK, 32)])
async def test_a_holder_without_a_block_sends_the_blocks_before_it(
    workers, skip_tokens, least_tokens
):
    prompt = await half_held(workers)
    if skip_tokens:
        await workers.computes(workers.reader, "beginning", prompt[: skip_tokens + 1], 1)
    handoff_id = await workers.asks(prompt, HELD, skip_tokens, least_tokens=least_tokens)
    timings = await reads(workers, "turn 2", prompt, fetch(handoff_id, HELD, skip_tokens))
    assert timings.num_fetched_tokens == 48 - skip_tokens
    assert timings.num_cached_tokens == skip_tokens
    sent = (await workers.holder[1].next_of("handoff")).handoff
    received = (await workers.reader[1].next_of("handoff")).handoff
    assert (sent.state, received.state) == (COMMITTED, RELEASED)
    assert sent.num_bytes == received.num_bytes == (48 - skip_tokens) // BLOCK * BLOCK_BYTES
    await workers.idle()


async def test_a_fetch_that_is_cancelled_while_it_shrinks_leaves_nothing(workers):
    prompt = await half_held(workers)
    handoff_id = await workers.asks(prompt, HELD, least_tokens=BLOCK)
    cancel = cluster_pb2.CancelCommand(handoff_id=handoff_id)
    await workers.tell(workers.holder, cancel=cancel)
    drop = cluster_pb2.CancelCommand(request_id="turn 2", handoff_id=handoff_id)
    await workers.tell(workers.reader, cancel=drop)
    await workers.idle()


@pytest.mark.parametrize(("num_held", "least_tokens"), [(0, 0), (5, 0), (0, 16), (3, 64), (5, 96)])
async def test_a_holder_without_enough_blocks_sends_and_computes_nothing(
    workers, num_held, least_tokens
):
    prompt = [*TURN, *workers.expected(TURN, ANSWER), *NEXT]
    if num_held:
        await workers.computes(workers.holder, "turn 1", TURN[: num_held * BLOCK + 1], 1)
    before = (await workers.holder[1].load_after()).num_steps
    handoff_id = await workers.asks(prompt, HELD, least_tokens=least_tokens)
    sent = (await workers.holder[1].next_of("handoff")).handoff
    assert (sent.state, sent.handoff_id, sent.num_bytes) == (FAILED, handoff_id, 0)
    assert (await workers.holder[1].load_after()).num_steps == before
    # The coordinator tells the reader, which computes the prompt.
    command = cluster_pb2.DecodeCommand(
        spec=spec("turn 2", prompt, max_tokens=8), fetch=fetch(handoff_id, HELD)
    )
    await workers.tell(workers.reader, decode=command)
    drop = cluster_pb2.CancelCommand(request_id="turn 2", handoff_id=handoff_id)
    await workers.tell(workers.reader, cancel=drop)
    assert (await read(workers, "turn 2", prompt)).num_fetched_tokens == 0
    await workers.idle()


async def test_the_prompt_is_computed_when_the_time_is_over(workers):
    prompt = [*TURN, *workers.expected(TURN, ANSWER), *NEXT]
    timings = await reads(workers, "r", prompt, fetch(secrets.token_bytes(16), HELD, 0, 0.05))
    assert timings.num_fetched_tokens == 0
    assert timings.handoff_wait_us >= 50_000
    await workers.idle()


@pytest.mark.parametrize("num_held", [3, 6])
async def test_another_request_waits_for_the_same_fetch(workers, num_held):
    prompt = await (conversation if num_held == 6 else half_held)(workers)
    other = [*prompt[:HELD], *NEXT[::-1]]
    handoff_id = secrets.token_bytes(16)
    for name, tokens, plan_ in (
        ("second", other, fetch(handoff_id, 0)),
        ("first", prompt, fetch(handoff_id, HELD)),
    ):
        command = cluster_pb2.DecodeCommand(spec=spec(name, tokens, max_tokens=8), fetch=plan_)
        await workers.tell(workers.reader, decode=command)
    handoff = plan(handoff_id, workers.address(workers.reader), HELD)
    handoff.least_tokens = BLOCK
    await workers.tell(workers.holder, send_prefix=send_prefix(prompt, handoff))
    outputs = {"first": [], "second": []}
    while any(not found or found[-1].WhichOneof("end") is None for found in outputs.values()):
        for output in (await workers.reader[1].next_of("step")).step.outputs:
            outputs[output.request_id].append(output)
    assert tokens_of(outputs["first"]) == workers.expected(prompt, 8)
    assert tokens_of(outputs["second"]) == workers.expected(other, 8)
    assert outputs["first"][0].timings.num_fetched_tokens == num_held * BLOCK
    timings = outputs["second"][0].timings
    # The first request computes the blocks that the holder lacks.
    assert num_held * BLOCK <= timings.num_cached_tokens <= HELD
    assert timings.num_fetched_tokens == 0
    await workers.idle()


@pytest.mark.parametrize("is_known", [True, False])
async def test_another_request_goes_on_when_the_fetch_it_waits_for_fails(workers, is_known):
    prompt = [*TURN, *NEXT]
    handoff_id = secrets.token_bytes(16)
    command = cluster_pb2.DecodeCommand(
        spec=spec("second", prompt, max_tokens=8),
        fetch=fetch(handoff_id, 0, timeout_s=WAIT_S if is_known else 0.05),
    )
    await workers.tell(workers.reader, decode=command)
    if is_known:
        drop = cluster_pb2.CancelCommand(request_id="first", handoff_id=handoff_id)
        await workers.tell(workers.reader, cancel=drop)
    assert (await read(workers, "second", prompt)).num_cached_tokens == 0
    await workers.idle()


async def test_a_cancelled_request_drops_what_it_fetches(workers):
    prompt = await conversation(workers)
    handoff_id = secrets.token_bytes(16)
    command = cluster_pb2.DecodeCommand(
        spec=spec("turn 2", prompt, max_tokens=8), fetch=fetch(handoff_id, HELD)
    )
    await workers.tell(workers.reader, decode=command)
    cancel = cluster_pb2.CancelCommand(request_id="turn 2", attempt=1)
    await workers.tell(workers.reader, cancel=cancel)
    handoff = plan(handoff_id, workers.address(workers.reader), HELD)
    await workers.tell(workers.holder, send_prefix=send_prefix(prompt, handoff))
    sent = (await workers.holder[1].next_of("handoff")).handoff
    assert sent.state == FAILED
    await workers.idle()


@pytest.mark.parametrize("is_filled", [False, True])
async def test_a_holder_reports_a_fetch_that_was_cancelled(workers, is_filled):
    """The engine has still work to do for it, or has already filled its staging."""
    prompt = await conversation(workers)
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        target = f"127.0.0.1:{never_answers.getsockname()[1]}"
        handoff_id = await workers.asks(prompt, HELD, target=target)
        while is_filled:
            load = await workers.holder[1].load_after()
            if load.staging_bytes_used and not load.num_running + load.num_waiting:
                break
        cancel = cluster_pb2.CancelCommand(handoff_id=handoff_id)
        await workers.tell(workers.holder, cancel=cancel)
        sent = (await workers.holder[1].next_of("handoff")).handoff
        assert (sent.state, sent.handoff_id) == (FAILED, handoff_id)
        await workers.idle()
