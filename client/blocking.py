"""The streaming client for code without asyncio: events come from a plain iterator."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar, Unpack

from google.rpc import code_pb2

from baton.client import errors
from baton.client.client import BatonClient
from baton.client.credentials import ApiKey, Tls
from baton.client.events import Completion, Event
from baton.client.request import Prompt, RequestOptions
from baton.client.stream import TokenStream
from baton.runtime.closing import Closing
from baton.v1 import common_pb2

T = TypeVar("T")


class BlockingStream(Closing):
    """The events of one request: `for event in stream`. Close it, or read it to the end."""

    def __init__(self, client: BlockingClient, stream: TokenStream) -> None:
        self._client, self._stream = client, stream

    @property
    def request_id(self) -> str:
        """The submitted ID, or the ID that the coordinator assigned; empty before that."""
        return self._stream.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All output tokens received so far."""
        return self._stream.token_ids

    @property
    def num_resumes(self) -> int:
        """How often the request was resumed after its session was lost."""
        return self._stream.num_resumes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """The next event. Raises RemoteError as TokenStream does."""
        event = self._client._call(self._next())
        if event is None:
            raise StopIteration
        return event

    def complete(self) -> Completion:
        """Reads to the end and returns the complete output."""
        return self._client._call(self._stream.complete())

    def close(self) -> None:
        """Cancels the request unless it has ended; idempotent."""
        if not self._client.closed:
            self._client._call(self._stream.aclose())

    async def _next(self) -> Event | None:
        return await anext(self._stream, None)


class BlockingClient(Closing):
    """BatonClient for threads; its event loop runs in a thread of its own until `close`.

    `with BlockingClient("127.0.0.1:7070") as client:`; any number of threads may use it. Make
    the client after a fork: a forked process has no copy of the thread, nor of gRPC's threads.

    Args:
        addresses, max_requests, max_buffered_events, resume_timeout_s, retry_timeout_s, tenant,
            tls, api_key, use_http_proxy: See BatonClient.
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
    ) -> None:
        self._client = BatonClient(
            addresses,
            max_requests=max_requests,
            max_buffered_events=max_buffered_events,
            resume_timeout_s=resume_timeout_s,
            retry_timeout_s=retry_timeout_s,
            tenant=tenant,
            tls=tls,
            api_key=api_key,
            use_http_proxy=use_http_proxy,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="baton client", daemon=True
        )
        self._lock = threading.Lock()
        self._open = True
        self._process = os.getpid()
        self._thread.start()
        self._call(self._client.__aenter__())

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> BlockingStream:
        """Submits a request and returns its stream; arguments and errors as BatonClient's."""

        async def submit() -> TokenStream:
            return self._client.generate(prompt, **options)

        return BlockingStream(self, self._call(submit()))

    def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Submits a request and returns its complete output."""
        with self.generate(prompt, **options) as stream:
            return stream.complete()

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the coordinator can serve; raises UnavailableError after the timeout."""
        self._call(self._client.wait_ready(timeout_s))

    def model(self, timeout_s: float = 10.0) -> common_pb2.ModelDescription:
        """Returns the model that the coordinator serves."""
        return self._call(self._client.model(timeout_s))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._open

    def close(self) -> None:
        """Cancels running requests, closes the connection and joins the thread; idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._open:
                return
            self._open = False
            closing = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        closing.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        await self._client.aclose()
        # Calls of other threads: those on streams have just failed, the others are cancelled here.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the client's loop and waits for it; Ctrl-C cancels it."""
        if os.getpid() != self._process:
            # Before the lock, which another thread may have held during the fork.
            coroutine.close()
            raise RuntimeError(
                "the client was made before this process was forked; make it after the fork"
            )
        with self._lock:
            if not self._open:
                coroutine.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise errors.make(code_pb2.CANCELLED, "the client was closed") from None
        except BaseException:
            future.cancel()
            raise
