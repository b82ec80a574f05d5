"""Hostile peers over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1

GARBAGE = {
    "random": os.urandom(4096),
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "tls hello": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "ssh": b"SSH-2.0-OpenSSH_9.0\r\n",
    "zeros": bytes(10_000),
    "preface and garbage": PREFACE + b"\xff" * 100,
    "huge frame": PREFACE + b"\xff\xff\xff" + bytes(6),
}


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@contextlib.asynccontextmanager
async def idle_connections(address: str, number: int, said: bytes = b""):
    """Opens connections that send only `said`, which is not a complete request."""
    writers = []
    try:
        for first in range(0, number, 100):
            opening = (connect(address) for _ in range(first, min(first + 100, number)))
            writers += [writer for _, writer in await asyncio.gather(*opening)]
        for writer in writers:
            writer.write(said)
        yield writers
    finally:
        for writer in writers:
            writer.close()
        gone = (writer.wait_closed() for writer in writers)
        await asyncio.gather(*gone, return_exceptions=True)


async def dropped(address: str, said: bytes, within_s: float) -> bool:
    """Whether the server closes the connection in time after `said`."""
    reader, writer = await connect(address)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(said)
            await asyncio.wait_for(reader.read(), within_s)
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """HPACK literal without indexing (RFC 7541, 6.2.2); both parts shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_with_length(path: str, num_bytes: int) -> bytes:
    """A gRPC call whose message header announces `num_bytes`, of which only a few follow."""
    headers = b"".join(
        _header(*pair)
        for pair in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"a"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    message = b"\x00" + struct.pack(">I", num_bytes) + b"x" * 100
    return (
        PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, headers)
        + _frame(_DATA, 0, 1, message)
    )


async def stream_ended(address: str, said: bytes, within_s: float) -> bool:
    """Whether the server ends stream 1 in time after `said`, by trailers or a reset."""
    reader, writer = await connect(address)
    try:
        writer.write(said)
        async with asyncio.timeout(within_s):
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
                del payload
                if kind == _SETTINGS and not flags & _ACK:
                    writer.write(_frame(_SETTINGS, _ACK, 0, b""))
                if stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM):
                    return True
    except (TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
