"""A stream begins when a transport is ready, and ends once, whenever it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from baton.kvtransfer.arena import Arena
from baton.kvtransfer.service.sender import Sender, SenderLimits
from baton.kvtransfer.service.stream_driver import StreamDriver
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_transports import named


class NoReplies:
    """A stream without replies, until it is cancelled."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def send(self, frames: Sequence[OutgoingFrame]) -> None: ...

    async def receive(self) -> pb.HandoffReply | None:
        await self._ended.wait()
        return None

    async def finish(self) -> None:
        self._ended.set()

    def cancel(self) -> None:
        self._ended.set()


class Opening:
    """A driver, the streams that it has opened, and how it ended."""

    def __init__(self) -> None:
        self.ready, self.streams, self.lost = asyncio.Event(), list[NoReplies](), list[str]()
        self.opened, self.ended = asyncio.Event(), asyncio.Event()
        self.driver = StreamDriver(
            b"h" * 16,
            Sender(Arena(0, 64), memoryview(bytearray(64)), SenderLimits(60.0, 60.0), named()),
            self._until_ready,
            self._open,
            lambda reply: None,
            self._on_lost,
        )

    async def _until_ready(self) -> None:
        await self.ready.wait()

    def _open(self) -> NoReplies:
        self.streams.append(NoReplies())
        self.opened.set()
        return self.streams[-1]

    def _on_lost(self, detail: str) -> None:
        self.lost.append(detail)
        self.ended.set()


async def test_nothing_is_opened_while_the_link_is_being_joined():
    # The receiver would end a stream without an open.
    opening = Opening()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not opening.streams
    opening.ready.set()
    await asyncio.wait_for(opening.opened.wait(), 120)
    opening.driver.stop(None)
    await asyncio.wait_for(opening.ended.wait(), 120)
    assert len(opening.streams) == len(opening.lost) == 1


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_is_stopped_before_it_is_opened_ends_once(has_begun):
    opening = Opening()
    if has_begun:
        await asyncio.sleep(0)
    opening.driver.stop(b"farewell")
    await asyncio.wait_for(opening.ended.wait(), 120)
    await opening.driver.close()
    assert not opening.streams
    assert opening.lost == ["the stream was stopped"]
