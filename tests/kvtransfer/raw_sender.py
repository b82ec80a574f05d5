"""A raw gRPC client that sends one handoff to a real service."""

import asyncio
from contextlib import asynccontextmanager

from baton.kvtransfer import frames
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD
from baton.runtime.network import rpc
from baton.v1 import kv_transfer_pb2 as pb


class RawSender:
    """One stream, and the correct messages of one handoff, which the tests alter."""

    def __init__(self, call, layout, handoff):
        self.call, self.layout, self.handoff = call, layout, handoff

    async def send(self, *messages):
        for message in messages:
            await self.call.write(message)

    async def reply(self):
        return await asyncio.wait_for(self.call.read(), 120)

    def open(self, **changes):
        message = pb.HandoffOpen(
            handoff_id=self.handoff.handoff_id,
            epoch=self.handoff.epoch,
            fingerprint=self.layout.fingerprint(),
            num_blocks=self.handoff.num_blocks,
            num_tokens=self.handoff.num_tokens,
            wait_ms=1000,
        )
        message.MergeFrom(pb.HandoffOpen(**changes))
        return frames.encode_open(message)

    def data(self):
        """Yields one frame per shard and layer."""
        handoff, layout = self.handoff, self.layout
        size = handoff.num_blocks * layout.block_bytes
        for shard in range(layout.tp_size):
            for layer in range(layout.num_layers):
                start = layout.offset(shard, layer, 0, handoff.num_blocks)
                yield frames.encode(
                    FrameKind.DATA, handoff.handoff_id, handoff.epoch,
                    handoff.data[start : start + size],
                    shard=shard, layer=layer, num_blocks=handoff.num_blocks,
                )  # fmt: skip

    def references(self):
        """Yields a reference per shard and layer; the sender's memory begins with the data."""
        handoff, layout = self.handoff, self.layout
        for message in self.data():
            (frame,) = frames.decode(message)
            yield frames.encode_reference(
                handoff.handoff_id,
                handoff.epoch,
                layout.offset(frame.shard, frame.layer, 0, handoff.num_blocks),
                shard=frame.shard,
                layer=frame.layer,
                first_block=0,
                num_blocks=frame.num_blocks,
                blocks_checksum=frame.checksum,
            )

    def commits(self):
        for shard in range(self.layout.tp_size):
            totals = Totals()
            for message in self.data():
                (frame,) = frames.decode(message)
                if frame.shard == shard:
                    digest = frames.position_digest(
                        shard, frame.layer, 0, frame.num_blocks, frame.checksum
                    )
                    totals = totals.plus(len(frame.payload), digest)
            yield frames.encode(
                FrameKind.COMMIT, self.handoff.handoff_id, self.handoff.epoch, totals.encode(),
                shard=shard,
            )  # fmt: skip


@asynccontextmanager
async def dialled(receiver, layout, one):
    """Opens a stream for a handoff on a connection of its own."""
    async with rpc.channel(
        receiver.client.address, max_message_bytes=rpc.MAX_FRAME_BYTES
    ) as channel:
        call = channel.stream_stream(
            HANDOFF_METHOD,
            request_serializer=None,
            response_deserializer=pb.HandoffReply.FromString,
        )()
        try:
            yield RawSender(call, layout, one)
        finally:
            call.cancel()
