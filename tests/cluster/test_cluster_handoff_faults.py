"""Workers that are killed or stopped in the middle of a handoff."""

import asyncio
import itertools
import time

import pytest

from baton.client import AdminClient, BatonClient, Tokens
from baton.client.errors import UnavailableError
from tests.cluster.processes import Cluster
from tests.vllm.vllm_relay import Hold, Relay, as_it_is
from tests.vllm.worker_parts import (
    Remains,
    family,
    forgotten_by,
    released,
    staging,
    stopped,
    transfer_service,
)

# Each prompt begins with another token, so the prefix cache never has a part of a new prompt.
PROMPTS = ([salt, *range(5, 305)] for salt in itertools.count(5))
NUM_TOKENS = 12
# Lease of a handoff in seconds.
LEASE_S = 2.0
# Lease of a handoff that the relay holds up, where a busy machine must not let the lease expire.
LONG_LEASE_S = 3.0
HANDOFF_TIMEOUT_S = LONG_LEASE_S + 1
RECOVERY_S = 0.5
# The sender's lease is this much longer than the receiver's.
SENDER_GRACE_S = 5.0
# Timeout of a wait in seconds; it only bounds a test that hangs.
SOON_S = 120.0
TWIN = {"prefill": "decode", "decode": "prefill"}
RELAY_HOST = "127.0.0.2"
KV_TRANSFER = {"send_bytes": 2**23, "receive_bytes": 2**23}
# A prompt takes 2.4 s and its frames are sent every 130 ms. A handoff takes long enough for a test
# to disturb it, while the gaps between its frames are much shorter than the lease.
SLOW = {"prefill_per_token_ms": 8, "max_num_batched_tokens": 64}


class Pair:
    """One prefill and one decode worker of a cluster, with replacements for killed workers.

    Attributes:
        cluster: Cluster of both workers.
        names: IDs of the current workers, by role.
        dead: IDs of the workers that were replaced.
        relay: Relay for the frames to the decode worker; None when frames are sent directly.
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
        """Starts missing workers and waits until both workers are attached."""
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

    async def removed(self, name):
        """Waits until the coordinator has removed a worker."""
        async with AdminClient(self.cluster.address) as admin, asyncio.timeout(SOON_S):
            while name in {worker.worker_id for worker in await admin.list_workers()}:
                await asyncio.sleep(0.05)

    async def check_next_request(self, client):
        """Checks that the next request uses a handoff, gets the right tokens and leaves nothing."""
        await self.complete()
        before = staging(self.process("decode")).handoffs_committed
        prompt = next(PROMPTS)[:41]
        done = await client.complete(prompt, max_tokens=NUM_TOKENS, timeout_s=SOON_S)
        assert done.token_ids == self.cluster.expected(prompt, NUM_TOKENS)
        await self.cluster.nothing_left(dead=self.dead)
        assert staging(self.process("decode")).handoffs_committed == before + 1

    async def half_received(self, client):
        """Starts a request; returns when a part of its KV cache has arrived during the prefill."""
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
        """Starts a request; returns after its first token, while the relay holds up its handoff."""
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
    """Uses the transport that the pair negotiates; silent workers are removed after 10 s."""
    with Cluster(
        tmp_path_factory.mktemp("direct"),
        model,
        elastic=False,
        # Every request uses a handoff, however fast steps on a busy machine seem.
        decode={"local_prefill": False},
        coordinator={"worker_timeout_s": 10},
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
    """Sends frames over gRPC through a relay; the timeout for silent workers is the default.

    A request waits only briefly for a replacement worker, because that worker has no relay yet.
    """
    with Cluster(
        tmp_path_factory.mktemp("relayed"),
        model,
        elastic=False,
        # Every request uses a handoff, however fast steps on a busy machine seem.
        decode={"local_prefill": False},
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
    """Kills a worker's main process or transfer service; returns its remaining processes."""
    main = pair.process(role)
    remains = Remains(main)
    (main if part == "main process" else transfer_service(main)).kill()
    return remains


@pytest.mark.parametrize("part", ["main process", "transfer service"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_killed_in_mid_prefill_is_replaced(direct, victim, part):
    """The other worker releases the handoff before a replacement starts."""
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
        await direct.check_next_request(client)
        await forgotten_by(direct.process(TWIN[victim]), SOON_S)


@pytest.mark.parametrize("part", ["main process", "transfer service"])
async def test_a_prefill_worker_killed_after_the_first_token(relayed, part):
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
        await relayed.check_next_request(client)


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
        await relayed.check_next_request(client)


@pytest.mark.parametrize("part", ["worker", "transfer service"])
async def test_a_prefill_worker_stopped_in_mid_prefill(direct, part):
    """Its lease at the receiver expires, and the receiver rejects later frames."""
    async with BatonClient(direct.cluster.address) as client:
        (stream, expected), main = await direct.half_received(client), direct.process("prefill")
        with stopped(family(main) if part == "worker" else [transfer_service(main)]):
            await direct.released("decode", SOON_S)
            assert not stream.token_ids or part == "transfer service"
        async with asyncio.timeout(SOON_S):
            await stream.complete()
        assert stream.token_ids == expected
        await direct.check_next_request(client)


async def test_a_prefill_worker_stopped_after_the_first_token(relayed):
    """The request completes while the prefill worker is stopped."""
    async with BatonClient(relayed.cluster.address) as client:
        stream, expected = await relayed.held_up(client)
        with stopped(family(relayed.process("prefill"))):
            await relayed.released("decode", SOON_S)
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
        relayed.relay.spoil.let_go()
        await relayed.check_next_request(client)


async def test_a_stopped_decode_worker_is_removed_and_frees_the_sender(direct):
    async with BatonClient(direct.cluster.address) as client:
        (stream, expected), name = await direct.half_received(client), direct.names["decode"]
        remains = Remains(direct.process("decode"))
        with stopped(family(direct.process("decode"))):
            await direct.released("prefill", SOON_S)
            direct.start("decode")
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
            await direct.removed(name)
        assert await direct.cluster.exit_code(name) == 1
        assert "fenced" in direct.cluster.stderr(name).splitlines()[-1]
        await remains.gone()
        await direct.check_next_request(client)


async def test_a_stopped_receiving_transfer_service_delays_no_request(relayed):
    """The decode worker computes the prompt itself, and the sender's lease expires."""
    async with BatonClient(relayed.cluster.address) as client:
        stream, expected = await relayed.held_up(client)
        with stopped([transfer_service(relayed.process("decode"))]):
            async with asyncio.timeout(SOON_S):
                await stream.complete()
            assert stream.token_ids == expected
            await relayed.released("prefill", LONG_LEASE_S + SENDER_GRACE_S + SOON_S)
        relayed.relay.spoil.let_go()
        await relayed.check_next_request(client)
