"""The operators' client. It returns the contract's own messages (baton.v1.admin_pb2)."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

import grpc

from baton.client import errors
from baton.client.call_metadata import interceptors
from baton.client.credentials import ApiKey, Tls, dial
from baton.runtime import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2

T = TypeVar("T")


class AdminClient:
    """State and control of a cell: `async with AdminClient("127.0.0.1:7070") as admin:`.

    Every call raises a RemoteError of client/errors.py when it fails, UnavailableError when no
    coordinator is there.

    Args:
        address: of the coordinator, host:port.
        timeout_s: of each call.
        tls: None: without.
        api_key: of an operator, where the coordinator asks for one.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        tls: Tls | None = None,
        api_key: ApiKey = "",
    ) -> None:
        self.address = address
        self._dial = dial(tls, api_key)
        self._interceptors = interceptors(self._dial) if api_key else []
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = rpc.channel(self.address, dial=self._dial, interceptors=self._interceptors)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def list_pools(self) -> admin_pb2.ListPoolsResponse:
        """Pools, lanes, the model, and since when."""
        request = admin_pb2.ListPoolsRequest()
        return await self._answer(self._stub.ListPools(request, timeout=self._timeout_s))

    async def list_workers(
        self, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED
    ) -> list[admin_pb2.WorkerInfo]:
        """Workers of a role; of both by default."""
        request = admin_pb2.ListWorkersRequest(role=role)
        answer = await self._answer(self._stub.ListWorkers(request, timeout=self._timeout_s))
        return list(answer.workers)

    async def list_requests(
        self, *, include_ended: bool = False, limit: int = 0
    ) -> list[admin_pb2.RequestInfo]:
        """Requests that run, and those that ended recently when asked for; limit 0 is no limit."""
        request = admin_pb2.ListRequestsRequest(include_ended=include_ended, limit=limit)
        answer = await self._answer(self._stub.ListRequests(request, timeout=self._timeout_s))
        return list(answer.requests)

    async def get_request(self, request_id: str) -> admin_pb2.RequestInfo:
        """One request, running or recently ended. NotFoundError when there is none."""
        request = admin_pb2.GetRequestRequest(request_id=request_id)
        return await self._answer(self._stub.GetRequest(request, timeout=self._timeout_s))

    async def cancel_request(self, request_id: str) -> None:
        """Cancels a request. NotFoundError when it is not running."""
        request = admin_pb2.CancelRequestRequest(request_id=request_id)
        await self._answer(self._stub.CancelRequest(request, timeout=self._timeout_s))

    @property
    def _stub(self) -> admin_pb2_grpc.AdminAsyncStub:
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with AdminClient(...)`")
        return admin_pb2_grpc.AdminStub(self._channel)

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.address) from None
