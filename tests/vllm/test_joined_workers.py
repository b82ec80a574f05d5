"""Real vLLM workers that join a cluster: one changes its role, then workers stop and die.

They die in the middle of a handoff; the session's own workers continue the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import pytest_asyncio

from baton.client.client import BatonClient
from baton.client.stream import TokenStream
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import DECODE, PREFILL, RELAY_HOST, Cluster
from tests.vllm.vllm_guests import (
    SOON_S,
    Guests,
    begun,
    begun_at,
    flip,
    held_up,
    held_up_at,
    let_pass,
    placed,
    responds,
    serves_on,
    session_at,
    tokens_of,
)
from tests.vllm.vllm_relay import Once, Relay
from tests.vllm.worker_parts import Remains, family, metric, released, staging, stopped

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

# The session's own worker, and the guest that changes its role.
PREFILL_ID, DECODE_ID, FLIPPER = "prefill-0", "decode-0", "p2"
KILLED = ("killed-greedy", "killed-seeded", "killed-grammar")
HOST_BLOCKS = "baton_worker_host_kv_blocks"
LONG = (*KILLED, "outgrow-0", "outgrow-1", "outgrow-2")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guests(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guests]:
    guests = Guests(cluster, tmp_path_factory.mktemp("guests"))
    try:
        guests.start("prefill", "p2", 0)
        guests.start("decode", "d2", 1, dialled_at=RELAY_HOST)
        guests.start("prefill", "p3", 0)
        await guests.attached("p2", "d2", "p3")
        address = {each.worker_id: each.kv_address for each in await cluster.all_workers()}["d2"]
        guests.relay = Relay(address, f"127.0.0.1:{address.removeprefix(f'{RELAY_HOST}:')}")
        yield guests
    finally:
        # Other tests need the cluster's own workers.
        await guests.close()


@pytest.fixture
def to_d2(guests: Guests) -> Iterator[Relay]:
    assert guests.relay is not None
    yield guests.relay
    let_pass(guests.relay)


async def rest(streams: list[TokenStream]) -> list[list[int]]:
    await asyncio.gather(*(stream.complete() for stream in streams))
    return [list(stream.token_ids) for stream in streams]


async def test_a_worker_changes_its_role_under_load_and_back(
    client: BatonClient, cluster: Cluster, guests: Guests, expected: dict[str, cases.Case]
) -> None:
    long = [expected[name] for name in LONG]
    tokens = [case["expected"]["token_ids"] for case in long]
    before, processes = await cluster.worker(FLIPPER), family(guests.main(FLIPPER))

    # 1. The worker has prompts, finishes them, and then decodes; its tokens are right.
    there = await session_at(client, cluster, FLIPPER, DECODE_ID)
    chunked = [expected[f"flip-chunked-{index}"] for index in range(2)]
    streams = [
        client.generate(case["prompt"], timeout_s=120, session_id=there, **case["sampling"])
        for case in chunked
    ]
    for stream in streams:
        # The request is accepted, and its prompt is dispatched.
        await anext(stream)
    await flip(cluster, FLIPPER, DECODE)
    assert await rest(streams) == [case["expected"]["token_ids"] for case in chunked]
    assert FLIPPER in [(await placed(cluster, stream))[0] for stream in streams]
    for name in ("flip-0", "flip-1"):
        stream = await begun_at(client, cluster, expected[name], 2, (PREFILL_ID, FLIPPER))
        assert await rest([stream]) == [expected[name]["expected"]["token_ids"]]

    # 2. The worker changes back while it decodes; its outputs move and continue without a fault.
    streams = list(await asyncio.gather(*(begun(client, case, 3) for case in long)))
    assert FLIPPER in [(await placed(cluster, stream))[1] for stream in streams]
    await flip(cluster, FLIPPER, PREFILL)
    assert await rest(streams) == tokens

    # 3. The worker computes prompts again, in the same process and engine.
    stream = await begun_at(client, cluster, expected["flip-2"], 2, (FLIPPER, DECODE_ID))
    assert await rest([stream]) == [expected["flip-2"]["expected"]["token_ids"]]
    after = await cluster.worker(FLIPPER)
    assert (after.incarnation, after.startup_ms) == (before.incarnation, before.startup_ms)
    assert all(process.is_running() for process in processes)
    await cluster.assert_idle()


async def test_a_request_survives_the_stop_of_its_prefill_worker_after_the_first_token(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """The lease of its handoff expires at the receiver, and the request continues without it."""
    case = expected["fault-0"]
    stream = await held_up_at(client, cluster, to_d2, case, ("p2", "d2"))
    assert staging(guests.main("d2")).num_receives == 1
    with stopped(family(guests.main("p2"))):
        await released(guests.main("d2"), SOON_S)
        assert await tokens_of(stream) == case["expected"]["token_ids"]
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-1"], expected["fault-2"])


async def test_requests_leave_a_prefill_worker_that_is_stopped_during_a_prefill(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """The worker stops when the first frame of the first of four chunks arrives."""
    case = expected[f"length-{3 * cases.CHUNK + 5}-1"]
    there = await session_at(client, cluster, "p2", "d2")
    processes = family(guests.main("p2"))
    stop = to_d2.spoil = Once(lambda: stopping.enter_context(stopped(processes)))
    with contextlib.ExitStack() as stopping:
        stream = client.generate(case["prompt"], timeout_s=60, session_id=there, **case["sampling"])
        await anext(stream)
        assert await asyncio.to_thread(stop.done.wait, SOON_S)
        assert await placed(cluster, stream) == ("p2", "d2")
        await released(guests.main("d2"), SOON_S)
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-3"], expected["fault-4"])


async def test_requests_leave_a_decode_worker_that_is_stopped(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    case = expected["fault-5"]
    stream = await held_up_at(client, cluster, to_d2, case, ("p2", "d2"))
    with stopped(family(guests.main("d2"))):
        assert await tokens_of(stream) == case["expected"]["token_ids"]
        assert (await placed(cluster, stream))[1] == DECODE_ID
        await released(guests.main("p2"), SOON_S)
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-6"], expected["fault-7"])


async def test_a_request_survives_a_prefill_worker_killed_while_it_sends(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    case = expected["fault-8"]
    stream = await held_up_at(client, cluster, to_d2, case, ("p2", "d2"))
    remains = Remains(guests.main("p2"))
    guests.main("p2").kill()
    await released(guests.main("d2"), SOON_S)
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    await guests.ended("p2")
    await remains.gone()
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-9"], expected["fault-10"])


@pytest.mark.proves("recovery", "compared", kind="llama")
async def test_all_requests_of_a_killed_decode_worker_continue_elsewhere(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """The worker has running streams and receives one handoff."""
    flowing, received = [expected[name] for name in KILLED], expected["fault-11"]
    with contextlib.ExitStack() as stopping:
        # The other decode worker does not respond: everything goes to this one.
        with stopped([cluster.worker_process("decode")]):
            await responds(cluster, DECODE_ID, False)
            streams = [await begun(client, case, 2) for case in flowing]
            # No stream of the worker ends before the worker is killed.
            stopping.enter_context(stopped([guests.rank("d2")]))
            streams.append(await held_up(client, to_d2, received))
        await responds(cluster, DECODE_ID, True)
        sent = list(zip(streams, [*flowing, received], strict=True))
        assert {(await placed(cluster, stream))[1] for stream, _ in sent} == {"d2"}
        remains = Remains(guests.main("d2"))
        guests.main("d2").kill()
    tokens = await asyncio.gather(*(tokens_of(stream) for stream, _ in sent))
    assert tokens == [case["expected"]["token_ids"] for _, case in sent]
    for stream, _ in sent:
        # A stream that had ended before would be listed with the dead worker.
        assert (await placed(cluster, stream))[1] == DECODE_ID
    await released(guests.main("p3"), SOON_S)
    await guests.ended("d2")
    await remains.gone()
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-12"], expected["fault-13"])


def stores(main: psutil.Process, num_before: int) -> None:
    """Waits until a worker has stored more blocks in host memory than before."""
    deadline = time.monotonic() + SOON_S
    while metric(main, HOST_BLOCKS) <= num_before:
        assert time.monotonic() < deadline, f"{main} stores nothing"
        time.sleep(0.005)


async def test_a_rank_killed_while_it_computes_and_stores_a_prompt_takes_only_its_worker(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    relay: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """The request is prefilled again elsewhere, with or without its first token.

    Each step stores the blocks of the one before in host memory. The handoff is held up until the
    first of four chunks is stored.
    """
    case = expected[f"length-{3 * cases.CHUNK + 5}-2"]
    there = await session_at(client, cluster, "p3", DECODE_ID)
    remains, rank = Remains(guests.main("p3")), guests.rank("p3")
    num_stored = metric(guests.main("p3"), HOST_BLOCKS)

    def kill_while_it_stores() -> None:
        stores(guests.main("p3"), num_stored)
        rank.kill()

    kill = relay.spoil = Once(kill_while_it_stores)
    stream = client.generate(case["prompt"], timeout_s=60, session_id=there, **case["sampling"])
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    assert kill.done.is_set()
    await released(cluster.worker_process("decode"), SOON_S)
    await guests.ended("p3")
    await remains.gone()
    await serves_on(client, cluster, guests, expected["fault-14"], expected["fault-15"])
