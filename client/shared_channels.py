"""One connection per coordinator for short questions, whoever asks them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc

from baton.runtime import rpc
from baton.runtime.dial import Dial


@dataclass(slots=True, eq=False)
class _Shared:
    """A channel and who uses it.

    Attributes:
        version: of the TLS files that it was made with.
        left: nobody new is to use it.
    """

    channel: grpc.aio.Channel
    version: int
    num_users: int = 0
    left: bool = False


class SharedChannels:
    """Owns at most one channel per address, beside those that are still in use when replaced.

    A question brings its own credential as metadata: strangers cost calls, and no connections.

    Args:
        dial: how; a channel is replaced when its TLS files have changed.
        interceptors: of the channels' calls.
    """

    def __init__(self, dial: Dial, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()) -> None:
        self._dial, self._interceptors = dial, interceptors
        self._channels: dict[str, _Shared] = {}

    @contextlib.asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to host:port, for one question."""
        version = self._dial.version
        shared = self._channels.get(address)
        if shared is not None and shared.version != version:
            await self.leave(address, shared.channel)
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

    async def leave(self, address: str, channel: grpc.aio.Channel) -> None:
        """The next question opens another channel: this one does not reach anybody."""
        shared = self._channels.get(address)
        if shared is not None and shared.channel is channel:
            del self._channels[address]
            shared.left = True
            await _close_unused(shared)

    async def aclose(self) -> None:
        """Closes all that nobody uses, the others with their last question; idempotent."""
        for address, shared in tuple(self._channels.items()):
            await self.leave(address, shared.channel)


async def _close_unused(shared: _Shared) -> None:
    if shared.left and not shared.num_users:
        await shared.channel.close()
