"""One shared gRPC channel per coordinator for short calls with different credentials."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from baton.runtime.network import rpc
from baton.runtime.security.dial import Dial


@dataclass(slots=True, eq=False)
class _Shared:
    """A channel and the number of its users.

    Attributes:
        channel: The channel.
        version: Version of the TLS files with which the channel was opened.
        num_users: Number of calls that use the channel now.
        discarded: The channel gets no new users and is closed after its last one.
    """

    channel: grpc.aio.Channel
    version: int
    num_users: int = 0
    discarded: bool = False


class SharedChannels:
    """Owns one channel per address, plus replaced channels that are still in use.

    Each call sends its own credential as metadata, so that many callers share one connection.

    Args:
        dial: Connection settings; a channel is replaced when its TLS files have changed.
        interceptors: Interceptors of the channels' calls.
    """

    def __init__(self, dial: Dial, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> None:
        self._dial, self._interceptors = dial, interceptors
        self._channels: dict[str, _Shared] = {}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the channel to an address (host:port) for one call."""
        version = self._dial.version
        shared = self._channels.get(address)
        if shared is not None and shared.version != version:
            await self.discard(address, shared.channel)
            shared = self._channels.get(address)
        if shared is None:
            channel = rpc.channel(address, dial=self._dial, interceptors=self._interceptors)
            shared = self._channels[address] = _Shared(channel, version)
        shared.num_users += 1
        try:
            yield shared.channel
        finally:
            shared.num_users -= 1
            await _close_unused(shared)

    async def discard(self, address: str, channel: grpc.aio.Channel) -> None:
        """Discards a channel that does not reach its server; the next call opens a new one."""
        shared = self._channels.get(address)
        if shared is not None and shared.channel is channel:
            del self._channels[address]
            shared.discarded = True
            await _close_unused(shared)

    async def aclose(self) -> None:
        """Closes unused channels now and used channels after their last call; idempotent."""
        for address, shared in tuple(self._channels.items()):
            await self.discard(address, shared.channel)


async def _close_unused(shared: _Shared) -> None:
    if shared.discarded and not shared.num_users:
        await shared.channel.close()
