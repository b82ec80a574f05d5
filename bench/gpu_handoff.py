"""Measures one handoff between two ranks on one GPU, without a model.

    python -m baton.bench.gpu_handoff

Needs a CUDA GPU. Two transfer services and two ranks hand over the keys and values of an 8B model
by shared memory. The sender's "model" computes matrix products for about as long as a prompt takes,
in several kernels per layer, so that the launches of the gathers compete with those of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, Load, Part, Save
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.load import stats
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2

LAYERS, HEADS, TOKENS, HEAD_SIZE = 32, 8, 16, 128
BLOCK_BYTES = HEADS * TOKENS * 2 * HEAD_SIZE * 2
LAYOUT = KvLayout(
    "m", "r", "bfloat16", LAYERS, HEADS, HEAD_SIZE, TOKENS, BLOCK_BYTES, "heads,tokens,content"
)
TIMEOUT_S = 30.0
# Small operations of a layer: what a model without compilation launches.
_SMALL_OPS = 30
# How often an engine without other requests looks whether a load has ended.
_POLL_S = 1e-3


@dataclass(frozen=True, slots=True)
class Times:
    """One handoff, in seconds.

    Attributes:
        launched: The sender's step, until everything is launched.
        computed: The same, until the GPU has computed it.
        committed: From the end of the computation until the receiver has everything.
        loaded: From there until the receiver's cache holds it, verified.
    """

    launched: float
    computed: float
    committed: float
    loaded: float


class Side:
    """A transfer service, and a rank with a cache of random bytes."""

    def __init__(self, client: TransferClient, num_blocks: int) -> None:
        self.client = client
        self.port = EnginePort(client.socket_path)
        self.port.subscribe()
        self.rank = RankHandoffs(client.socket_path, self.port, 0, LAYOUT)
        shape = (num_blocks, TOKENS, HEADS, 2 * HEAD_SIZE)
        self.caches = {
            f"layer.{index}": torch.randn(shape, device="cuda").bfloat16().transpose(1, 2)
            for index in range(LAYERS)
        }
        self.rank.register(self.caches)

    async def close(self) -> None:
        self.rank.close()
        self.port.close()
        await self.client.close()


class Model:
    """Launches the work of a layer: one matrix product, and small operations beside it.

    Args:
        num_tokens: Tokens of the prompt.
    """

    def __init__(self, num_tokens: int) -> None:
        # The products of a layer of an 8B model, as one.
        self._left = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
        self._right = torch.randn(4096, 27_000, device="cuda").bfloat16()
        self._result = torch.empty(num_tokens, 27_000, device="cuda", dtype=torch.bfloat16)
        self._small = torch.zeros(64, device="cuda")

    def layer(self) -> None:
        torch.mm(self._left, self._right, out=self._result)
        for _ in range(_SMALL_OPS):
            self._small.add_(1)


async def committed(side: Side) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            for state in side.port.poll():
                if state.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
                    return
            await asyncio.sleep(0)


async def empty(side: Side) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await side.client.stats()).send_bytes_used:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)


def step(side: Side, orders: HandoffStep, model: Model | None = None) -> None:
    side.rank.begin_step(orders)
    if model is not None:
        for name in side.caches:
            model.layer()
            side.rank.save(name)
    side.rank.load(orders)
    side.rank.end_step()


def loads_ended(rank: RankHandoffs) -> tuple[set[str], set[str]]:
    """Waits like an engine without other requests."""
    while not (ended := rank.take_ended())[0]:
        time.sleep(_POLL_S)
    return ended


async def hand_over(sender: Side, receiver: Side, num_tokens: int, model: Model) -> Times:
    num_blocks, handoff_id = num_tokens // TOKENS, secrets.token_bytes(16)
    offset = await sender.client.open_send(
        handoff_id, receiver.client.address, num_blocks, num_tokens, TIMEOUT_S
    )
    part = Part(0, torch.randperm(len(next(iter(sender.caches.values()))))[:num_blocks].tolist())
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step(sender, HandoffStep([Save(handoff_id, offset, num_blocks, (part,), True)]), model)
    launched = time.perf_counter()
    torch.cuda.current_stream().synchronize()
    computed = time.perf_counter()
    await committed(receiver)
    arrived = time.perf_counter()
    load = Load(handoff_id, num_tokens, (part,), waiting_id="one")
    step(receiver, HandoffStep(loads=[load]))
    ended = loads_ended(receiver.rank)
    loaded = time.perf_counter()
    assert not ended[1], "a load has failed"
    receiver.port.release(handoff_id, all_shards=True)
    await empty(sender)
    return Times(launched - begin, computed - begin, arrived - computed, loaded - arrived)


async def measure(num_tokens: int, num_runs: int) -> tuple[float, Times]:
    """Returns the seconds of the sender's step without a handoff, and the medians with one."""
    num_bytes = LAYOUT.handoff_bytes(num_tokens // TOKENS)
    config = KvTransferConfig(send_bytes=2 * num_bytes, receive_bytes=2 * num_bytes)
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as root:
        for name in ("send", "receive"):
            client = await TransferClient.start(config, str(Path(root) / name))
            await client.configure(LAYOUT.fingerprint())
            sides.append(Side(client, 2 * num_tokens // TOKENS))
        try:
            model = Model(num_tokens)
            sender, receiver = sides
            alone = median(lambda: _alone(sender, model), num_runs)
            runs = [
                await hand_over(sender, receiver, num_tokens, model) for _ in range(num_runs + 2)
            ][2:]
        finally:
            for side in sides:
                await side.close()
    return alone, Times(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in ("launched", "computed", "committed", "loaded")
        )
    )


def _alone(side: Side, model: Model) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step(side, HandoffStep(), model)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def median(call: Callable[[], float], num_runs: int) -> float:
    return statistics.median([call() for _ in range(num_runs + 2)][2:])


def row(num_tokens: int, num_runs: int) -> dict[str, float]:
    """Returns the medians for one prompt length, in ms."""
    alone, times = asyncio.run(measure(num_tokens, num_runs))
    num_bytes = LAYOUT.handoff_bytes(num_tokens // TOKENS)
    seconds = {
        "step alone": alone,
        "with handoff": times.computed,
        "launched after": times.launched,
        "until committed": times.committed,
        "until loaded": times.loaded,
    }
    return {
        "tokens": num_tokens,
        "MB": round(num_bytes / 1e6),
        **{name: round(each * 1e3, 2) for name, each in seconds.items()},
        "GB/s of the load": round(num_bytes / times.loaded / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("bench/results/gpu-handoff.json"))
    arguments = parser.parse_args()
    if not all(tokens > 0 and tokens % TOKENS == 0 for tokens in arguments.prompt_tokens):
        parser.error(f"--prompt-tokens: must be multiples of {TOKENS}")
    if arguments.runs < 1:
        parser.error("--runs: must be at least 1")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    device = torch.cuda.get_device_name()
    rows = [row(num_tokens, arguments.runs) for num_tokens in arguments.prompt_tokens]
    stats.save({"device": device, "runs": arguments.runs, "handoffs": rows}, arguments.json)
    title = f"{device}, medians of {arguments.runs} runs, ms"
    stats.print_table(title, list(rows[0]), [[str(one) for one in each.values()] for each in rows])


if __name__ == "__main__":
    main()
