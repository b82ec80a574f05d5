"""gRPC servers with the project's limits."""

import asyncio
import threading
import time

from baton.runtime import rpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

NUM_CALLS = 2500


class Busy(inference_pb2_grpc.InferenceServicer):
    """Keeps its event loop to itself for a second: what comes meanwhile waits inside gRPC."""

    def __init__(self) -> None:
        self.was_busy = False

    async def GetModel(self, request, context):
        if not self.was_busy:
            self.was_busy = True
            time.sleep(1.0)
        return common_pb2.ModelDescription()


def test_calls_wait_for_a_busy_server():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server = rpc.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(Busy(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    async def ask(address):
        async with rpc.channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GetModelRequest()
            await asyncio.gather(*(stub.GetModel(request, timeout=60) for _ in range(NUM_CALLS)))

    async def stop(server):
        await server.stop(None)

    def there(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    server, address = there(start())
    try:
        asyncio.run(ask(address))
    finally:
        there(stop(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
