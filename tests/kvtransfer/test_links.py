"""Streams that open links: one link per ID, at most MAX_LINKS, and each joined in time."""

import asyncio
import contextlib
import threading

import grpc
import pytest

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.grpc_methods import link_method
from baton.kvtransfer.transports import collective
from baton.kvtransfer.transports import links as links_module
from baton.kvtransfer.transports.links import Links
from baton.kvtransfer.transports.process_group import SENDER
from baton.runtime.network import rpc
from baton.v1 import kv_transfer_pb2 as pb

# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0
FINGERPRINT = pb.KvFingerprint(block_bytes=64)


class Handler:
    def fingerprint(self):
        return FINGERPRINT

    def pulls_ended(self, ended):
        raise AssertionError("nothing is read")


@contextlib.asynccontextmanager
async def served(open_timeout_s=WAIT_S):
    """Yields the links of a server and the server's address."""
    memory = memoryview(bytearray(1))
    links = Links("gloo", Handler(), memory, open_timeout_s=open_timeout_s, frame_timeout_s=1.0)
    server = rpc.server(max_message_bytes=rpc.MAX_FRAME_BYTES)
    port = server.add_insecure_port("127.0.0.1:0")
    links.add_to(server)
    await server.start()
    try:
        yield links, f"127.0.0.1:{port}"
    finally:
        await links.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def serving(open_timeout_s=WAIT_S):
    """Yields the links of a server and a channel to the server."""
    async with served(open_timeout_s) as (links, address), rpc.channel(address) as channel:
        yield links, channel


async def refusals(channel, link_ids):
    """Opens streams together; returns the refusal of each. They stay open until all have one."""
    calls = [
        channel.stream_stream(
            link_method("gloo"),
            request_serializer=pb.LinkMessage.SerializeToString,
            response_deserializer=pb.LinkMessage.FromString,
        )()
        for _ in link_ids
    ]

    async def ask(call, link_id):
        hello = pb.LinkHello(link_id=link_id, fingerprint=FINGERPRINT)
        await call.write(pb.LinkMessage(hello=hello))
        answer = await call.read()
        return answer.hello.refusal

    async with asyncio.timeout(WAIT_S):
        told = await asyncio.gather(*map(ask, calls, link_ids))
    for call in calls:
        call.cancel()
    return told


async def all_gone(links, link_ids):
    async with asyncio.timeout(WAIT_S):
        while any(map(links.incoming, link_ids)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ids", [["one"] * 6, ["a", "b", "c", "d"]], ids=["same", "too many"])
async def test_concurrent_streams_get_one_link_per_id_and_at_most_max_links(monkeypatch, ids):
    places = 1 if len(set(ids)) == 1 else 2
    monkeypatch.setattr(links_module, "MAX_LINKS", 2)
    async with serving() as (links, channel):
        # A slow look-up of the local address: it ends only when every stream has sent its hello.
        looked = asyncio.Event()
        num_looking = 0

        async def look(function, *arguments):
            nonlocal num_looking
            num_looking += 1
            if num_looking == len(ids):
                looked.set()
            await looked.wait()
            return function(*arguments)

        monkeypatch.setattr(links_module.asyncio, "to_thread", look)
        told = await refusals(channel, ids)
        assert sum(not refusal for refusal in told) == places
        words = "must be new" if places == 1 else "2 links are in use"
        assert all(words in refusal for refusal in told if refusal)
        await all_gone(links, ids)
        monkeypatch.undo()
        # No link is left, so the same ID can be used again.
        async with asyncio.timeout(WAIT_S):
            while (await refusals(channel, ids[:1]))[0]:
                await asyncio.sleep(0.05)


async def test_a_stream_that_ends_before_its_answer_leaves_no_link():
    async with serving() as (links, channel):
        call = channel.stream_stream(
            link_method("gloo"),
            request_serializer=pb.LinkMessage.SerializeToString,
            response_deserializer=pb.LinkMessage.FromString,
        )()
        hello = pb.LinkHello(link_id="gone", fingerprint=FINGERPRINT)
        await call.write(pb.LinkMessage(hello=hello))
        call.cancel()
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await call.read()
        await all_gone(links, ["gone"])


async def test_a_stream_without_a_hello_is_ended():
    async with serving(open_timeout_s=0.05) as (_, channel):
        call = channel.stream_stream(
            link_method("gloo"),
            request_serializer=pb.LinkMessage.SerializeToString,
            response_deserializer=pb.LinkMessage.FromString,
        )()
        async with asyncio.timeout(WAIT_S):
            answer = await call.read()
            assert answer.hello.refusal
            assert await call.read() is grpc.aio.EOF


async def test_a_link_with_a_long_id_is_refused():
    async with serving() as (_, channel):
        told = await refusals(channel, ["x" * 2**20, ""])
    assert told == [f"link_id has {length} characters; must have 1 to 64" for length in (2**20, 0)]


async def test_a_receiver_keeps_few_hanging_threads_for_all_attempts_of_a_host(monkeypatch):
    """The sender's end fails each time; the receiver's end waits for it, as NCCL may."""
    never, waiting = threading.Event(), []

    def join(store, rank, options):
        if rank == SENDER:
            raise TransferError("the sender's end has failed")
        waiting.append(rank)
        never.wait(WAIT_S)
        raise TransferError("the test has ended")

    monkeypatch.setattr(collective, "join", join)
    monkeypatch.setattr(collective, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(links_module, "RETRY_S", 0.0)
    async with served() as (links, address):

        async def attempt():
            """Returns why a new link cannot be used, when it has ended at both ends."""
            await links.wait_decided(address)
            while links._to[address].task is not None or links._incoming:
                await asyncio.sleep(0.01)
            return links._to[address].problem

        try:
            async with asyncio.timeout(WAIT_S):
                # One hanging thread does not refuse the other services of its host.
                while len(waiting) < 4:
                    await attempt()
                hang = "4 earlier links from 127.0.0.1 have ended, and their threads hang"
                assert [await attempt() for _ in range(3)] == 3 * [hang]
                assert len(waiting) == 4
                never.set()
                # When the threads have ended, further links are tried.
                while len(waiting) == 4:
                    await attempt()
        finally:
            never.set()


async def test_a_link_whose_group_is_never_joined_is_given_up(monkeypatch):
    """NCCL, which needs two GPUs, waits for its peer without a deadline."""
    never = threading.Event()

    def join(*_):
        never.wait(WAIT_S)
        raise TransferError("the test has ended")

    monkeypatch.setattr(collective, "join", join)
    monkeypatch.setattr(collective, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(links_module, "JOIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(links_module, "RETRY_S", 0.0)
    async with served() as (links, address):
        try:
            async with asyncio.timeout(WAIT_S):
                await links.wait_decided(address)
                with pytest.raises(TransferError, match="was not joined within"):
                    links.link_id(address)
                # The receiver has room for the next attempt.
                while links._incoming:
                    await asyncio.sleep(0.01)
                # The sender's thread is still in the library, so it does not begin another one.
                num_threads = threading.active_count()
                for _ in range(3):
                    with pytest.raises(TransferError, match="was not joined within"):
                        links.link_id(address)
                assert threading.active_count() == num_threads
                never.set()
                # Then it tries again.
                while True:
                    with pytest.raises(TransferError) as refused:
                        links.link_id(address)
                    if "is being joined" in str(refused.value):
                        break
                    await asyncio.sleep(0.01)
        finally:
            never.set()
