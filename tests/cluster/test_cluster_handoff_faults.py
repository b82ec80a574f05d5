"""Workers that die or stand still while a handoff is half on its way."""

import asyncio
import itertools
import time

import pytest
from processes import Cluster
from vllm_relay import Hold, Relay, as_it_is
from worker_parts import (
    Remains,
    family,
    forgotten_by,
    released,
    staging,
    stopped,
    transfer_service,
)

from baton.client import AdminClient, BatonClient, Tokens
from baton.client.errors import UnavailableError

# No two begin alike: the prefix cache has nothing of one that is new.
PROMPTS = ([salt, *range(5, 305)] for salt in itertools.count(5))
NUM_TOKENS = 12
LEASE_S = 1.0
# Of a handoff that the relay is to hold up: a process of a busy machine may not run for a second.
LONG_LEASE_S = 3.0
HANDOFF_TIMEOUT_S = LONG_LEASE_S + 1
RECOVERY_S = 0.5
# The sender waits so much longer than the receiver.
SENDER_GRACE_S = 5.0
# For what is noticed at once, with the lease or with a worker's loss.
SOON_S = 30.0
TWIN = {"prefill": "decode", "decode": "prefill"}
RELAY_HOST = "127.0.0.2"
KV_TRANSFER = {"send_bytes": 2**23, "receive_bytes": 2**23}
# A prompt takes 1.5 s, and frames leave every 80 ms: a handoff is on its way for long, but never
# without a frame for as long as the lease.
SLOW = {"prefill_per_token_ms": 5, "max_num_batched_tokens": 64}


class Pair:
    """The one prefill and the one decode worker of a cluster; another takes a dead one's place.

    Attributes:
        cluster: they belong to.
        names: by role, of those that serve.
        dead: names of those before them.
        relay: what the decode worker receives comes through it; None: it comes directly.
    """

    def __init__(self, cluster, *, relayed=False):
        self.cluster, self.names, self.dead, self.relay = cluster, {}, [], None
        self._relayed, self._relayed_name = relayed, ""

    def start(self, role):
        if role in self.names:
            self.dead.append(self.names[role])
        self.names[role] = f"{role}-{len(self.dead)}"
        self.cluster.start_worker(role, self.names[role])

    async def complete(self):
        """Starts who is missing, and waits until both serve."""
        for role in ("prefill", "decode"):
            if role not in self.names or not self.cluster.lives(self.names[role]):
                self.start(role)
        await self.cluster.attached(*self.names.values())
        decode = self.names["decode"]
        if self._relayed and self._relayed_name != decode:
            self.close()
            address = await self.cluster.kv_address(decode)
            _, _, port = address.rpartition(":")
            self.relay, self._relayed_name = Relay(address, f"127.0.0.1:{port}"), decode

    def close(self):
        if self.relay is not None:
            self.relay.close()

    def process(self, role):
        return self.cluster.process(self.names[role])

    async def released(self, role, within_s):
        await released(self.process(role), within_s)

    async def lost(self, name):
        """Until the coordinator has given a worker up."""
        async with AdminClient(self.cluster.address) as admin, asyncio.timeout(SOON_S):
            while name in {worker.worker_id for worker in await admin.list_workers()}:
                await asyncio.sleep(0.05)

    async def serve_on(self, client):
        """The next request gets the right tokens, by a handoff, and nothing is left of any."""
        await self.complete()
        before = staging(self.process("decode")).handoffs_committed
        prompt = next(PROMPTS)[:41]
        done = await client.complete(prompt, max_tokens=NUM_TOKENS, timeout_s=20)
        assert done.token_ids == self.cluster.expected(prompt, NUM_TOKENS)
        await self.cluster.nothing_left(dead=self.dead)
        assert staging(self.process("decode")).handoffs_committed == before + 1

    async def half_received(self, client):
        """A request whose prompt is not computed, and of whose handoff a part has arrived."""
        before = staging(self.process("decode")).bytes_received
        prompt = next(PROMPTS)
        stream = client.generate(prompt, max_tokens=NUM_TOKENS)
        await anext(stream)
        deadline = time.monotonic() + SOON_S
        while (seen := staging(self.process("decode"))).bytes_received == before:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.01)
        assert seen.num_receives == 1
        assert seen.receive_bytes_used > seen.bytes_received - before
        assert not stream.token_ids
        return stream, self.cluster.expected(prompt, NUM_TOKENS)

    async def held_up(self, client):
        """A request whose first token is out, and of whose handoff the relay keeps the rest."""
        hold = self.relay.spoil = Hold()
        prompt = next(PROMPTS)[:60]
        stream = client.generate(prompt, max_tokens=NUM_TOKENS)
        async for event in stream:
            if isinstance(event, Tokens):
                break
        assert await asyncio.to_thread(hold.reached.wait, SOON_S)
        assert staging(self.process("decode")).num_receives == 1
        return stream, self.cluster.expected(prompt, NUM_TOKENS)


@pytest.fixture(scope="module")
def direct_pair(tmp_path_factory, model):
    """On the transport that the pair agrees on; soon given up when silent."""
    with Cluster(
        tmp_path_factory.mktemp("direct"),
        model,
        coordinator={"worker_timeout_s": 3},
        simulated=SLOW,
        kv_transfer={**KV_TRANSFER, "idle_timeout_s": LEASE_S},
    ) as cluster:
        yield Pair(cluster)


@pytest.fixture
async def direct(direct_pair):
    await direct_pair.complete()
    return direct_pair


@pytest.fixture(scope="module")
def relayed_pair(tmp_path_factory, model):
    """Frames over gRPC, through a relay; as patient with silence as in earnest.

    A request does not wait for long for a worker in the place of a dead one: that has no relay yet.
    """
    with Cluster(
        tmp_path_factory.mktemp("relayed"),
        model,
        coordinator={"handoff_timeout_s": HANDOFF_TIMEOUT_S, "max_recovery_s": RECOVERY_S},
        simulated=SLOW,
        kv_transfer={
            **KV_TRANSFER,
            "idle_timeout_s": LONG_LEASE_S,
            "transports": ["grpc"],
            "advertise_host": RELAY_HOST,
        },
    ) as cluster:
        pair = Pair(cluster, relayed=True)
        yield pair
        pair.close()


@pytest.fixture
async def relayed(relayed_pair):
    await relayed_pair.complete()
    yield relayed_pair
    if isinstance(hold := relayed_pair.relay.spoil, Hold):
        hold.let_go()
    relayed_pair.relay.spoil = as_it_is


def killed(pair, role, part):
    """Kills a part of a worker; returns what must be gone then."""
    main = pair.process(role)
    remains = Remains(main)
    (main if part == "main process" else transfer_service(main)).kill()
    return remains


@pytest.mark.parametrize("part", ["main process", "transfer service"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_killed_in_mid_prefill_is_replaced(direct, victim, part):
    """Its twin lets go of the handoff before there is another."""
    async with BatonClient(direct.cluster.address) as client:
        (stream, expected), name = await direct.half_received(client), direct.names[victim]
        remains = killed(direct, victim, part)
        await direct.released(TWIN[victim], SOON_S)
        direct.start(victim)
        async with asyncio.timeout(SOON_S):
            await stream.complete()
        assert stream.token_ids == expected
        await direct.cluster.exit_code(name)
        await remains.gone()
        await direct.serve_on(client)
        await forgotten_by(direct.process(TWIN[victim]), SOON_S)


@pytest.mark.parametrize("part", ["main process", "transfer service"])
async def test_a_prefill_worker_killed_after_the_first_token_is_not_missed(relayed, part):
    async with BatonClient(relayed.cluster.address) as client:
        (stream, expected), name = await relayed.held_up(client), relayed.names["prefill"]
        remains = killed(relayed, "prefill", part)
        await relayed.released("decode", SOON_S)
        async with asyncio.timeout(SOON_S):
            await stream.complete()
        assert stream.token_ids == expected
        await relayed.cluster.exit_code(name)
        await remains.gone()
        relayed.relay.spoil.let_go()
        await relayed.serve_on(client)


async def test_a_decode_worker_killed_after_the_first_token_frees_the_sender(relayed):
    async with BatonClient(relayed.cluster.address) as client:
        (stream, _), name = await relayed.held_up(client), relayed.names["decode"]
        remains = killed(relayed, "decode", "transfer service")
        await relayed.released("prefill", SOON_S)
        why = f"no decode worker is attached: waited {RECOVERY_S:g} s after worker {name} stopped"
        with pytest.raises(UnavailableError, match=why):
            async with asyncio.timeout(SOON_S):
                await stream.complete()
        await relayed.cluster.exit_code(name)
        await remains.gone()
        relayed.relay.spoil.let_go()
        await relayed.serve_on(client)


@pytest.mark.parametrize("part", ["worker", "transfer service"])
async def test_a_prefill_worker_that_stands_still_in_mid_prefill(direct, part):
    """Its lease at the receiver ends; what it goes on with then is not handed over."""
    async with BatonClient(direct.cluster.address) as client:
        (stream, expected), main = await direct.half_received(client), direct.process("prefill")
        with stopped(family(main) if part == "worker" else [transfer_service(main)]):
            await direct.released("decode", SOON_S)
            assert not stream.token_ids or part == "transfer service"
        async with asyncio.timeout(SOON_S):
            await stream.complete()
        assert stream.token_ids == expected
        await direct.serve_on(client)


async def test_a_prefill_worker_that_stands_still_after_the_first_token(relayed):
    """Its request ends while it stands still."""
    async with BatonClient(relayed.cluster.address) as client:
        stream, expected = await relayed.held_up(client)
        with stopped(family(relayed.process("prefill"))):
            await relayed.released("decode", SOON_S)
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
        relayed.relay.spoil.let_go()
        await relayed.serve_on(client)


async def test_a_decode_worker_that_stands_still_is_lost_and_frees_the_sender(direct):
    async with BatonClient(direct.cluster.address) as client:
        (stream, expected), name = await direct.half_received(client), direct.names["decode"]
        remains = Remains(direct.process("decode"))
        with stopped(family(direct.process("decode"))):
            await direct.released("prefill", SOON_S)
            direct.start("decode")
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
            await direct.lost(name)
        assert await direct.cluster.exit_code(name) == 1
        assert "fenced" in direct.cluster.stderr(name).splitlines()[-1]
        await remains.gone()
        await direct.serve_on(client)


async def test_a_receiving_transfer_service_that_stands_still_holds_nobody_up(relayed):
    """The engine beside it computes the prompt, and the sender's lease ends; it may go on then."""
    async with BatonClient(relayed.cluster.address) as client:
        stream, expected = await relayed.held_up(client)
        with stopped([transfer_service(relayed.process("decode"))]):
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
            await relayed.released("prefill", LONG_LEASE_S + SENDER_GRACE_S + SOON_S)
        relayed.relay.spoil.let_go()
        await relayed.serve_on(client)
