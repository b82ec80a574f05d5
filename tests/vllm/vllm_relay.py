"""A proxy in front of a transfer service that passes a handoff's frames on, or spoils them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from baton.kvtransfer import frames
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD, HANDOFF_NAME, SERVICE
from baton.v1 import kv_transfer_pb2

MAX_BYTES = 64 * 2**20
HOLD_TIMEOUT_S = 200.0

# Messages to send instead of one message, each when it is made; [] sends none.
Spoil = Callable[[bytes], Iterable[bytes]]


def as_it_is(message: bytes) -> list[bytes]:
    return [message]


class Hold:
    """Passes a handoff's open and its first data frames on, then holds everything until `let_go`.

    Attributes:
        reached: Set once something is held back: the receiver has got a part of the handoff.
    """

    def __init__(self, num_passed: int = 1) -> None:
        self.reached = threading.Event()
        self._num_left = num_passed
        self._let_go = threading.Event()

    def __call__(self, message: bytes) -> Iterator[bytes]:
        end = 0
        for frame in frames.decode(message):
            begin, end = end, end + frames.HEADER_BYTES + len(frame.payload)
            if frame.kind is not frames.FrameKind.OPEN:
                if self._num_left == 0:
                    self.reached.set()
                    self._let_go.wait(HOLD_TIMEOUT_S)
                else:
                    self._num_left -= 1
            yield message[begin:end]

    def let_go(self) -> None:
        """Passes everything on from now on."""
        self._let_go.set()


class Once:
    """Calls a function at a handoff's first data frame, and passes everything on.

    Attributes:
        done: Set after the call.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self.done = threading.Event()
        self._action = action

    def __call__(self, message: bytes) -> Iterator[bytes]:
        kinds = {frame.kind for frame in frames.decode(message)}
        if kinds != {frames.FrameKind.OPEN} and not self.done.is_set():
            self._action()
            self.done.set()
        yield message


def over_the_wire(message: bytes) -> bytes:
    """Changes an open so that it offers only gRPC: then every byte passes the relay."""
    (frame, *_) = frames.decode(message)
    if frame.kind is not frames.FrameKind.OPEN:
        return message
    opened = kv_transfer_pb2.HandoffOpen.FromString(bytes(frame.payload))
    del opened.offers[:]
    opened.offers.add(name="grpc")
    return frames.encode_open(opened)


class Relay:
    """Listens on `listen` and forwards the stream of every handoff to `target`, through `spoil`.

    Attributes:
        only_grpc: Whether blocks must pass the relay instead of shared memory.
        num_spoiled: Number of messages that were changed.
    """

    def __init__(self, listen: str, target: str) -> None:
        self.spoil: Spoil = as_it_is
        self.only_grpc = False
        self.num_spoiled = 0
        options = [("grpc.max_receive_message_length", MAX_BYTES)]
        self._channel = grpc.insecure_channel(target, options=options)
        self._open = self._channel.stream_stream(HANDOFF_METHOD)
        self._server = grpc.server(ThreadPoolExecutor(16), options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._forward)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {HANDOFF_NAME: handler})]
        )
        assert self._server.add_insecure_port(listen)
        self._server.start()

    def _forward(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        spoil, only_grpc = self.spoil, self.only_grpc
        outgoing: queue.Queue[bytes | None] = queue.Queue()

        def read() -> None:
            try:
                for message in map(over_the_wire if only_grpc else bytes, messages):
                    made = iter(spoil(message))
                    first = next(made, None)
                    is_whole = first == message
                    # Count before the effect is visible.
                    self.num_spoiled += not is_whole
                    if first is not None:
                        outgoing.put(first)
                    for one in made:
                        self.num_spoiled += is_whole
                        is_whole = False
                        outgoing.put(one)
            except grpc.RpcError:
                pass
            finally:
                outgoing.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        call = self._open(iter(outgoing.get, None))
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")

    def close(self) -> None:
        self._server.stop(grace=1).wait()
        self._channel.close()
