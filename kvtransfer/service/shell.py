"""The transfer service's shell: drives both state machines and carries out their effects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service import local_replies, receive_state, send_state
from baton.kvtransfer.service.fingerprint_checks import check_fingerprint
from baton.kvtransfer.service.handoff_stream import IncomingStream, StreamDialer
from baton.kvtransfer.service.local_server import LocalConnection
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.sender import Sender
from baton.kvtransfer.service.stream_driver import StreamDriver
from baton.kvtransfer.transports.negotiation import Negotiator
from baton.kvtransfer.transports.transport import EndedPull, Pull
from baton.v1 import kv_transfer_pb2 as pb

# Longest life of an incoming stream that opens no handoff; later the handoff's deadlines apply.
UNUSED_STREAM_TIMEOUT_S = 5.0
# Resolution of uvloop's clock, in seconds. It is too coarse, so times here are time.monotonic().
_TIMER_RESOLUTION_S = 0.001

logger = logging.getLogger(__name__)


class TransferShell:
    """Passes requests, frames and time to the state machines, and carries out their effects.

    Everything runs on one event loop and nothing here waits, so no other call can come between a
    call of a state machine and its effects.

    Args:
        sender: State machine of the handoffs from this worker.
        receiver: State machine of the handoffs to this worker.
        negotiator: The transports of this service.
        dialer: Opens streams to other services.
        stop: Set when the service must end: the main process's connection is lost, or `problem`.

    Attributes:
        problem: Why the service cannot go on; empty while it can.
    """

    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        negotiator: Negotiator,
        dialer: StreamDialer,
        stop: asyncio.Event,
    ) -> None:
        self._sender, self._receiver, self._negotiator = sender, receiver, negotiator
        self._dialer, self._stop = dialer, stop
        self._loop = asyncio.get_running_loop()
        self._layout: KvLayout | None = None
        self._configured = pb.LocalConfigured()
        self._connections: set[LocalConnection] = set()
        # Connection and call ID of each open_send that has no reply yet, by handoff ID.
        self._opening: dict[bytes, tuple[LocalConnection, int]] = {}
        # Connection and call ID of each erase that has no reply yet.
        self._erasing: list[tuple[LocalConnection, int]] = []
        self._eraser: asyncio.Handle | None = None
        self._drivers: dict[bytes, StreamDriver] = {}
        # Every driver with running tasks, including those that send a farewell frame.
        self._live_drivers: set[StreamDriver] = set()
        self._incoming: dict[int, IncomingStream] = {}
        self._num_streams = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._refused: Callable[[], Mapping[str, int]] = dict
        self.configured = asyncio.Event()
        self.problem = ""

    def use_refusals(self, refused: Callable[[], Mapping[str, int]]) -> None:
        """Sets the source of the gRPC port's refusals by reason, which statistics report."""
        self._refused = refused

    def fingerprint(self) -> pb.KvFingerprint | None:
        """Returns the fingerprint of the engine's KV cache; None until it is known."""
        return self._layout.fingerprint() if self._layout is not None else None

    def describe_as(self, address: str, shm_name: str, send_bytes: int, receive_bytes: int) -> None:
        """Sets the address and the sizes that local clients get; call it before anything else."""
        self._configured = pb.LocalConfigured(
            address=address, shm_name=shm_name, send_bytes=send_bytes, receive_bytes=receive_bytes
        )

    def ready_fields(self) -> dict[str, str | int]:
        """Returns the fields of the line that the process prints when it serves."""
        told = self._configured
        return {
            "address": told.address,
            "shm_name": told.shm_name,
            "send_bytes": told.send_bytes,
            "receive_bytes": told.receive_bytes,
        }

    # ---- The control socket.

    def handle_request(self, connection: LocalConnection, request: pb.LocalRequest) -> None:
        """Handles one request of a local client."""
        self._connections.add(connection)
        if request.HasField("frames"):
            for filled in request.frames.frames:
                self._carry_out(self._sender.fill(filled, time.monotonic()))
            self._arm()
            return
        reply: pb.LocalReply | None
        try:
            reply = self._answer(connection, request)
        except TransferRefused as error:
            reply = pb.LocalReply(error=str(error), reason=error.reason)
        if reply is not None and request.call_id:
            reply.call_id = request.call_id
            connection.reply(reply)
        self._arm()

    def connection_lost(self, connection: LocalConnection) -> None:
        """Forgets a local client; if it was the worker's main process, the service ends."""
        self._connections.discard(connection)
        for handoff_id in [
            key for key, (caller, _) in self._opening.items() if caller is connection
        ]:
            self._carry_out(self._sender.abort(handoff_id, time.monotonic()))
        if connection.is_main:
            self._stop.set()

    def _answer(
        self, connection: LocalConnection, request: pb.LocalRequest
    ) -> pb.LocalReply | None:
        """Returns the reply to a request; None when an effect will reply later."""
        now, kind = time.monotonic(), request.WhichOneof("request")
        if kind == "configure":
            self._configure(request.configure.fingerprint)
            connection.is_main = True
            return pb.LocalReply(configured=self._configured)
        if kind == "describe":
            return pb.LocalReply(configured=self._configured)
        if kind == "open_send":
            return self._open_send(connection, request, now)
        if kind == "shrink_send":
            shrink = request.shrink_send
            offset, reopened = self._sender.shrink(
                shrink.handoff_id, shrink.num_blocks, shrink.num_tokens, now
            )
            self._carry_out(reopened)
            return pb.LocalReply(send_opened=pb.LocalSendOpened(offset=offset))
        if kind == "claim":
            claim = request.claim
            grant, effects = self._receiver.claim(claim.handoff_id, claim.shard, now)
            self._carry_out(effects)
            return pb.LocalReply(claimed=local_replies.claimed(grant, claim.shard, claim.num_seen))
        if kind == "erase":
            self._sender.begin_erasing()
            self._receiver.begin_erasing()
            self._erasing.append((connection, request.call_id))
            return None
        if kind == "stats":
            return pb.LocalReply(statistics=self.statistics())
        if kind == "abort_send":
            handoff_id, by_main = request.abort_send.handoff_id, connection.is_main
            self._carry_out(self._sender.abort(handoff_id, now, by_main=by_main))
        elif kind == "release":
            release = request.release
            self._carry_out(
                self._receiver.release(
                    release.handoff_id,
                    release.shard,
                    now,
                    all_shards=release.all_shards,
                    not_loaded=release.not_loaded,
                )
            )
        elif kind == "drop":
            self._carry_out(self._receiver.drop(request.drop.handoff_id, now))
        elif kind == "subscribe":
            connection.subscribed = True
            connection.is_main = connection.is_main or request.subscribe.main
            for changed in self._receiver.known():
                self._notify(connection, changed)
        else:
            raise TransferRefused("this service does not know this kind of request")
        return pb.LocalReply()

    def _configure(self, fingerprint: pb.KvFingerprint) -> None:
        layout = KvLayout.from_fingerprint(fingerprint)
        if self._layout is not None:
            if layout != self._layout:
                raise TransferRefused("fingerprint: is configured already, with other values")
            return
        check_fingerprint(fingerprint, layout)
        self._layout = layout
        self._sender.configure(layout)
        self._receiver.configure(layout)
        self.configured.set()

    def _open_send(
        self, connection: LocalConnection, request: pb.LocalRequest, now: float
    ) -> pb.LocalReply | None:
        wanted = request.open_send
        if wanted.handoff_id in self._opening:
            raise TransferRefused(f"handoff {wanted.handoff_id.hex()} is being sent already")
        self._opening[wanted.handoff_id] = connection, request.call_id
        try:
            effects = self._sender.open(
                wanted.handoff_id,
                wanted.target,
                wanted.num_blocks,
                wanted.num_tokens,
                wanted.wait_ms / 1000,
                now,
            )
        except TransferRefused:
            del self._opening[wanted.handoff_id]
            raise
        self._carry_out(effects)
        return None

    # ---- Incoming streams (StreamHandler).

    def stream_started(self, incoming: IncomingStream) -> int:
        self._num_streams += 1
        stream = self._num_streams
        self._incoming[stream] = incoming
        if self._layout is None:
            refused = pb.HandoffReply.KIND_REFUSED
            incoming.reply(pb.HandoffReply(kind=refused, detail="the engine is not ready yet"))
            incoming.end()
            return stream
        self._loop.call_later(UNUSED_STREAM_TIMEOUT_S, self._end_unless_served, stream)
        return stream

    def stream_frame(self, stream: int, frame: Frame) -> None:
        if effects := self._receiver.handle_frame(stream, frame, time.monotonic()):
            self._carry_out(effects)
            self._arm()

    def stream_malformed(self, stream: int, error: MalformedFrame) -> None:
        self._carry_out(self._receiver.handle_malformed(stream, error, time.monotonic()))
        self._end_unless_served(stream)
        self._arm()

    def stream_ended(self, stream: int) -> None:
        self._negotiator.end(stream)
        self._carry_out(self._receiver.handle_stream_lost(stream, time.monotonic()))
        del self._incoming[stream]
        self._arm()

    def _end_unless_served(self, stream: int) -> None:
        incoming = self._incoming.get(stream)
        if incoming is not None and not self._receiver.serves(stream):
            incoming.end()

    # ---- Transports (TransportHandler).

    def pulls_ended(self, ended: Sequence[EndedPull]) -> None:
        now = time.monotonic()
        for each in ended:
            self._carry_out(self._receiver.handle_pulled(each.serial, each.digest, now))
        self._arm()

    # ---- Effects and time.

    def _carry_out(self, effects: Iterable[send_state.Effect | receive_state.Effect]) -> None:
        for effect in effects:
            match effect:
                case send_state.Wake(handoff_id):
                    if (driver := self._drivers.get(handoff_id)) is not None:
                        driver.wake()
                case Pull():
                    self._negotiator.pull(effect)
                case receive_state.Stuck(detail):
                    self.problem = detail
                    self._stop.set()
                case receive_state.Changed():
                    self._notify_changed(effect)
                case receive_state.Reply():
                    self._reply(effect)
                case send_state.Reserved(handoff_id, offset):
                    reply = pb.LocalReply(send_opened=pb.LocalSendOpened(offset=offset))
                    self._answer_open(handoff_id, reply)
                case send_state.NotReserved(handoff_id, reason, detail):
                    self._answer_open(handoff_id, pb.LocalReply(error=detail, reason=reason))
                case send_state.StartStream(handoff_id, target):
                    self._start_stream(handoff_id, target)
                case send_state.StopStream(handoff_id, farewell):
                    if (driver := self._drivers.pop(handoff_id, None)) is not None:
                        driver.stop(farewell)
                case send_state.Ended():
                    self._notify_ended(effect)

    def _answer_open(self, handoff_id: bytes, reply: pb.LocalReply) -> None:
        connection, reply.call_id = self._opening.pop(handoff_id)
        connection.reply(reply)

    def _start_stream(self, handoff_id: bytes, target: str) -> None:
        def on_reply(reply: pb.HandoffReply) -> None:
            if reply.kind == pb.HandoffReply.KIND_OPENED:
                self._negotiator.opened(target, reply, self._sender.offered(handoff_id))
            self._carry_out(self._sender.handle_reply(reply, handoff_id, time.monotonic()))
            self._arm()

        def on_lost(detail: str) -> None:
            self._live_drivers.discard(driver)
            # A stopped driver no longer belongs to the send.
            if self._drivers.get(handoff_id) is driver:
                self._carry_out(
                    self._sender.handle_stream_lost(handoff_id, detail, time.monotonic())
                )
                self._arm()

        driver = StreamDriver(
            handoff_id,
            self._sender,
            lambda: self._negotiator.ready(target),
            lambda: self._dialer.open_stream(target),
            on_reply,
            on_lost,
        )
        self._drivers[handoff_id] = driver
        self._live_drivers.add(driver)

    def _reply(self, reply: receive_state.Reply) -> None:
        incoming = self._incoming.get(reply.stream)
        if incoming is None:
            return
        incoming.reply(
            pb.HandoffReply(
                kind=reply.kind,
                handoff_id=reply.handoff_id,
                epoch=reply.epoch,
                reason=reply.reason,
                detail=reply.detail,
                transport=reply.transport,
                transport_reason=reply.transport_reason,
            )
        )
        if reply.kind != pb.HandoffReply.KIND_OPENED:
            self._end_unless_served(reply.stream)

    def _notify_changed(self, changed: receive_state.Changed) -> None:
        if changed.state is receive_state.ReceiveState.FAILED:
            incoming = self._incoming.get(changed.stream or 0)
            logger.info(
                "handoff failed: %s",
                changed.detail,
                extra={
                    "handoff": changed.handoff_id.hex(),
                    "epoch": changed.epoch,
                    "sender": "not connected" if incoming is None else incoming.sender,
                },
            )
        for connection in self._connections:
            if connection.subscribed:
                self._notify(connection, changed)

    @staticmethod
    def _notify(connection: LocalConnection, changed: receive_state.Changed) -> None:
        state = local_replies.received_state(changed)
        connection.notify(("receive", changed.handoff_id), pb.LocalReply(handoff=state))

    def _notify_ended(self, ended: send_state.Ended) -> None:
        if not ended.committed:
            wanted = ended.reason != pb.REFUSAL_REASON_CANCELLED
            logger.log(
                logging.WARNING if wanted else logging.INFO,
                "send failed: %s",
                ended.detail,
                extra={"handoff": ended.handoff_id.hex(), "epoch": ended.epoch},
            )
        state = local_replies.sent_state(ended)
        for connection in self._connections:
            if connection.is_main:
                connection.notify(("send", ended.handoff_id), pb.LocalReply(send=state))

    def _erase(self) -> None:
        """Overwrites a part of staging; the loop's other work goes on between two parts."""
        self._eraser = None
        self._sender.erase()
        self._receiver.erase()
        if not (self._sender.must_erase or self._receiver.must_erase):
            for connection, call_id in self._erasing:
                if connection in self._connections:
                    connection.reply(pb.LocalReply(call_id=call_id))
            self._erasing.clear()
        self._arm()

    def _arm(self) -> None:
        """Sets the timer to the next deadline; a deadline that moved later costs one wake-up.

        Freed staging that must be overwritten is overwritten soon.
        """
        if self._eraser is None and (self._sender.must_erase or self._receiver.must_erase):
            self._eraser = self._loop.call_soon(self._erase)
        deadlines = (self._sender.next_deadline(), self._receiver.next_deadline())
        next_deadline = min((each for each in deadlines if each is not None), default=None)
        if self._timer is not None:
            if next_deadline is not None and self._timer_at <= next_deadline:
                return
            self._timer.cancel()
            self._timer = None
        if next_deadline is not None:
            self._timer_at = next_deadline
            delay_s = max(0.0, next_deadline - time.monotonic()) + _TIMER_RESOLUTION_S
            self._timer = self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._carry_out(self._sender.expire(now))
        self._carry_out(self._receiver.expire(now))
        self._arm()

    # ---- Statistics and the end.

    def statistics(self) -> pb.LocalStatistics:
        """Returns the statistics for the worker's metrics."""
        return local_replies.statistics(
            self._sender, self._receiver, self._negotiator.peers(), self._refused()
        )

    def close_connections(self) -> None:
        """Closes the connection of every local client."""
        for connection in list(self._connections):
            connection.abort()

    async def close_streams(self) -> None:
        """Cancels every stream in both directions, and closes the transports."""
        for incoming in self._incoming.values():
            incoming.end()
        await asyncio.gather(*(driver.close() for driver in list(self._live_drivers)))
        await self._negotiator.close()
        await self._dialer.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._eraser is not None:
            self._eraser.cancel()
