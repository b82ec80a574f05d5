"""One cell behind the gateway: its client, its model and its health, as the gateway sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from google.rpc import code_pb2

from baton.client import BatonClient, errors
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

# Longest wait for a coordinator's model description or health.
_QUERY_TIMEOUT_S = 2.0
# Seconds for which the gateway caches them.
_HEALTH_TTL_S, _MODEL_TTL_S = 1.0, 10.0


class Cell:
    """A coordinator with its two pools, and its standby coordinators.

    Args:
        client: Open client; the cell's requests go through it.
        watcher: Open watcher; the dashboard reads the cell's status through it.
        query_limiter: Limits the queries to the coordinators.
        parsers: Makes the parsers of chat outputs; None: outputs are not parsed.

    Attributes:
        name: Addresses of the coordinators, separated by commas.
        model: The model description, fetched with each caller's credential.
        tokenizer: Tokenizer of that model.
        parsers: Parsers of the model's chat outputs; None: outputs are not parsed.
        outage: Logs when the cell cannot be reached.
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
        self.model = PerCallerQuery(self._fetch_model, _MODEL_TTL_S, query_limiter)
        self.tokenizer = model_tokenizer(self.model)
        self.parsers = parsers(self.model) if parsers is not None else None
        self._ready = CachedQuery(self._fetch_ready, _HEALTH_TTL_S)

    async def ready(self) -> None:
        """Returns when the cell can serve requests. Raises HttpError when it cannot."""
        await self._ready.get()

    async def report_unreachable(self) -> None:
        """Logs an outage if no coordinator of the cell can be reached for some seconds.

        A cell that can be reached and cannot serve yet, for example without workers, is no outage.
        """
        try:
            # At the start, a connection on a busy host may take longer than a query later.
            await self.client.wait_ready(2 * _QUERY_TIMEOUT_S)
        except errors.UnreachableError as error:
            self.outage.began(error)
        except RemoteError:
            # Requests report it.
            return

    async def _fetch_model(self, authorization: str) -> common_pb2.ModelDescription:
        try:
            return await self.client.model(_QUERY_TIMEOUT_S, authorization=authorization)
        except RemoteError as error:
            if error.code in (code_pb2.UNAVAILABLE, code_pb2.DEADLINE_EXCEEDED):
                self.outage.began(error)
            if error.code == code_pb2.DEADLINE_EXCEEDED:
                # The time of this query is over, not that of the request: a retry may succeed.
                raise errors.make(code_pb2.UNAVAILABLE, str(error)) from None
            raise

    async def _fetch_ready(self) -> bool:
        try:
            await self.client.wait_ready(_QUERY_TIMEOUT_S)
        except RemoteError as error:
            self.outage.failed(error)
            raise
        self.outage.served()
        return True
