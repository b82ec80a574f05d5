"""One cell behind the gateway: its coordinators, and what the gateway asks and knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from google.rpc import code_pb2

from baton.client import BatonClient
from baton.client.watcher import Watcher
from baton.gateway.coordinator_queries import CachedQuery, PerCallerQuery, QueryLimiter
from baton.gateway.outage_log import OutageLog
from baton.gateway.rendered_prompt import model_tokenizer
from baton.runtime.errors import RemoteError
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ModelOutputParsers

OutputParsersFactory: TypeAlias = (
    "Callable[[PerCallerQuery[common_pb2.ModelDescription]], ModelOutputParsers]"
)

# Longest wait for a coordinator's answer to a question about itself, and how long it holds.
_ASK_TIMEOUT_S, _HOLDS_S = 2.0, 1.0
_MODEL_HOLDS_S = 10.0


class Cell:
    """A coordinator with its two pools, and those coordinators that may take its place.

    Args:
        client: open; requests go through it.
        watcher: open; what the dashboard shows.
        turns: of questions that strangers may ask.
        parsers: makes those of chats' outputs; None: there are none.

    Attributes:
        name: its coordinators' addresses.
        model: what it serves, by the credential of who asks.
        tokenizer: of that model.
        parsers: of what that model writes; None: there are none.
        outage: tells the log when it cannot be reached.
    """

    def __init__(
        self,
        client: BatonClient,
        watcher: Watcher,
        query_limiter: QueryLimiter,
        parsers: OutputParsersFactory | None = None,
    ) -> None:
        self.client, self.watcher = client, watcher
        self.name = ",".join(client.addresses)
        self.outage = OutageLog()
        self.model = PerCallerQuery(self._asked_model, _MODEL_HOLDS_S, query_limiter)
        self.tokenizer = model_tokenizer(self.model)
        self.parsers = parsers(self.model) if parsers is not None else None
        self._ready = CachedQuery(self._asked_ready, _HOLDS_S)

    async def ready(self) -> None:
        """Returns when a request could be served. Raises HttpError when none could."""
        await self._ready.get()

    async def _asked_model(self, authorization: str) -> common_pb2.ModelDescription:
        try:
            return await self.client.model(_ASK_TIMEOUT_S, authorization=authorization)
        except RemoteError as error:
            if error.code in (code_pb2.UNAVAILABLE, code_pb2.DEADLINE_EXCEEDED):
                self.outage.began(error)
            raise

    async def _asked_ready(self) -> bool:
        try:
            await self.client.wait_ready(_ASK_TIMEOUT_S)
        except RemoteError as error:
            self.outage.failed(error)
            raise
        self.outage.served()
        return True
