"""Handoffs between two simulated engines and their real transfer services."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from baton.engine.base import EngineDead, EngineOutput, EngineRequest, Finish
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import HandoffEvent, TransferClient
from baton.runtime import demo_model
from baton.runtime.config import KvTransferConfig, SimulatedConfig
from baton.runtime.prompts.prompt_images import keyed_tokens
from baton.v1 import common_pb2, inference_pb2, kv_transfer_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAGING = {"send_bytes": 2**20, "receive_bytes": 2**20}
SETTINGS = SimulatedConfig(
    time_scale=0, max_model_len=1024, kv_tokens=2048, max_num_batched_tokens=64, block_bytes=256
)


@dataclass
class Side:
    engine: SimulatedEngine
    transfer: TransferClient

    async def finish(self, request: EngineRequest) -> tuple[list[int], EngineOutput, EngineOutput]:
        """Submits a request; returns its tokens, its first and its last output."""
        await self.engine.submit(request)
        return await self.outputs_of(request.engine_request_id)

    async def outputs_of(self, name: str) -> tuple[list[int], EngineOutput, EngineOutput]:
        tokens: list[int] = []
        first: EngineOutput | None = None
        async with asyncio.timeout(60):
            while True:
                for output in (await self.engine.next_step()).outputs:
                    assert output.engine_request_id == name
                    first = first or output
                    tokens += output.token_ids
                    if output.finish is not None:
                        return tokens, first, output


@dataclass
class Pair:
    sender: Side
    receiver: Side
    vocabulary: Vocabulary
    layout: KvLayout
    directory: Path

    async def open(
        self, prompt: list[int], target: TransferClient | None = None, skip_tokens: int = 0
    ) -> SendHandoff:
        """Opens a send to the receiver or to another service."""
        handoff_id = secrets.token_bytes(16)
        num_tokens = len(prompt) - skip_tokens
        num_blocks = -(-num_tokens // SETTINGS.block_size_tokens)
        address = (target or self.receiver.transfer).address
        offset = await self.sender.transfer.open_send(
            handoff_id, address, num_blocks, num_tokens, 5.0
        )
        return SendHandoff(handoff_id, offset, len(prompt), skip_tokens)

    async def nothing_left(self) -> None:
        async with asyncio.timeout(60):
            for side in (self.sender, self.receiver):
                side.engine.check_integrity()
                assert side.engine.take_load().kv_tokens_used == 0
                while True:
                    stats = await side.transfer.stats()
                    if stats.send_bytes_used == stats.receive_bytes_used == 0:
                        break
                    # The service frees staging half a second after an abort, without a
                    # notification.
                    await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Callable[[], Awaitable[list[TransferClient]]]]:
    """Two that every test leaves as it found them; another in the place of one that has ended."""
    directory, config = tmp_path_factory.mktemp("s"), KvTransferConfig(**STAGING)
    found: list[TransferClient] = []
    numbers = itertools.count()

    async def both() -> list[TransferClient]:
        for ended in [one for one in found if one.gone.is_set()]:
            await ended.close()
            found.remove(ended)
        while len(found) < 2:
            socket_path = str(directory / f"{next(numbers)}.sock")
            found.append(await TransferClient.start(config, socket_path))
        return found

    yield both
    for one in found:
        await one.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(
    services: Callable[[], Awaitable[list[TransferClient]]], tmp_path: Path
) -> AsyncIterator[Pair]:
    model = demo_model.ensure("demo", weights=False, root=tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for transfer in await services():
            engine = SimulatedEngine(model, "m", SETTINGS, transfer.socket_path)
            stack.push_async_callback(engine.stop)
            info = await engine.start()
            await transfer.configure(info.layout.fingerprint())
            sides.append(Side(engine, transfer))
        yield Pair(sides[0], sides[1], Vocabulary.load(model), info.layout, tmp_path)


def prefill(prompt: list[int], send: SendHandoff) -> EngineRequest:
    sampling = common_pb2.SamplingParams(max_tokens=8)
    return EngineRequest("p", prompt, sampling, prefill_only=True, send=send)


def decode(
    prompt: list[int], known: list[int], handoff_id: bytes, timeout_s: float = 5.0
) -> EngineRequest:
    return EngineRequest(
        "d",
        prompt,
        common_pb2.SamplingParams(max_tokens=8),
        known_token_ids=known,
        receive=ReceiveHandoff(handoff_id, len(prompt), timeout_s),
    )


async def committed(side: Side, handoff_id: bytes) -> None:
    async with asyncio.timeout(60):
        while True:
            for event in await side.transfer.next_events():
                if event.handoff_id == handoff_id and event.state == (
                    kv_transfer_pb2.HANDOFF_STATE_COMMITTED
                ):
                    return


async def ended_badly(side: Side, handoff_id: bytes) -> HandoffEvent:
    """Waits for a side's report of a failed handoff; returns it."""
    async with asyncio.timeout(60):
        while True:
            for event in await side.transfer.next_events():
                if event.handoff_id == handoff_id and event.reason:
                    return event


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 300])
async def test_a_prompt_is_handed_over_and_goes_on(pair: Pair, length: int) -> None:
    prompt = [(7 * index + length) % 200 for index in range(length)]
    send = await pair.open(prompt)
    first, _, cut = await pair.sender.finish(prefill(prompt, send))
    assert cut.finish is Finish.CUT
    rest, output, last = await pair.receiver.finish(decode(prompt, first, send.handoff_id))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert (output.num_handoff_tokens, last.finish) == (length, Finish.LENGTH)
    await pair.nothing_left()


async def test_images_are_handed_over_without_their_files(pair: Pair) -> None:
    prompt = [(7 * index) % 200 for index in range(100)]
    images = [common_pb2.PromptImage(id="a", offset=20, num_tokens=40)]
    chat = inference_pb2.ChatPrompt()
    keyed = keyed_tokens(prompt, images)
    expected = expected_tokens(pair.vocabulary, keyed, 8)
    send = await pair.open(prompt)
    asked = dataclasses.replace(prefill(prompt, send), images=images, chat=chat)
    first, _, _ = await pair.sender.finish(asked)
    assert first == expected[:1] != expected_tokens(pair.vocabulary, prompt, 1)
    wanted = dataclasses.replace(decode(prompt, first, send.handoff_id), images=images)
    rest, output, _ = await pair.receiver.finish(wanted)
    assert first + rest == expected
    assert output.num_handoff_tokens == 100
    # A handoff that does not come: the cache holds the image now, but not another image.
    late = dataclasses.replace(decode(prompt, first, secrets.token_bytes(16), 0.0), images=images)
    rest, output, _ = await pair.receiver.finish(late)
    assert (first + rest, output.num_cached_tokens) == (expected, 96)
    other = [common_pb2.PromptImage(id="b", offset=20, num_tokens=40)]
    tokens, output, _ = await pair.receiver.finish(dataclasses.replace(late, images=other))
    assert (tokens, output.finish) == ([], Finish.PREFIX_GONE)
    await pair.nothing_left()


async def test_tokens_cached_by_the_receiver_are_left_out(pair: Pair) -> None:
    prompt = [(7 * index) % 200 for index in range(100)]
    earlier = EngineRequest("e", prompt[:90], common_pb2.SamplingParams(max_tokens=1))
    await pair.receiver.finish(earlier)
    before = (await pair.receiver.transfer.stats()).bytes_received
    send = await pair.open(prompt, skip_tokens=80)
    first, _, _ = await pair.sender.finish(prefill(prompt, send))
    request = decode(prompt, first, send.handoff_id)
    receive = ReceiveHandoff(send.handoff_id, len(prompt), 5.0, skip_tokens=80)
    rest, output, _ = await pair.receiver.finish(dataclasses.replace(request, receive=receive))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 20
    stats = await pair.receiver.transfer.stats()
    assert stats.bytes_received - before == pair.layout.handoff_bytes(2)
    await pair.nothing_left()


async def test_a_request_without_its_prefix_is_returned_and_handed_over_again(
    pair: Pair,
) -> None:
    prompt = [(7 * index) % 200 for index in range(100)]
    send = await pair.open(prompt, skip_tokens=80)
    first, _, _ = await pair.sender.finish(prefill(prompt, send))
    request = decode(prompt, first, send.handoff_id)
    receive = ReceiveHandoff(send.handoff_id, len(prompt), 5.0, skip_tokens=80)
    tokens, _, last = await pair.receiver.finish(dataclasses.replace(request, receive=receive))
    assert (tokens, last.finish) == ([], Finish.PREFIX_GONE)
    await pair.nothing_left()
    # The sender still has the prompt, so only its end is computed again.
    again = await pair.open(prompt)
    _, output, _ = await pair.sender.finish(prefill(prompt, again))
    assert output.num_cached_tokens == 96
    rest, output, _ = await pair.receiver.finish(decode(prompt, first, again.handoff_id))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 100
    await pair.nothing_left()


@pytest.mark.parametrize("num_known", [2, 3, 7])
async def test_known_tokens_are_handed_over_with_the_prompt(pair: Pair, num_known: int) -> None:
    prompt = [(7 * index) % 200 for index in range(30)]
    expected = expected_tokens(pair.vocabulary, prompt, 8)
    known = expected[:num_known]
    longer = prompt + known[:-1]
    send = await pair.open(longer)
    await pair.sender.finish(prefill(longer, send))
    request = decode(prompt, known, send.handoff_id)
    receive = ReceiveHandoff(send.handoff_id, len(longer), 5.0)
    rest, output, _ = await pair.receiver.finish(dataclasses.replace(request, receive=receive))
    assert known + rest == expected
    assert output.num_handoff_tokens == len(longer)
    await pair.nothing_left()


async def test_a_preempted_prefill_hands_over_each_block_once(pair: Pair) -> None:
    prompt = [index % 200 for index in range(300)]
    send = await pair.open(prompt)
    await pair.sender.engine.submit(prefill(prompt, send))
    async with asyncio.timeout(60):
        await pair.sender.engine.next_step()
    assert pair.sender.engine.preempt("p")
    first, _, _ = await pair.sender.outputs_of("p")
    rest, output, _ = await pair.receiver.finish(decode(prompt, first, send.handoff_id))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 300
    await pair.nothing_left()


async def test_without_a_commit_the_prompt_is_computed_and_others_run(pair: Pair) -> None:
    prompt = [index % 190 for index in range(100)]
    engine = pair.receiver.engine
    await engine.submit(decode(prompt, [], secrets.token_bytes(16), timeout_s=1.0))
    sampling = common_pb2.SamplingParams(max_tokens=3)
    await engine.submit(EngineRequest("other", [5, 6, 7], sampling))
    finished: dict[str, EngineOutput] = {}
    tokens: dict[str, list[int]] = {"d": [], "other": []}
    async with asyncio.timeout(60):
        while len(finished) < 2:
            for output in (await engine.next_step()).outputs:
                tokens[output.engine_request_id] += output.token_ids
                if output.finish is not None:
                    finished[output.engine_request_id] = output
    assert list(finished) == ["other", "d"]
    assert tokens["d"] == expected_tokens(pair.vocabulary, prompt, 8)
    await pair.nothing_left()


async def test_a_handoff_that_comes_too_late_has_failed_on_both_sides(pair: Pair) -> None:
    prompt = [index % 190 for index in range(100)]
    send = await pair.open(prompt)
    tokens, output, _ = await pair.receiver.finish(decode(prompt, [], send.handoff_id, 0.2))
    assert tokens == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 0
    for side in (pair.receiver, pair.sender):
        ended = await ended_badly(side, send.handoff_id)
        assert ended.reason == kv_transfer_pb2.REFUSAL_REASON_EXPIRED
    pair.sender.transfer.abort_send(send.handoff_id)
    await pair.nothing_left()


async def test_a_wrong_handoff_is_an_error_and_gives_no_tokens(pair: Pair) -> None:
    prompt, other = [1] * 40, [2] * 40
    send = await pair.open(prompt)
    await pair.sender.finish(prefill(prompt, send))
    tokens, _, last = await pair.receiver.finish(decode(other, [], send.handoff_id))
    assert (tokens, last.finish) == ([], Finish.ERROR)
    assert "wrong handoff" in last.error
    ended = await ended_badly(pair.receiver, send.handoff_id)
    assert ended.reason == kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE
    await pair.nothing_left()


async def test_damaged_staging_is_recomputed(pair: Pair) -> None:
    prompt = [index % 180 for index in range(100)]
    send = await pair.open(prompt)
    first, _, _ = await pair.sender.finish(prefill(prompt, send))
    await committed(pair.receiver, send.handoff_id)
    port = pair.receiver.engine._port
    assert port is not None
    memory = port._port.memory
    for at in range(0, len(memory), 256):
        memory[at] ^= 255
    rest, output, _ = await pair.receiver.finish(decode(prompt, first, send.handoff_id))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 0
    ended = await ended_badly(pair.receiver, send.handoff_id)
    assert ended.reason == kv_transfer_pb2.REFUSAL_REASON_CHECKSUM
    await pair.nothing_left()


@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_abort_leaves_nothing(pair: Pair, role: str) -> None:
    prompt = [index % 170 for index in range(300)]
    send = await pair.open(prompt)
    if role == "sender":
        await pair.sender.engine.submit(prefill(prompt, send))
        async with asyncio.timeout(60):
            await pair.sender.engine.next_step()
        await pair.sender.engine.abort(["p"])
        pair.sender.transfer.abort_send(send.handoff_id)
    else:
        await pair.sender.finish(prefill(prompt, send))
        await committed(pair.receiver, send.handoff_id)
        await pair.receiver.engine.submit(decode(prompt, [], send.handoff_id))
        await pair.receiver.engine.abort(["d"])
        ended = await ended_badly(pair.receiver, send.handoff_id)
        assert ended.reason == kv_transfer_pb2.REFUSAL_REASON_CANCELLED
    await pair.nothing_left()


async def test_the_engine_dies_with_its_transfer_service(pair: Pair) -> None:
    os.kill(pair.sender.transfer.pid, 9)
    async with asyncio.timeout(60):
        await pair.sender.transfer.gone.wait()
        await pair.sender.engine.submit(
            EngineRequest("x", [1, 2], common_pb2.SamplingParams(max_tokens=2))
        )
        with pytest.raises(EngineDead, match="transfer service"):
            await pair.sender.outputs_of("x")


async def test_shards_of_another_cache_are_refused_and_the_prompt_computed(pair: Pair) -> None:
    """Two ranks with all heads each, in half the bytes; the coordinator lets none attach."""
    other = dataclasses.replace(pair.layout, tp_size=2, block_bytes=SETTINGS.block_bytes // 2)
    socket_path = str(pair.directory / "c.sock")
    halves = await TransferClient.start(KvTransferConfig(**STAGING), socket_path)
    try:
        await halves.configure(other.fingerprint())
        prompt = [index % 160 for index in range(100)]
        send = await pair.open(prompt, halves)
        first, _, _ = await pair.sender.finish(prefill(prompt, send))
        refused = await ended_badly(pair.sender, send.handoff_id)
        assert refused.reason == kv_transfer_pb2.REFUSAL_REASON_FINGERPRINT
        assert "tp_size is 1, here 2" in refused.detail
        assert "block_bytes is 256, here 128" in refused.detail
        pair.sender.transfer.abort_send(send.handoff_id)
        assert (await halves.stats()).receive_bytes_used == 0
    finally:
        await halves.close()
    rest, output, _ = await pair.receiver.finish(decode(prompt, first, send.handoff_id, 0.1))
    assert first + rest == expected_tokens(pair.vocabulary, prompt, 8)
    assert output.num_handoff_tokens == 0
    await pair.nothing_left()
