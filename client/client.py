"""The streaming client."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

import grpc

from baton.client import errors, health
from baton.client.events import Completion
from baton.client.request import Prompt, RequestOptions, build
from baton.client.session import Session
from baton.client.stream import RequestState, TokenStream
from baton.runtime import rpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class BatonClient:
    """Generates text through a coordinator; any number of requests at once over one stream.

    `async with BatonClient("127.0.0.1:7070") as client:`; for use in the loop it was entered in.
    The session opens with the first request, and again with the next one after it was lost.

    Args:
        address: of the coordinator, host:port.
        max_requests: live at a time.
        max_buffered_events: of one request that wait for its reader; beyond them tokens join the
            last one.
        tenant: who to account requests to that name none; empty: the coordinator's default.
    """

    def __init__(
        self,
        address: str,
        *,
        max_requests: int = 4096,
        max_buffered_events: int = 256,
        tenant: str = "",
    ) -> None:
        if max_requests < 1 or max_buffered_events < 1:
            raise ValueError("max_requests and max_buffered_events must be at least 1")
        self.address = address
        self._max_requests = max_requests
        self._max_buffered_events = max_buffered_events
        self._tenant = tenant
        self._channel: grpc.aio.Channel | None = None
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        self._channel = rpc.channel(self.address)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels what runs and closes the connection; idempotent."""
        session, self._session = self._session, None
        channel, self._channel = self._channel, None
        if session is not None:
            await session.aclose()
        if channel is not None:
            await channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> TokenStream:
        """Submits a request and returns its stream at once.

        Args:
            prompt: text, chat turns, or token ids.
            **options: sampling, lane, deadline and the rest: see RequestOptions.

        Raises:
            InvalidArgumentError: a value that cannot be sent.
            ResourceExhaustedError: max_requests are running.
            TypeError: an unknown option.
        """
        request = build(prompt, {"tenant": self._tenant, **options})
        session = self._open_session()
        state = RequestState(
            request,
            max_buffered_events=self._max_buffered_events,
            timeout_s=options.get("timeout_s"),
        )
        try:
            session.submit(state)
        except Exception:
            state.abandon()
            raise
        return TokenStream(state)

    async def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """`generate`, read to the end: the whole answer.

        Raises:
            RemoteError: the request failed; a subclass from client/errors.py.
        """
        return await self.generate(prompt, **options).complete()

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns as soon as the coordinator can serve requests.

        Raises:
            UnavailableError: it could not within timeout_s.
        """
        await health.wait_serving(self._open_channel(), self.address, timeout_s)

    async def model(self, timeout_s: float = 10.0) -> common_pb2.ModelDescription:
        """The model that the coordinator serves.

        Raises:
            RemoteError: the call failed.
        """
        stub = self._stub(self._open_channel())
        try:
            return await stub.GetModel(inference_pb2.GetModelRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.address) from None

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with BatonClient(...)`")
        return self._channel

    def _open_session(self) -> Session:
        if self._session is None or self._session.closed:
            self._session = Session(
                self._stub(self._open_channel()),
                address=self.address,
                max_requests=self._max_requests,
            )
        return self._session

    @staticmethod
    def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceAsyncStub:
        return inference_pb2_grpc.InferenceStub(channel)
