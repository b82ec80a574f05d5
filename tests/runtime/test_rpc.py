"""gRPC servers with Baton's limits."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time

import grpc
import pytest

from baton.runtime.config_error import ConfigError
from baton.runtime.network import rpc
from baton.runtime.security.access import Access
from baton.runtime.security.dial import Dial
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

NUM_CALLS, NUM_CLIENTS = 2500, 24


class Busy(inference_pb2_grpc.InferenceServicer):
    """Blocks its event loop for a second, so that calls wait inside gRPC."""

    def __init__(self) -> None:
        self.was_busy = False

    async def GetModel(self, request, context):
        if not self.was_busy:
            self.was_busy = True
            time.sleep(1.0)
        return common_pb2.ModelDescription()


@contextlib.contextmanager
def busy_server(protection=None):
    """Address of a server on its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server = rpc.server(protection=protection)
        inference_pb2_grpc.add_InferenceServicer_to_server(Busy(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    async def stop(server):
        await server.stop(None)

    def there(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    server, address = there(start())
    try:
        yield address
    finally:
        there(stop(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_a_port_that_cannot_be_bound_has_the_reason(monkeypatch):
    server = rpc.server()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^k: cannot listen on {address}: Address already"):
            rpc.bind(server, address, "k")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign requested address$"):
        rpc.bind(server, "192.0.2.1:0", "k")
    with pytest.raises(ConfigError, match=r"nowhere\.invalid:0: (?!address in use)"):
        rpc.bind(server, "nowhere.invalid:0", "k")

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Root may bind every port.
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(server, "add_insecure_port", lambda _: 0)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:81: Permission denied$"):
        rpc.bind(server, "127.0.0.1:81", "k")


@pytest.fixture
async def proxy(monkeypatch):
    """Makes a proxy that answers nothing the one of the environment; gives its connections."""
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader, writer):
        asked.put_nowait(await reader.readline())
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for name in ("no_grpc_proxy", "no_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    yield asked
    server.close()


async def test_a_proxy_of_the_environment_is_used_only_on_request(proxy):
    request = inference_pb2.GetModelRequest()
    with busy_server() as address:
        async with rpc.channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await stub.GetModel(request, timeout=120)
        assert proxy.empty()
        async with rpc.channel(address, dial=Dial(use_http_proxy=True)) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GetModel(request, timeout=120)
            async with asyncio.timeout(120):
                assert await proxy.get() == f"CONNECT {address} HTTP/1.1\r\n".encode()
            call.cancel()


def test_calls_wait_for_a_busy_server():
    async def ask(address):
        async with rpc.channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GetModelRequest()
            await asyncio.gather(*(stub.GetModel(request, timeout=120) for _ in range(NUM_CALLS)))

    with busy_server() as address:
        asyncio.run(ask(address))


def test_calls_beyond_the_limit_are_refused_with_a_status():
    config = SecurityConfig(max_calls=4)
    protection = rpc.Protection(config, Access(config, Refusals()), None, None)

    async def ask(channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            await stub.GetModel(inference_pb2.GetModelRequest(), timeout=120)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def ask_all(address):
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(rpc.channel(address)) for _ in range(NUM_CLIENTS)
            ]
            for channel in channels:
                await channel.channel_ready()
            return await asyncio.gather(*map(ask, channels))

    with busy_server(protection) as address:
        codes = asyncio.run(ask_all(address))
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
