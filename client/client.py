"""The streaming client for asyncio."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Self, Unpack

import grpc
from google.rpc import code_pb2

from baton.client import errors, health
from baton.client.client_request import ClientRequest
from baton.client.credentials import ApiKey, Tls, dial, sendable
from baton.client.events import Completion
from baton.client.request import Prompt, RequestOptions, build
from baton.client.session_manager import SessionManager
from baton.client.shared_channels import SharedChannels
from baton.client.stream import TokenStream
from baton.runtime.closing import AsyncClosing
from baton.runtime.errors import RemoteError
from baton.runtime.network import rpc
from baton.runtime.security.dial import AUTHORIZATION, Dial
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class BatonClient(AsyncClosing):
    """Generates text through a coordinator; multiplexes all requests over one gRPC stream.

    `async with BatonClient("127.0.0.1:7070") as client:`; use it in the event loop that entered it.
    The session opens with the first request. If the session is lost, the client opens another one
    with the same or the next coordinator and resumes its requests there with the tokens that they
    have: a reader of a stream only notices a pause.

    Args:
        addresses: Addresses of the coordinators, host:port, as a sequence or separated by commas.
            One of them serves at a time.
        max_requests: Limit of concurrent requests.
        max_buffered_events: Limit of unread events per request; further tokens are joined to the
            last event.
        resume_timeout_s: Time in which a request must be accepted again after its session was
            lost, within its own timeout_s; 0 disables resuming.
        retry_timeout_s: Time after submission in which a refused request is submitted again, if
            the coordinator says when to retry (RetryInfo), within its own timeout_s; 0: the
            request fails at once.
        tenant: Tenant of requests that name none; empty: the coordinator's default.
        tls: TLS files; None: no TLS.
        api_key: Credential of requests without `authorization`: an API key, a JWT, or a function
            that returns one; empty: no credential.
        use_http_proxy: Whether to connect through the HTTP proxy of the environment variables
            `https_proxy` and `http_proxy`.
        find_other_cell: Called with a model when a request of that model has been without a
            session for 5 s, has lost its session before its first token, or was refused by a
            restarting coordinator; empty: the base model. Returns an open client of another cell
            that serves the model, where the request is resumed within resume_timeout_s; or None:
            the request waits for this client's next session.
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
        use_http_proxy: bool = False,
        find_other_cell: Callable[[str], BatonClient | None] | None = None,
    ) -> None:
        if max_requests < 1 or max_buffered_events < 1:
            raise ValueError("max_requests and max_buffered_events must be at least 1")
        _check_timeout("resume_timeout_s", resume_timeout_s)
        _check_timeout("retry_timeout_s", retry_timeout_s)
        self.addresses = _split_addresses(addresses)
        self._max_requests = max_requests
        self._max_buffered_events = max_buffered_events
        self._resume_timeout_s, self._retry_timeout_s = resume_timeout_s, retry_timeout_s
        self._tenant = tenant
        self._dial = dial(tls, api_key, use_http_proxy=use_http_proxy)
        self._find_other_cell = find_other_cell
        self._sessions: SessionManager | None = None
        self._channels = SharedChannels(self._dial)

    async def __aenter__(self) -> Self:
        self._sessions = SessionManager(
            self.addresses,
            max_requests=self._max_requests,
            resume_timeout_s=self._resume_timeout_s,
            dial=self._dial,
            find_other_sessions=self._other_sessions if self._find_other_cell is not None else None,
        )
        return self

    async def aclose(self, why: str = "the client was closed") -> None:
        """Cancels running requests with the reason `why` and closes the connection; idempotent."""
        sessions, self._sessions = self._sessions, None
        try:
            await self._channels.aclose()
        finally:
            if sessions is not None:
                await sessions.aclose(why)

    @property
    def address(self) -> str | None:
        """Address of the coordinator of the current session; None without a session."""
        return self._sessions.address if self._sessions is not None else None

    @property
    def draining(self) -> bool:
        """Whether the coordinator of the current session is restarting: it takes no requests."""
        return self._sessions is not None and self._sessions.draining

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> TokenStream:
        """Submits a request and returns its stream at once.

        Args:
            prompt: Text, chat turns, or token IDs.
            **options: Sampling, lane, deadline and other options; see RequestOptions.

        Raises:
            InvalidArgumentError: A value cannot be sent.
            ResourceExhaustedError: max_requests requests are running.
            TypeError: An option is unknown.
        """
        defaults: RequestOptions = {"tenant": self._tenant}
        if credential := self._dial.credential():
            defaults["authorization"] = credential
        message = build(prompt, {**defaults, **options})
        sessions = self._opened_sessions()
        retry_timeout_s = options.get("retry_timeout_s")
        if retry_timeout_s is None:
            retry_timeout_s = self._retry_timeout_s
        elif not (math.isfinite(retry_timeout_s) and retry_timeout_s >= 0):
            raise errors.invalid("retry_timeout_s", retry_timeout_s, "must be at least 0 seconds")
        request = ClientRequest(
            message,
            max_buffered_events=self._max_buffered_events,
            timeout_s=options.get("timeout_s"),
            retry_timeout_s=retry_timeout_s,
            credential=self._dial.credential if "authorization" not in options else None,
        )
        try:
            sessions.submit(request)
        except Exception:
            request.abandon()
            raise
        return TokenStream(request)

    async def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Submits a request and returns its complete output.

        Raises:
            RemoteError: The request failed; a subclass from client/errors.py.
        """
        return await self.generate(prompt, **options).complete()

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when a coordinator can serve requests; the next session is opened with it.

        Raises:
            UnavailableError: No coordinator could serve within timeout_s.
        """
        sessions = self._opened_sessions()
        waiting = [
            asyncio.create_task(_wait_serving(address, timeout_s, self._dial))
            for address in sessions.addresses
        ]
        failures = []
        try:
            for answer in asyncio.as_completed(waiting):
                try:
                    sessions.prefer(await answer)
                    return
                except RemoteError as error:
                    failures.append(error)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        raise errors.combine(failures)

    async def model(
        self, timeout_s: float = 10.0, *, authorization: str = ""
    ) -> common_pb2.ModelDescription:
        """Returns the model of the first coordinator that answers.

        Args:
            timeout_s: Timeout of the call to each coordinator, in seconds.
            authorization: Credential, "Bearer ..."; empty: the client's credential.

        Raises:
            RemoteError: The call failed.
        """
        failures = []
        metadata = self._dial.metadata()
        if authorization:
            metadata = ((AUTHORIZATION, sendable(authorization)),)
        request = inference_pb2.GetModelRequest()
        for address in self._opened_sessions().addresses:
            async with self._channels.use(address) as channel:
                stub: inference_pb2_grpc.InferenceAsyncStub
                stub = inference_pb2_grpc.InferenceStub(channel)
                try:
                    return await stub.GetModel(request, timeout=timeout_s, metadata=metadata)
                except grpc.RpcError as error:
                    failures.append(errors.from_call(error, address, channel, timeout_s))
                if not errors.has_no_answer(failures[-1]):
                    break
                if failures[-1].code == code_pb2.UNAVAILABLE:
                    await self._channels.discard(address, channel)
        raise errors.combine(failures)

    def _other_sessions(self, request: ClientRequest) -> SessionManager | None:
        """Returns the sessions of another cell's client that can resume a request."""
        assert self._find_other_cell is not None
        other = self._find_other_cell(request.model)
        return other._sessions if other is not None else None

    def _opened_sessions(self) -> SessionManager:
        if self._sessions is None:
            raise RuntimeError("the client is not open: use `async with BatonClient(...)`")
        return self._sessions


def _check_timeout(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}; must be at least 0 seconds")


def _split_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ValueError(f"addresses is {addresses!r}; must name at least one host:port")
    return found


async def _wait_serving(address: str, timeout_s: float, dial: Dial) -> str:
    """Returns the address as soon as the coordinator there can serve."""
    async with rpc.channel(address, dial=dial) as channel:
        await health.wait_serving(channel, address, timeout_s)
    return address
