"""A coordinator that responds to each request with its own name."""

import asyncio
from contextlib import asynccontextmanager

from baton.runtime.errors import Unauthenticated
from baton.runtime.errors import abort as abort_call
from baton.v1 import common_pb2
from tests.client.scripted_inference import (
    ScriptedInference,
    accepted,
    delta,
    failed,
    finished,
    serving,
    set_serving,
)


class CellOf(ScriptedInference):
    """A coordinator that responds to every request with its own name, or refuses it.

    Attributes:
        requests: All requests that it got, in order.
        refuses: Error with which it refuses every request; None: it accepts them.
        fails: Error with which every request fails after its first token; None: no failure.
        hangs: Whether it never ends a request.
        silent: Whether it sends no event at all.
        keyholder: The only credential that it accepts; None: it needs no credential.
    """

    def __init__(self, name, model, *adapters):
        super().__init__()
        self.name, self.model, self.adapters = name, model, adapters
        self.requests = []
        self.refuses = self.fails = self.keyholder = None
        self.hangs = self.silent = False

    async def GetModel(self, request, context):
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        if self.keyholder is not None and shown != self.keyholder:
            await abort_call(context, Unauthenticated("who are you?"))
        return common_pb2.ModelDescription(
            name=self.model,
            max_model_len=8192,
            adapters=[common_pb2.LoraAdapter(name=one) for one in self.adapters],
        )

    async def answer(self):
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._answer(await self.connections.get()))

    async def _answer(self, connection):
        while True:
            message = await connection.received.get()
            if message.WhichOneof("message") != "submit":
                continue
            submit = message.submit
            self.requests.append(submit.request)
            number = submit.stream
            if self.silent:
                continue
            if self.refuses is not None:
                connection.send(failed(number, self.refuses))
                continue
            begin = len(submit.request.resume.token_ids)
            connection.send(accepted(number), delta(number, begin, [1], self.name))
            if not self.hangs:
                connection.send(failed(number, self.fails) if self.fails else finished(number))


@asynccontextmanager
async def serve(cell, address="127.0.0.1:0"):
    """Serves the cell; yields its address."""
    async with serving(cell, address) as (bound, health):
        await set_serving(health, True)
        answering = asyncio.create_task(cell.answer())
        try:
            yield bound
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
