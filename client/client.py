"""The streaming client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Self, Unpack

import grpc
from google.rpc import code_pb2

from baton.client import errors, health
from baton.client.connector import Connector
from baton.client.credentials import ApiKey, Tls, dial, sendable
from baton.client.events import Completion
from baton.client.request import Prompt, RequestOptions, build
from baton.client.request_state import RequestState
from baton.client.shared_channels import SharedChannels
from baton.client.stream import TokenStream
from baton.runtime import rpc
from baton.runtime.closing import AsyncClosing
from baton.runtime.dial import AUTHORIZATION, Dial
from baton.runtime.errors import RemoteError
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class BatonClient(AsyncClosing):
    """Generates text through a coordinator; any number of requests at once over one stream.

    `async with BatonClient("127.0.0.1:7070") as client:`; for use in the loop it was entered in.
    The session opens with the first request. When it is lost, the client opens another, with the
    same coordinator or the next, and its requests go on there with the tokens they have: who reads
    their streams notices a pause.

    Args:
        addresses: of coordinators, host:port; several as a sequence or separated by commas. One of
            them serves at a time.
        max_requests: live at a time.
        max_buffered_events: of one request that wait for its reader; beyond them tokens join the
            last one.
        resume_timeout_s: how long after the loss of its session a request may take to be accepted
            again, within its own timeout_s; 0 turns resuming off.
        retry_timeout_s: how long after its submission a request that was refused is submitted
            again, when the coordinator said when to (RetryInfo), within its own timeout_s; 0: it
            fails at once.
        tenant: who to account requests to that name none; empty: the coordinator's default.
        tls: None: without.
        api_key: of requests that bring no `authorization` of their own: an API key, a JWT, or what
            gives one; empty: none.
        elsewhere: asked for an open client of another cell that serves a model, when a request of
            that model has been without a session for 5 s, or has lost it before its first token: it
            goes on there with the tokens it has, within resume_timeout_s. None, or an answer of
            None: it waits for this client's own.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        max_requests: int = 4096,
        max_buffered_events: int = 256,
        resume_timeout_s: float = 30.0,
        retry_timeout_s: float = 0.0,
        tenant: str = "",
        tls: Tls | None = None,
        api_key: ApiKey = "",
        elsewhere: Callable[[str], BatonClient | None] | None = None,
    ) -> None:
        if max_requests < 1 or max_buffered_events < 1:
            raise ValueError("max_requests and max_buffered_events must be at least 1")
        _check_timeout("resume_timeout_s", resume_timeout_s)
        _check_timeout("retry_timeout_s", retry_timeout_s)
        self.addresses = _split(addresses)
        self._max_requests = max_requests
        self._max_buffered_events = max_buffered_events
        self._resume_timeout_s, self._retry_timeout_s = resume_timeout_s, retry_timeout_s
        self._tenant = tenant
        self._dial = dial(tls, api_key)
        self._elsewhere = elsewhere
        self._connector: Connector | None = None
        self._channels = SharedChannels(self._dial)

    async def __aenter__(self) -> Self:
        self._connector = Connector(
            self.addresses,
            max_requests=self._max_requests,
            resume_timeout_s=self._resume_timeout_s,
            dial=self._dial,
            elsewhere=self._other_connector if self._elsewhere is not None else None,
        )
        return self

    async def aclose(self, why: str = "the client was closed") -> None:
        """Cancels what runs, which says why, and closes the connection; idempotent."""
        connector, self._connector = self._connector, None
        try:
            await self._channels.aclose()
        finally:
            if connector is not None:
                await connector.aclose(why)

    @property
    def address(self) -> str | None:
        """The coordinator that the session is with; None while there is none."""
        return self._connector.address if self._connector is not None else None

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
        defaults: RequestOptions = {"tenant": self._tenant}
        if credential := self._dial.credential():
            defaults["authorization"] = credential
        request = build(prompt, {**defaults, **options})
        connector = self._open()
        retry_timeout_s = options.get("retry_timeout_s")
        if retry_timeout_s is None:
            retry_timeout_s = self._retry_timeout_s
        elif not (math.isfinite(retry_timeout_s) and retry_timeout_s >= 0):
            raise errors.invalid("retry_timeout_s", retry_timeout_s, "must be at least 0 seconds")
        state = RequestState(
            request,
            max_buffered_events=self._max_buffered_events,
            timeout_s=options.get("timeout_s"),
            retry_timeout_s=retry_timeout_s,
            credential=self._dial.credential if "authorization" not in options else None,
        )
        try:
            connector.submit(state)
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
        """Returns as soon as a coordinator can serve requests; the next session is with it.

        Raises:
            UnavailableError: none could within timeout_s.
        """
        connector = self._open()
        asking = [
            asyncio.create_task(_wait_serving(address, timeout_s, self._dial))
            for address in connector.addresses
        ]
        failures = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    connector.prefer(await answer)
                    return
                except RemoteError as error:
                    failures.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise errors.of_all(failures)

    async def model(
        self, timeout_s: float = 10.0, *, authorization: str = ""
    ) -> common_pb2.ModelDescription:
        """The model that the coordinator serves; the first one's that can be reached.

        Args:
            timeout_s: of each coordinator.
            authorization: credential, "Bearer ..."; empty: the client's.

        Raises:
            RemoteError: the call failed.
        """
        failures = []
        metadata = self._dial.metadata()
        if authorization:
            metadata = ((AUTHORIZATION, sendable(authorization)),)
        request = inference_pb2.GetModelRequest()
        for address in self._open().addresses:
            async with self._channels.to(address) as channel:
                stub: inference_pb2_grpc.InferenceAsyncStub
                stub = inference_pb2_grpc.InferenceStub(channel)
                try:
                    return await stub.GetModel(request, timeout=timeout_s, metadata=metadata)
                except grpc.RpcError as error:
                    failures.append(errors.of_call(error, address, channel, timeout_s))
                if failures[-1].code != code_pb2.UNAVAILABLE:
                    break
                await self._channels.leave(address, channel)
        raise errors.of_all(failures)

    def _other_connector(self, state: RequestState) -> Connector | None:
        """Of a client that can go on with a request."""
        assert self._elsewhere is not None
        other = self._elsewhere(state.model)
        return other._connector if other is not None else None

    def _open(self) -> Connector:
        if self._connector is None:
            raise RuntimeError("the client is not open: use `async with BatonClient(...)`")
        return self._connector


def _check_timeout(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}; must be at least 0 seconds")


def _split(addresses: str | Sequence[str]) -> tuple[str, ...]:
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ValueError(f"addresses is {addresses!r}; must name at least one host:port")
    return found


async def _wait_serving(address: str, timeout_s: float, dial: Dial) -> str:
    """Returns the address once the coordinator there can serve."""
    async with rpc.channel(address, dial=dial) as channel:
        await health.wait_serving(channel, address, timeout_s)
    return address
