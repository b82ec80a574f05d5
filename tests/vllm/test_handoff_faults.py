"""Real vLLM workers that die or stand still while a handoff is half on its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import vllm_cases as cases
from vllm_cluster import RELAY_HOST, Cluster
from vllm_guests import LOST_S, SOON_S, Guests, next_goes, placed
from vllm_relay import Hold, Once, Relay, as_it_is
from worker_parts import Remains, family, released, staging, stopped

from baton.client.client import BatonClient
from baton.client.events import Tokens
from baton.client.stream import TokenStream

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

# The session's own.
DECODE_ID = "decode-0"
KILLED = ("killed-greedy", "killed-seeded", "killed-grammar")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guests(
    cluster: Cluster, model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guests]:
    guests = Guests(cluster, model, tmp_path_factory.mktemp("guests"))
    try:
        guests.start("prefill", "p2", 0)
        guests.start("decode", "d2", 1)
        await guests.attached("p2", "d2")
        address = {each.worker_id: each.kv_address for each in await cluster.all_workers()}["d2"]
        guests.relay = Relay(address, f"127.0.0.1:{address.removeprefix(f'{RELAY_HOST}:')}")
        yield guests
    finally:
        # Other tests count on the cluster's own workers.
        await guests.close()


@pytest.fixture
def to_d2(guests: Guests) -> Iterator[Relay]:
    assert guests.relay is not None
    yield guests.relay
    let_pass(guests.relay)


def let_pass(relay: Relay) -> None:
    if isinstance(hold := relay.spoil, Hold):
        hold.let_go()
    relay.spoil = as_it_is


async def held_up(
    client: BatonClient, cluster: Cluster, relay: Relay, case: cases.Case
) -> TokenStream:
    """A request whose first token is out, and of whose handoff the relay keeps the rest."""
    hold = relay.spoil = Hold()
    stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
    async for event in stream:
        if isinstance(event, Tokens):
            break
    assert await asyncio.to_thread(hold.reached.wait, SOON_S)
    return stream


async def flows(client: BatonClient, case: cases.Case) -> TokenStream:
    """A request whose decode worker has said something."""
    stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
    async for _ in stream:
        if len(stream.token_ids) > 1:
            break
    return stream


async def responds(cluster: Cluster, worker_id: str, expected: bool) -> None:
    """Waits until the coordinator finds that a worker does, or does not."""
    async with asyncio.timeout(SOON_S):
        while True:
            (worker,) = [w for w in await cluster.all_workers() if w.worker_id == worker_id]
            silent_ms = worker.silent_for.ToMilliseconds()
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
    """The next requests get the right tokens, and nothing is left of any."""
    for case in next_cases:
        made = await client.complete(case["prompt"], timeout_s=60, **case["sampling"])
        assert list(made.token_ids) == case["expected"]["token_ids"]
    await cluster.assert_idle(dead=guests.dead())


async def test_a_prefill_worker_that_stands_still_with_its_first_token_out(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """Its lease at the receiver ends, and its request goes on without it."""
    case = expected["fault-0"]
    await next_goes(client, cluster, guests, "p2", "d2")
    stream = await held_up(client, cluster, to_d2, case)
    assert await placed(cluster, stream) == ("p2", "d2")
    assert staging(guests.main("d2")).num_receives == 1
    with stopped(family(guests.main("p2"))):
        await released(guests.main("d2"), SOON_S)
        assert await tokens_of(stream) == case["expected"]["token_ids"]
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-1"], expected["fault-2"])


async def test_a_prefill_worker_that_stands_still_in_mid_prefill(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """It stops when the first frame of the first of four chunks arrives."""
    case = expected[f"length-{3 * cases.CHUNK + 5}-1"]
    await next_goes(client, cluster, guests, "p2", "d2")
    processes = family(guests.main("p2"))
    stop = to_d2.spoil = Once(lambda: stopping.enter_context(stopped(processes)))
    with contextlib.ExitStack() as stopping:
        stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
        await anext(stream)
        assert await asyncio.to_thread(stop.done.wait, SOON_S)
        assert await placed(cluster, stream) == ("p2", "d2")
        await released(guests.main("d2"), SOON_S)
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-3"], expected["fault-4"])


async def test_a_decode_worker_that_stands_still_is_not_waited_for(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    case = expected["fault-5"]
    await next_goes(client, cluster, guests, "p2", "d2")
    stream = await held_up(client, cluster, to_d2, case)
    assert await placed(cluster, stream) == ("p2", "d2")
    with stopped(family(guests.main("d2"))):
        assert await tokens_of(stream) == case["expected"]["token_ids"]
        assert (await placed(cluster, stream))[1] == DECODE_ID
        await released(guests.main("p2"), SOON_S)
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-6"], expected["fault-7"])


async def test_a_prefill_worker_killed_in_mid_push_is_not_missed(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    case = expected["fault-8"]
    await next_goes(client, cluster, guests, "p2", "d2")
    stream = await held_up(client, cluster, to_d2, case)
    assert await placed(cluster, stream) == ("p2", "d2")
    remains = Remains(guests.main("p2"))
    guests.main("p2").kill()
    # While its successor loads, nothing waits for it.
    guests.start("prefill", "p3", 0)
    await released(guests.main("d2"), SOON_S)
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    await guests.ended("p2")
    await remains.gone()
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-9"], expected["fault-10"])


async def test_all_that_a_killed_decode_worker_had_goes_on_elsewhere(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    to_d2: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """Streams that flow, and one whose handoff it was receiving."""
    await guests.attached("p3")
    flowing, received = [expected[name] for name in KILLED], expected["fault-11"]
    with contextlib.ExitStack() as stopping:
        # The other decode worker does not respond: everything goes to this one.
        with stopped([cluster.worker_process("decode")]):
            await responds(cluster, DECODE_ID, False)
            streams = [await flows(client, case) for case in flowing]
            # None of its streams ends before it is killed.
            stopping.enter_context(stopped([guests.rank("d2")]))
            streams.append(await held_up(client, cluster, to_d2, received))
        await responds(cluster, DECODE_ID, True)
        sent = list(zip(streams, [*flowing, received], strict=True))
        assert {(await placed(cluster, stream))[1] for stream, _ in sent} == {"d2"}
        remains = Remains(guests.main("d2"))
        guests.main("d2").kill()
    tokens = await asyncio.gather(*(tokens_of(stream) for stream, _ in sent))
    assert tokens == [case["expected"]["token_ids"] for _, case in sent]
    for stream, _ in sent:
        # One that had ended before would be listed with the worker that is gone.
        assert (await placed(cluster, stream))[1] == DECODE_ID
    await released(guests.main("p3"), SOON_S)
    await guests.ended("d2")
    await remains.gone()
    let_pass(to_d2)
    await serves_on(client, cluster, guests, expected["fault-12"], expected["fault-13"])


async def test_a_rank_killed_in_mid_prefill_takes_only_its_worker(
    client: BatonClient,
    cluster: Cluster,
    guests: Guests,
    relay: Relay,
    expected: dict[str, cases.Case],
) -> None:
    """Its request is prefilled again elsewhere, whether or not the first token was out by then."""
    case = expected[f"length-{3 * cases.CHUNK + 5}-2"]
    await next_goes(client, cluster, guests, "p3", DECODE_ID)
    remains = Remains(guests.main("p3"))
    kill = relay.spoil = Once(guests.rank("p3").kill)
    stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
    assert await tokens_of(stream) == case["expected"]["token_ids"]
    assert kill.done.is_set()
    await released(cluster.worker_process("decode"), SOON_S)
    await guests.ended("p3")
    await remains.gone()
    await serves_on(client, cluster, guests, expected["fault-14"], expected["fault-15"])
