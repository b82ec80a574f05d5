"""Handoffs of the simulated engine: real bytes through the real transfer service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.sim_tokens import KvDigests
from baton.kvtransfer.engine_port import EnginePort, filled_frame, split_blocks
from baton.kvtransfer.frames import checksum
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.v1 import kv_transfer_pb2

# Most handoff states that are remembered before their requests come.
_MAX_STATES = 4096
_SETTLED = (
    kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
    kv_transfer_pb2.HANDOFF_STATE_RELEASED,
    kv_transfer_pb2.HANDOFF_STATE_FAILED,
)


class PortClosed(Exception):
    """The transfer service has ended, so the engine ends too."""


class WrongHandoff(Exception):
    """Committed staging holds the KV cache of another prompt. This must never happen."""


class HandoffPort:
    """Sends and receives the handoffs of one simulated engine.

    Args:
        socket_path: Control socket of the transfer service.
        layout: Layout of the engine's KV cache, with tensor-parallel size 1.

    Raises:
        ServiceGone: The transfer service does not answer.
    """

    def __init__(self, socket_path: str, layout: KvLayout) -> None:
        self._port, self.layout = EnginePort(socket_path), layout
        self._port.subscribe()
        self._states: dict[bytes, kv_transfer_pb2.HandoffState.ValueType] = {}

    def poll(self) -> None:
        """Reads changes of handoffs' states. Raises PortClosed."""
        for state in self._port.poll():
            self._states.pop(state.handoff_id, None)
            self._states[state.handoff_id] = state.state
        while len(self._states) > _MAX_STATES:
            del self._states[next(iter(self._states))]
        if not self._port.alive:
            raise PortClosed("the transfer service has ended")

    def send(self, send: SendHandoff, prompt: Sequence[int], adapter: str) -> HandoffSend:
        return HandoffSend(self._port, self.layout, send, prompt, adapter)

    def is_settled(self, handoff_id: bytes) -> bool:
        """Returns whether a handoff is committed or will never be."""
        return self._states.get(handoff_id) in _SETTLED

    def is_committed(self, handoff_id: bytes) -> bool:
        """Returns whether a handoff can be loaded."""
        return self._states.get(handoff_id) == kv_transfer_pb2.HANDOFF_STATE_COMMITTED

    def load(self, receive: ReceiveHandoff, tokens: Sequence[int], adapter: str) -> int:
        """Loads a committed handoff once; its staging is released in any case.

        Args:
            receive: The expected handoff.
            tokens: Tokens of the prompt, then known tokens.
            adapter: LoRA adapter of the request; empty: none.

        Returns:
            Number of prompt tokens, from the first, that are loaded or were left out; 0 if the
                handoff is missing or damaged. A fetch may bring fewer than expected.

        Raises:
            WrongHandoff: The handoff is intact, but belongs to another prompt or adapter.
        """
        state = self._states.pop(receive.handoff_id, None)
        # This reason applies when the handoff came too late; a handoff that has ended keeps its
        # own.
        not_loaded = kv_transfer_pb2.REFUSAL_REASON_EXPIRED
        try:
            if state != kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
                return 0
            claim = self._port.claim(receive.handoff_id, 0)
            if claim is None:
                return 0
            not_loaded = kv_transfer_pb2.REFUSAL_REASON_INCOMPLETE
            if receive.is_fetch:
                brought = min(receive.num_tokens, receive.skip_tokens + claim.num_tokens)
                receive = replace(receive, num_tokens=brought)
            num_tokens = receive.num_tokens - receive.skip_tokens
            num_blocks = self.layout.num_blocks(num_tokens)
            if (claim.num_blocks, claim.num_tokens) != (num_blocks, num_tokens):
                raise WrongHandoff(
                    f"wrong handoff: holds {claim.num_tokens} tokens in {claim.num_blocks} blocks; "
                    f"the request expects {num_tokens} in {num_blocks}"
                )
            layers = self._copy(claim.offset, num_blocks, claim.frames)
            if layers is None:
                not_loaded = kv_transfer_pb2.REFUSAL_REASON_CHECKSUM
                return 0
            self._verify(layers, receive, tokens, adapter)
            not_loaded = kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
            return receive.num_tokens
        finally:
            self._port.release(receive.handoff_id, all_shards=True, not_loaded=not_loaded)

    def release(self, handoff_id: bytes) -> None:
        """Releases a handoff that will not be loaded."""
        self._states.pop(handoff_id, None)
        cancelled = kv_transfer_pb2.REFUSAL_REASON_CANCELLED
        self._port.release(handoff_id, all_shards=True, not_loaded=cancelled)

    def close(self) -> None:
        self._port.close()

    def _copy(
        self, offset: int, num_blocks: int, frames: Sequence[kv_transfer_pb2.LocalFrame]
    ) -> bytes | None:
        """Returns a copy of staging; None if a frame's bytes differ from those received."""
        data = bytes(self._port.memory[offset : offset + self.layout.shard_bytes(num_blocks)])
        view = memoryview(data)
        for frame in frames:
            begin = self.layout.offset(0, frame.layer, frame.first_block, num_blocks)
            end = begin + frame.num_blocks * self.layout.block_bytes
            if checksum(view[begin:end]) != frame.checksum:
                return None
        return data

    def _verify(
        self, data: bytes, receive: ReceiveHandoff, tokens: Sequence[int], adapter: str
    ) -> None:
        layout = self.layout
        num_blocks = layout.num_blocks(receive.num_tokens - receive.skip_tokens)
        skip_blocks = receive.skip_tokens // layout.block_size_tokens
        digests = KvDigests(tokens, receive.num_tokens, layout.block_size_tokens, adapter)
        for block in range(num_blocks):
            for layer in range(layout.num_layers):
                begin = layout.offset(0, layer, block, num_blocks)
                expected = digests.kv_bytes(layer, skip_blocks + block, layout.block_bytes)
                if data[begin : begin + layout.block_bytes] != expected:
                    raise WrongHandoff(
                        f"wrong handoff: layer {layer}, block {block} of handoff "
                        f"{receive.handoff_id.hex()} is not this prompt's"
                    )


class HandoffSend:
    """Stages one prompt's blocks; the simulated engine owns it and calls `write`.

    As on vLLM, staged blocks stay right when the request is preempted and its prompt is computed
    again, so each block is staged once.

    Attributes:
        has_written: Whether some blocks are staged.
    """

    def __init__(
        self,
        port: EnginePort,
        layout: KvLayout,
        send: SendHandoff,
        prompt: Sequence[int],
        adapter: str,
    ) -> None:
        self._port, self._layout, self._send = port, layout, send
        self._num_blocks = layout.num_blocks(send.num_tokens - send.skip_tokens)
        self._skip_blocks = send.skip_tokens // layout.block_size_tokens
        self._digests = KvDigests(prompt, send.num_tokens, layout.block_size_tokens, adapter)
        # Index within the handoff of the first block that is not staged yet.
        self._first_block, self._ended = 0, False
        self.has_written = False

    def write(self, layer: int, num_computed_tokens: int) -> None:
        """Stages one layer of the blocks that this step finishes.

        The engine calls it for every layer of a step, in order, with the same number of tokens.

        Args:
            layer: The layer that has just been computed.
            num_computed_tokens: Number of prompt tokens that are computed at the step's end.
        """
        if self._ended:
            return
        layout = self._layout
        end = max(0, num_computed_tokens // layout.block_size_tokens - self._skip_blocks)
        if num_computed_tokens >= self._send.num_tokens:
            end = self._num_blocks
        end = max(end, self._first_block)
        is_last_layer = layer == layout.num_layers - 1
        runs = list(split_blocks(self._first_block, end - self._first_block, layout.block_bytes))
        frames = []
        for first, count in runs:
            data = b"".join(
                self._digests.kv_bytes(layer, self._skip_blocks + block, layout.block_bytes)
                for block in range(first, first + count)
            )
            begin = self._send.offset + layout.offset(0, layer, first, self._num_blocks)
            self._port.memory[begin : begin + len(data)] = data
            last = is_last_layer and first + count == self._num_blocks
            frames.append(
                filled_frame(self._send.handoff_id, 0, layer, first, count, data, last=last)
            )
        if frames:
            self.has_written = True
            self._port.send_frames(frames)
        if is_last_layer:
            self._first_block = end
            self._ended = end == self._num_blocks
