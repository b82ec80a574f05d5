"""Handoffs between two engines, run like two workers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any, Literal

from baton.engine.base import EngineInfo, EngineOutput, EngineRequest
from baton.engine.served_model import ServedModel
from baton.engine.vllm_engine import VllmEngine
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.runtime.kv.kv_store_config import KvStoreConfig
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.prompts.sampling import needs_exact_state
from baton.v1 import common_pb2, kv_transfer_pb2
from tests.vllm import vllm_cases as cases

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": cases.BLOCK_SIZE,
    "max_num_batched_tokens": cases.CHUNK,
    "max_model_len": cases.MAX_MODEL_LEN,
    "max_num_seqs": 8,
    # The cache has 64 blocks; the cases overflow it several times.
    "kv_cache_memory_bytes": 2**20,
    **cases.SHARED_GPU,
}
STAGING = KvTransferConfig(send_bytes=16 * 2**20, receive_bytes=16 * 2**20)
# Four ranks may share two cores with other tests, and the first steps of a process are its slowest.
TIMEOUT_S = 240.0


class Side:
    """One engine with its transfer service; sorts their reports by request and by handoff."""

    def __init__(self, engine: VllmEngine, info: EngineInfo, transfer: TransferClient) -> None:
        self.engine, self.info, self.transfer = engine, info, transfer
        self._outputs: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._committed: dict[bytes, asyncio.Event] = {}
        # Blocks in the prefix cache, by the reports of the steps.
        self._cached: set[int] = set()
        self.num_evicted = 0
        # Blocks in host memory, by the reports of the steps.
        self.in_host: set[int] = set()
        # Blocks on disk, by the reports of the steps.
        self.on_disk: set[int] = set()
        self.num_wrong_files, self.disk_failed = 0, False
        # Steps with tokens for a request, and these tokens: more than one if drafts are right. The
        # last step of a request is not counted, because it may have had more right drafts.
        self.counts = {"steps": 0, "tokens": 0}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_steps())
            group.create_task(self._read_events())

    async def _read_steps(self) -> None:
        while True:
            step = await self.engine.next_step()
            if step.cache is not None:
                assert not step.cache.cleared
                assert self._cached.issuperset(step.cache.removed)
                assert self._cached.isdisjoint(step.cache.stored)
                self._cached.difference_update(step.cache.removed)
                self._cached.update(step.cache.stored)
                self.num_evicted += len(step.cache.removed)
            if step.host_cache is not None:
                assert self.in_host.issuperset(step.host_cache.removed)
                assert self.in_host.isdisjoint(step.host_cache.stored)
                self.in_host.difference_update(step.host_cache.removed)
                self.in_host.update(step.host_cache.stored)
            if step.disk_cache is not None:
                if step.disk_cache.cleared:
                    self.on_disk.clear()
                assert self.on_disk.issuperset(step.disk_cache.removed)
                assert self.on_disk.isdisjoint(step.disk_cache.stored)
                self.on_disk.difference_update(step.disk_cache.removed)
                self.on_disk.update(step.disk_cache.stored)
            self.num_wrong_files += step.num_wrong_files
            self.disk_failed = self.disk_failed or step.disk_failed
            for output in step.outputs:
                if output.finish is None and output.token_ids:
                    self.counts["steps"] += 1
                    self.counts["tokens"] += len(output.token_ids)
                self._outputs[output.engine_request_id].put_nowait(output)

    def num_cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Returns how many prompt tokens the reports say are cached, from the first."""
        block_size = self.info.layout.block_size_tokens
        # The last token is always computed.
        hashes = block_hashes(token_ids[:-1], block_size)
        return block_size * sum(1 for _ in takewhile(self._cached.__contains__, hashes))

    async def _read_events(self) -> None:
        while True:
            for event in await self.transfer.next_events():
                if event.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
                    self._commit(event.handoff_id).set()

    def _commit(self, handoff_id: bytes) -> asyncio.Event:
        return self._committed.setdefault(handoff_id, asyncio.Event())

    async def committed(self, handoff_id: bytes) -> None:
        await self._commit(handoff_id).wait()

    def outputs(self, engine_request_id: str) -> asyncio.Queue[EngineOutput]:
        """Returns the queue of the outputs of a request that is submitted next."""
        outputs = self._outputs[engine_request_id] = asyncio.Queue()
        return outputs

    async def finish(self, request: EngineRequest) -> tuple[list[int], EngineOutput]:
        """Submits a request; returns its tokens and its first output."""
        outputs = self.outputs(request.engine_request_id)
        await self.engine.submit(request)
        first = output = await outputs.get()
        tokens = list(first.token_ids)
        while output.finish is None:
            output = await outputs.get()
            tokens += output.token_ids
        assert not output.error, output.error
        return tokens, first

    async def lost_after(
        self, request: EngineRequest, num_tokens: int
    ) -> tuple[list[int], EngineOutput]:
        """Submits a request, and aborts it when it has made this many tokens.

        Returns:
            Its tokens and its first output.
        """
        outputs = self.outputs(request.engine_request_id)
        await self.engine.submit(request)
        first = output = await outputs.get()
        tokens = list(first.token_ids)
        while len(tokens) < num_tokens:
            assert output.finish is None, output
            output = await outputs.get()
            tokens += output.token_ids
        await self.engine.abort([request.engine_request_id])
        return tokens[:num_tokens], first

    async def held(self) -> dict[str, int]:
        """Returns the KV blocks and staging in use."""
        stats = await self.transfer.stats()
        return {
            "kv_tokens": self.engine.take_load().kv_tokens_used,
            "send_bytes": stats.send_bytes_used,
            "receive_bytes": stats.receive_bytes_used,
        }


@contextlib.asynccontextmanager
async def side(
    model: str,
    ranks: int,
    socket_path: str,
    host_bytes: int = 0,
    disk_dir: str = "",
    scheduler: Literal["baton", "vllm"] = "baton",
    **engine_args: Any,
) -> AsyncIterator[Side]:
    async with contextlib.AsyncExitStack() as stack:
        transfer = await TransferClient.start(STAGING, socket_path)
        stack.push_async_callback(transfer.close)
        arguments = {**ENGINE_ARGS, "tensor_parallel_size": ranks, **engine_args}
        engine = VllmEngine(
            ServedModel(model, "m", arguments),
            socket_path,
            scheduler=scheduler,
            kv_store=KvStoreConfig(host_bytes=host_bytes, disk_dir=disk_dir, disk_bytes=2**30),
        )
        stack.push_async_callback(engine.stop)
        info = await engine.start()
        await transfer.configure(info.layout.fingerprint())
        made = Side(engine, info, transfer)
        reading = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def hand_over(
    prefill: Side,
    decode: Side,
    case: cases.Case,
    before_load: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Runs one request through both engines, as the roles of worker/ do.

    Args:
        prefill: Engine that computes the prompt.
        decode: Engine that continues.
        case: The request.
        before_load: Waited for before the decode engine gets the request.
    """
    name, prompt = case["name"], case["prompt"]
    sampling = common_pb2.SamplingParams(**case["sampling"])
    if sampling.max_tokens == 1:
        tokens, _ = await prefill.finish(EngineRequest(name, prompt, sampling, prefill_only=True))
        return {"name": name, "token_ids": tokens}
    handoff_id, num_blocks = secrets.token_bytes(16), prefill.info.layout.num_blocks(len(prompt))
    offset = await prefill.transfer.open_send(
        handoff_id, decode.transfer.address, num_blocks, len(prompt), TIMEOUT_S
    )
    send = SendHandoff(handoff_id, offset, len(prompt))
    receive = ReceiveHandoff(handoff_id, len(prompt), TIMEOUT_S)
    said_by_prefill = prefill.num_cached_tokens(prompt)
    first, computed = await prefill.finish(
        EngineRequest(f"{name}-p", prompt, sampling, prefill_only=True, send=send)
    )
    if not case.get("waits"):
        await decode.committed(handoff_id)
    if (rank := case.get("spoiled_rank")) is not None:
        spoil(prefill, decode, rank, num_blocks)
    if before_load is not None:
        await before_load()
    # Forced tokens are not part of the prompt that the engine starts with.
    said_by_decode = decode.num_cached_tokens(
        prompt if needs_exact_state(sampling) else prompt + first
    )
    rest, loaded = await decode.finish(
        EngineRequest(f"{name}-d", prompt, sampling, known_token_ids=first, receive=receive)
    )
    return {
        "name": name,
        "token_ids": first + rest,
        "num_cached_by_prefill": computed.num_cached_tokens,
        "num_host_by_prefill": computed.num_host_tokens,
        "num_cached_by_decode": loaded.num_cached_tokens,
        "num_loaded": loaded.num_handoff_tokens,
        "said_by_prefill": said_by_prefill,
        "said_by_decode": said_by_decode,
    }


def spoil(prefill: Side, decode: Side, rank: int, num_blocks: int) -> None:
    """Flips a bit of one rank's part of a committed handoff; no other handoff is in the arena."""
    port = EnginePort(decode.transfer.socket_path)
    try:
        layout = prefill.info.layout
        held = layout.blocks(layout.group_of(1), num_blocks)
        at = layout.offset(rank, 1, held[len(held) // 2], num_blocks)
        port.memory[STAGING.send_bytes + at] ^= 0x10
    finally:
        port.close()


async def left_behind(*sides: Side) -> list[dict[str, int]]:
    """Returns what is held when no request runs; waits for resources that are freed later."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while any([any((await each.held()).values()) for each in sides]):
                await asyncio.sleep(0.02)
    return [await each.held() for each in sides]


async def handed_over(prefill: Side, decode: Side, given: dict[str, Any]) -> dict[str, Any]:
    """Runs the cases and returns their results."""
    results = []
    async with asyncio.timeout(TIMEOUT_S):
        for case in given["one_by_one"]:
            results.append(await hand_over(prefill, decode, case))
        together = (hand_over(prefill, decode, case) for case in given["together"])
        results += await asyncio.gather(*together)
        left = await left_behind(prefill, decode)
    return {
        "results": results,
        "left": left,
        "num_kv_heads": decode.info.layout.num_kv_heads,
        "num_evicted": [prefill.num_evicted, decode.num_evicted],
    }
