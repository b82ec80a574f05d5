"""Measures how much stores, loads and fetches of KV blocks delay the streams beside them.

    python -m baton.bench.neighbours

Streams decode on one vLLM engine without a coordinator, and one more prompt at a time runs beside
them. The prompt's first tokens are computed, cached on the device, loaded from host memory, or
fetched from another engine. The kinds take turns in random order, so that noise meets all of them.
A second engine on the same cores, without a KV store in host memory, computes the same prompts.

For each prompt, the table has the longest gap of the streams while it runs, and the delay of a
stream: the sum of the gaps meanwhile beyond the median gap before. Two rows that differ only in
where the tokens come from give what the KV store adds. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from baton.bench import interrupts, systems
from baton.bench.neighbours_report import KINDS, NUM_BEFORE, Delay, delay_of, report
from baton.engine.base import EngineInfo, EngineOutput, EngineRequest, Finish, cached_prefix_request
from baton.engine.served_model import ServedModel
from baton.engine.vllm_engine import VllmEngine
from baton.engine.warm_up import warm_up
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime import demo_model
from baton.runtime.config import KvTransferConfig
from baton.runtime.kv.kv_store_config import KvStoreConfig
from baton.runtime.process.affinity import VLLM_BIND_THREADS
from baton.v1 import common_pb2

TIMEOUT_S = 120.0
# Time until copies that a prompt leaves behind have ended, before the next one begins.
SETTLE_S = 0.3
BLOCK_TOKENS = 32
# Tokens at the end of each prompt, beyond its whole blocks. Every prompt computes them, wherever
# its blocks come from. Without them a cached prompt computes one token, and a fetched one a block.
NUM_REST = 2


@dataclass(eq=False)
class Side:
    """One engine with its transfer service.

    Attributes:
        step_times: When each step's tokens of the streams came, in seconds.
    """

    engine: VllmEngine
    info: EngineInfo
    transfer: TransferClient
    step_times: list[float] = field(default_factory=list)
    _outputs: dict[str, asyncio.Queue[EngineOutput]] = field(default_factory=dict)
    _streams: set[str] = field(default_factory=set)
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Takes the engine's outputs, and the service's events, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._drop_events())
            while True:
                step = await self.engine.next_step()
                if any(output.engine_request_id in self._streams for output in step.outputs):
                    self.step_times.append(time.perf_counter())
                    self._stepped.set()
                for output in step.outputs:
                    if output.engine_request_id in self._outputs:
                        self._outputs[output.engine_request_id].put_nowait(output)

    async def _drop_events(self) -> None:
        while True:
            await self.transfer.next_events()

    async def finish(self, request: EngineRequest) -> EngineOutput:
        """Runs a request; returns its first output."""
        outputs = self._outputs[request.engine_request_id] = asyncio.Queue()
        await self.engine.submit(request)
        first = output = await outputs.get()
        while output.finish is None:
            output = await outputs.get()
        del self._outputs[request.engine_request_id]
        if output.error:
            raise RuntimeError(output.error)
        return first

    @contextlib.asynccontextmanager
    async def decoding(self, num_streams: int, length: int) -> AsyncIterator[None]:
        """Streams that decode until the end of the block."""
        names = [f"stream-{secrets.token_hex(4)}" for _ in range(num_streams)]
        self._streams.update(names)
        self.step_times.clear()
        for name in names:
            await self.engine.submit(EngineRequest(name, words(32), sampling(length)))
        await self.steps(NUM_BEFORE)
        try:
            yield
        finally:
            await self.engine.abort(names)
            self._streams.clear()

    async def steps(self, count: int) -> None:
        """Waits until the streams have had this many more tokens each."""
        until = len(self.step_times) + count
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.step_times) < until:
                self._stepped.clear()
                await self._stepped.wait()


Prompt: TypeAlias = list[int]


def words(count: int) -> Prompt:
    return random.choices(range(5, 430), k=count)


def sampling(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Bench:
    """The engines, and what is run beside the streams of `reader` or `bare`.

    Args:
        reader: Engine with a KV store in host memory.
        bare: Engine on the same cores without one.
        holder: Engine on other cores that sends what is fetched.
        given: Command line.
    """

    def __init__(self, reader: Side, bare: Side, holder: Side, given: argparse.Namespace) -> None:
        self._reader, self._bare, self._holder, self._given = reader, bare, holder, given
        self._num_sent = 0

    async def one(self, kind: str) -> Delay:
        """Runs one prompt of a kind beside streams."""
        prompt = words(self._given.prompt + NUM_REST)
        side = self._bare if kind == "computed, no store" else self._reader
        run = await self._prepared(kind, side, prompt)
        await asyncio.sleep(SETTLE_S)
        async with side.decoding(self._given.streams, self._given.stream_tokens):
            begin = len(side.step_times) - 1
            first = await run()
            # Stores follow the prompt.
            await side.steps(self._given.steps_after)
            found = delay_of(list(side.step_times), begin)
        self._check(kind, first)
        return found

    async def _prepared(
        self, kind: str, side: Side, prompt: Prompt
    ) -> Callable[[], Awaitable[EngineOutput]]:
        if kind == "fetched":
            await self._holder.finish(self._request(prompt))
            return lambda: self._fetched(prompt)
        if kind in ("cached", "from host memory"):
            await side.finish(self._request(prompt))
        if kind == "from host memory":
            # Other prompts take the whole cache.
            num_tokens = 0
            while num_tokens <= side.info.kv_tokens:
                await side.finish(self._request(words(self._given.prompt)))
                num_tokens += self._given.prompt
        return lambda: side.finish(self._request(prompt))

    def _request(self, prompt: Prompt, **more: Any) -> EngineRequest:
        self._num_sent += 1
        return EngineRequest(f"r{self._num_sent}", prompt, sampling(1), **more)

    async def _fetched(self, prompt: Prompt) -> EngineOutput:
        """The reader computes a prompt whose beginning the holder sends."""
        reader, holder = self._reader, self._holder
        handoff_id, size = secrets.token_bytes(16), reader.info.layout.block_size_tokens
        num_tokens = (len(prompt) - NUM_REST) // size * size
        receive = ReceiveHandoff(handoff_id, num_tokens, TIMEOUT_S, is_fetch=True)
        reading = asyncio.create_task(reader.finish(self._request(prompt, receive=receive)))
        offset = await holder.transfer.open_send(
            handoff_id,
            reader.transfer.address,
            reader.info.layout.num_blocks(num_tokens),
            num_tokens,
            TIMEOUT_S,
        )
        sent = await holder.finish(
            cached_prefix_request(
                f"prefix {handoff_id.hex()}",
                prompt[:num_tokens],
                send=SendHandoff(handoff_id, offset, num_tokens),
            )
        )
        if sent.finish is not Finish.CUT:
            raise RuntimeError("the holder has evicted the prompt: give it a larger cache")
        return await reading

    def _check(self, kind: str, first: EngineOutput) -> None:
        """Raises RuntimeError if the prompt came from elsewhere."""
        least = self._given.prompt // 2
        found = {
            "cached": first.num_cached_tokens,
            "from host memory": first.num_host_tokens,
            "fetched": first.num_handoff_tokens,
        }
        for name, count in found.items():
            if (count >= least) != (name == kind):
                raise RuntimeError(f"{kind}: {count} tokens were {name}")


@contextlib.asynccontextmanager
async def running(
    name: str, cores: str, host_bytes: int, given: argparse.Namespace, directory: Path
) -> AsyncIterator[Side]:
    """One engine on these cores; `host_bytes` of 0: without a KV store in host memory."""
    arguments = systems.engine_args(
        given.model, BLOCK_TOKENS, kv_cache_memory_bytes=given.cache_bytes, **given.engine_args
    )
    staging = KvTransferConfig(send_bytes=given.staging_bytes, receive_bytes=given.staging_bytes)
    os.environ[VLLM_BIND_THREADS] = cores
    async with contextlib.AsyncExitStack() as stack:
        transfer = await TransferClient.start(staging, str(directory / f"{name}.sock"))
        stack.push_async_callback(transfer.close)
        engine = VllmEngine(
            ServedModel(demo_model.ensure(given.model), "bench", arguments),
            transfer.socket_path,
            scheduler="vllm",
            kv_store=KvStoreConfig(host_bytes=host_bytes),
        )
        stack.push_async_callback(engine.stop)
        info = await engine.start()
        await warm_up(engine, info)
        await transfer.configure(info.layout.fingerprint())
        side = Side(engine, info, transfer)
        reading = asyncio.create_task(side.run())
        try:
            yield side
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def measure(given: argparse.Namespace, directory: Path) -> dict[str, list[Delay]]:
    found: dict[str, list[Delay]] = {kind: [] for kind in KINDS}
    async with contextlib.AsyncExitStack() as stack:
        reader, bare, holder = [
            await stack.enter_async_context(running(name, cores, host_bytes, given, directory))
            for name, cores, host_bytes in (
                ("reader", given.cores, given.host_bytes),
                ("bare", given.cores, 0),
                ("holder", given.other_cores, 0),
            )
        ]
        bench = Bench(reader, bare, holder, given)
        for number in range(given.repeats + 1):
            for kind in random.sample(KINDS, len(KINDS)):
                delay = await bench.one(kind)
                # The first prompt of each kind meets code that has not run yet.
                if number:
                    found[kind].append(delay)
    return found


def show(made: dict[str, Any]) -> None:
    print(f"{'beside ' + str(made['streams']) + ' streams':28}{'longest gap':>14}{'delay':>12}")
    for kind, row in made["kinds"].items():
        print(f"{kind:28}{row['longest_gap_ms']:>11} ms{row['delay_ms']:>9} ms")
    for name, row in made["added"].items():
        print(f"{name + ' adds':28}{row['longest_gap_ms']:>11} ms{row['delay_ms']:>9} ms")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-88m", help="a demo model")
    parser.add_argument(
        "--prompt",
        type=int,
        default=1024,
        help=f"tokens of each prompt in blocks of {BLOCK_TOKENS}; {NUM_REST} more follow them",
    )
    parser.add_argument("--streams", type=int, default=4, help="streams beside the prompts")
    parser.add_argument("--stream-tokens", type=int, default=1024, help="most tokens of a stream")
    parser.add_argument(
        "--steps-after", type=int, default=6, help="steps after a prompt that count too"
    )
    parser.add_argument("--repeats", type=int, default=15, help="prompts of each kind")
    parser.add_argument("--cache-bytes", type=int, default=160 * 2**20, help="of each engine")
    parser.add_argument("--host-bytes", type=int, default=512 * 2**20, help="host memory")
    parser.add_argument("--staging-bytes", type=int, default=64 * 2**20, help="of each direction")
    parser.add_argument("--cores", default="0", help="cores of the measured engines, such as 0-3")
    parser.add_argument("--other-cores", default="1", help="cores of the engine that sends")
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="further arguments of vLLM, as JSON"
    )
    parser.add_argument("--seed", default="1", help="of prompts and order")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats: must be at least 1")
    if given.prompt < BLOCK_TOKENS or given.prompt % BLOCK_TOKENS:
        parser.error(f"--prompt: must be a multiple of {BLOCK_TOKENS}, and not {given.prompt}")
    return given


def main() -> None:
    given = parsed()
    interrupts.on_sigterm()
    random.seed(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(given, Path(directory)))
    made = {"prompt_tokens": given.prompt, "streams": given.streams, **report(found)}
    show(made)
    if given.json is not None:
        given.json.write_text(json.dumps(made, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
