"""Workers that join the session's cluster for the tests of one module."""

from __future__ import annotations

import asyncio
import itertools
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from baton.client import AdminClient
from baton.client.client import BatonClient
from baton.client.events import Tokens
from baton.client.stream import TokenStream
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import CONFIG, START_TIMEOUT_S, Cluster, start_worker
from tests.vllm.vllm_relay import Hold, Relay, as_it_is
from tests.vllm.worker_parts import family

LOOPBACK = "127.0.0.1"
LEASE_S = 1.0
# Timeout for events that are noticed at once, or when the lease expires.
SOON_S = 60.0
# Timeout for events that follow when the coordinator gives a silent worker up.
LOST_S = 60.0
# Timeout for a request to be placed on given workers.
PLACED_S = 120.0
_SESSIONS = itertools.count()


class Guests:
    """Workers that join the session's cluster for these tests, and are killed in them.

    Attributes:
        relay: Relay through which the decoding guest receives handoffs.
    """

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster, self._directory = cluster, directory
        self._processes: dict[str, BaseProcess] = {}
        self.relay: Relay | None = None

    def start(self, role: str, name: str, core: int, *, dialled_at: str = LOOPBACK) -> None:
        # Guests use the default transports between each other.
        transfer = {**CONFIG["kv_transfer"], "idle_timeout_s": LEASE_S}
        transfer["advertise_host"] = dialled_at
        config = {**self._cluster.config, "kv_transfer": transfer}
        self._processes[name] = start_worker(
            self._cluster.address, config, self._directory, role, name, core
        )

    async def attached(self, *names: str) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while set(names) - {each.worker_id for each in await self._cluster.all_workers()}:
                for name in names:
                    assert self._processes[name].is_alive(), self.log(name)
                await asyncio.sleep(0.2)

    async def only_these_are_listed(self) -> None:
        """Waits until the coordinator lists only the guests that live."""
        async with asyncio.timeout(LOST_S):
            while self.dead() & {each.worker_id for each in await self._cluster.all_workers()}:
                await asyncio.sleep(0.1)

    def main(self, name: str) -> psutil.Process:
        return psutil.Process(self._processes[name].pid)

    def rank(self, name: str) -> psutil.Process:
        """Returns the process that computes."""
        (rank,) = [each for each in family(self.main(name)) if "VLLM::Worker" in each.name()]
        return rank

    async def ended(self, name: str) -> None:
        await asyncio.to_thread(self._processes[name].join, SOON_S)
        assert not self._processes[name].is_alive()

    def dead(self) -> set[str]:
        return {name for name, each in self._processes.items() if not each.is_alive()}

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()[-4000:]

    async def close(self) -> None:
        if self.relay is not None:
            self.relay.close()
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            await asyncio.to_thread(process.join, 60)
            assert process.exitcode in (0, 1, -9), self.log(name)
        await self.only_these_are_listed()


async def placed(cluster: Cluster, stream: TokenStream) -> tuple[str, str]:
    """Returns the prefill and the decode worker of a request."""
    async with AdminClient(cluster.address) as admin:
        found = await admin.get_request(stream.request_id)
    return found.prefill_worker_id, found.decode_worker_id


async def session_at(client: BatonClient, cluster: Cluster, prefill: str, decode: str) -> str:
    """Returns the ID of a session that these workers served last, so they get its next request.

    The order of turns is not reliable: each report changes the predicted step times.
    """
    async with asyncio.timeout(LOST_S):
        while True:
            session = f"session-{next(_SESSIONS)}"
            # A request for one token does not use a decode worker.
            for num_tokens, wanted in ((1, (prefill, "")), (2, (prefill, decode))):
                probe = client.generate(
                    [5, 6, 7],
                    max_tokens=num_tokens,
                    temperature=0,
                    ignore_eos=True,
                    session_id=session,
                )
                await probe.complete()
                if await placed(cluster, probe) != wanted:
                    break
            else:
                return session


def let_pass(relay: Relay) -> None:
    if isinstance(hold := relay.spoil, Hold):
        hold.let_go()
    relay.spoil = as_it_is


async def held_up(
    client: BatonClient, relay: Relay, case: cases.Case, session_id: str = ""
) -> TokenStream:
    """Yields a request with its first token out; the relay holds the rest of its handoff."""
    hold = relay.spoil = Hold()
    stream = client.generate(
        case["prompt"], timeout_s=60, session_id=session_id, **case["sampling"]
    )
    async for event in stream:
        if isinstance(event, Tokens):
            break
    assert await asyncio.to_thread(hold.reached.wait, SOON_S)
    return stream


async def held_up_at(
    client: BatonClient,
    cluster: Cluster,
    relay: Relay,
    case: cases.Case,
    workers: tuple[str, str],
) -> TokenStream:
    """Returns a request like `held_up`, on this prefill and this decode worker.

    Routing follows predicted times, which change on a busy machine. A request that is placed
    elsewhere is finished, and the next session tries again.
    """
    async with asyncio.timeout(PLACED_S):
        while True:
            session = await session_at(client, cluster, *workers)
            hold = relay.spoil = Hold()
            stream = await begun(client, case, 1, session)
            if await placed(cluster, stream) == workers:
                assert await asyncio.to_thread(hold.reached.wait, SOON_S)
                return stream
            let_pass(relay)
            assert await tokens_of(stream) == case["expected"]["token_ids"]


async def begun_at(
    client: BatonClient,
    cluster: Cluster,
    case: cases.Case,
    num_tokens: int,
    workers: tuple[str, str],
) -> TokenStream:
    """Returns a request like `begun`, on this prefill and this decode worker."""
    async with asyncio.timeout(PLACED_S):
        while True:
            session = await session_at(client, cluster, *workers)
            stream = await begun(client, case, num_tokens, session)
            if await placed(cluster, stream) == workers:
                return stream
            assert await tokens_of(stream) == case["expected"]["token_ids"]


async def responds(cluster: Cluster, worker_id: str, expected: bool) -> None:
    """Waits until the coordinator reports that a worker responds, or does not."""
    async with asyncio.timeout(SOON_S):
        while True:
            silent_ms = (await cluster.worker(worker_id)).silent_for.ToMilliseconds()
            if silent_ms < 1000 if expected else silent_ms > 2200:
                return
            await asyncio.sleep(0.05)


async def tokens_of(stream: TokenStream) -> list[int]:
    async with asyncio.timeout(LOST_S):
        await stream.complete()
    return list(stream.token_ids)


async def serves_on(
    client: BatonClient, cluster: Cluster, guests: Guests, *next_cases: cases.Case
) -> None:
    """Asserts that the next requests get the right tokens, and that nothing is left of any."""
    for case in next_cases:
        made = await client.complete(case["prompt"], timeout_s=60, **case["sampling"])
        assert list(made.token_ids) == case["expected"]["token_ids"]
    await cluster.assert_idle(dead=guests.dead())


async def flip(cluster: Cluster, worker_id: str, role: int) -> None:
    async with AdminClient(cluster.address) as admin, asyncio.timeout(SOON_S):
        await admin.flip_worker(worker_id, role)
        while (await cluster.worker(worker_id)).role != role:
            await asyncio.sleep(0.02)


async def begun(
    client: BatonClient, case: cases.Case, num_tokens: int, session_id: str = ""
) -> TokenStream:
    """Starts a request and waits until it has this many tokens."""
    stream = client.generate(
        case["prompt"], timeout_s=120, session_id=session_id, **case["sampling"]
    )
    async for event in stream:
        if isinstance(event, Tokens) and len(stream.token_ids) >= num_tokens:
            break
    return stream
