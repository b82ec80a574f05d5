"""gRPC channels and servers, set up one way in every process."""

from __future__ import annotations

import grpc

# What travels inside one message at most: a submission of the longest prompt, or one step's outputs.
MAX_MESSAGE_BYTES = 16 * 2**20
# Transfer frames are larger than anything else.
MAX_FRAME_BYTES = 64 * 2**20

_KEEPALIVE = [
    # A peer that vanishes without closing (power, network) is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to host:port that keeps itself alive and reconnects within two seconds."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *_KEEPALIVE,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # One connection per channel object: transfers do not share one with tokens.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def server(*, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    """A server with the project's limits; the caller adds services and a port."""
    return grpc.aio.server(
        options=[
            *_KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # A port in use is an error, not a second listener that steals half the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", 16 * 2**10),
        ],
    )
