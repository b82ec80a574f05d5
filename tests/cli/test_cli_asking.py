"""Which of several coordinators a command speaks to."""

import asyncio
import contextlib
import threading

import grpc
import pytest

from baton.cli.asking import ask
from baton.client import errors
from baton.runtime import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc


class OneAnswer(admin_pb2_grpc.AdminServicer):
    """A coordinator that answers once, and then is there no more."""

    def __init__(self, answers: int) -> None:
        self.answers, self.asked = answers, 0

    async def ListPools(self, request, context):
        self.asked += 1
        if self.asked > self.answers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended")
        return admin_pb2.ListPoolsResponse(generation=self.asked)


@pytest.fixture
def coordinators():
    """Starts some on a loop of their own; `ask` has one too."""
    loop = asyncio.new_event_loop()
    with running(loop), contextlib.ExitStack() as stack:

        def start(*answers):
            found = []
            for number in answers:
                service = OneAnswer(number)
                address, stop = run(loop, serving(service))
                stack.callback(lambda stop=stop: run(loop, stop()))
                found.append((address, service))
            return found

        yield start


@contextlib.contextmanager
def running(loop):
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)


async def serving(service):
    server = rpc.server()
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def stop():
        await server.stop(None)

    return f"127.0.0.1:{port}", stop


async def twice(admin):
    await admin.list_pools()
    return (await admin.list_pools()).generation


def test_the_next_one_is_asked_where_the_first_is_not_there(coordinators):
    (away, _), (there, _) = coordinators(0, 5)
    assert ask(f"{away},{there}", twice) == 2


def test_nobody_else_is_asked_once_one_has_answered(coordinators):
    (first, _), (second, other) = coordinators(1, 5)
    with pytest.raises(errors.UnavailableError, match="it has ended"):
        ask(f"{first},{second}", twice)
    assert other.asked == 0
