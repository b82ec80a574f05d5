"""gRPC channels and servers with the same settings in every process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from baton.runtime.config_error import ConfigError
from baton.runtime.network.addresses import split_address
from baton.runtime.process.open_files import connection_limit
from baton.runtime.security.dial import PLAIN, Dial
from baton.runtime.security.guard import Guard
from baton.runtime.security.tls import Handshakes, TlsFiles

if TYPE_CHECKING:
    # Clients use neither module, and importing them would more than double a client's start time.
    from baton.runtime.security.access import Access
    from baton.runtime.security.security_config import SecurityConfig

# Largest message: the submission of the longest prompt, or one step's outputs.
MAX_MESSAGE_BYTES = 16 * 2**20
# Transfer frames are larger than anything else.
MAX_FRAME_BYTES = 64 * 2**20

# A peer that vanishes without closing (stopped, power, network) is noticed within 15 s.
PING_INTERVAL_S, PING_TIMEOUT_S = 10.0, 5.0
# The server disconnects clients that ping faster than this; every ping interval is longer.
_MIN_PING_INTERVAL_MS = 1_000
# Calls that may wait for a handler. Below gRPC's own limit, calls are refused without a reason.
_LEAST_PENDING_CALLS = 3_000
# Streams that need no credential may use this fraction (1/8) of the concurrent calls, and other
# calls without an accepted credential this one (1/4).
_OPEN_PART, _UNCHECKED_PART = 8, 4


def _keepalive(interval_s: float, timeout_s: float) -> list[tuple[str, int]]:
    timeout_ms = round(timeout_s * 1e3)
    return [
        ("grpc.keepalive_time_ms", round(interval_s * 1e3)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC uses the longer of the two timeouts; this one is a minute by default.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    """Milliseconds, capped to gRPC's 32 bits."""
    return min(2**31 - 1, round(seconds * 1e3))


def channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_received_bytes: int | None = None,
    ping_interval_s: float = PING_INTERVAL_S,
    ping_timeout_s: float = PING_TIMEOUT_S,
    dial: Dial = PLAIN,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to host:port that sends keepalive pings and reconnects within two seconds.

    Args:
        address: host:port.
        max_message_bytes: Largest message in each direction.
        max_received_bytes: Largest received message; -1: no limit; None: `max_message_bytes`.
        ping_interval_s: Seconds between pings; below 1 s the server closes the connection.
        ping_timeout_s: Seconds without an answer after which the peer counts as dead.
        dial: TLS files and credential. Callers add `dial.metadata()` to each call themselves.
        interceptors: Interceptors of the channel's calls.
    """
    options: list[tuple[str, str | int]] = [
        *_keepalive(ping_interval_s, ping_timeout_s),
        (
            "grpc.max_receive_message_length",
            max_message_bytes if max_received_bytes is None else max_received_bytes,
        ),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Time for one connection attempt, not a pause: a busy peer needs some time to accept.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", int(dial.use_http_proxy)),
        # One connection per channel object: handoffs and tokens do not share a connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if dial.tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if dial.server_name:
        options.append(("grpc.ssl_target_name_override", dial.server_name))
    credentials = dial.tls.channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


@dataclass(frozen=True, slots=True)
class Protection:
    """Authentication and limits of a server.

    Attributes:
        config: Limits, and whether clients need certificates.
        access: Checks credentials.
        tls: TLS files; None means plain text.
        handshakes: TLS handshakes of the port; None without TLS.
    """

    config: SecurityConfig
    access: Access
    tls: TlsFiles | None
    handshakes: Handshakes | None

    @classmethod
    def of(cls, config: SecurityConfig, access: Access, listener: str) -> Protection:
        """Protection for one server.

        Args:
            config: Security section of this process.
            access: Checks credentials and counts refusals.
            listener: Configuration key of the listen address, for logs.

        Raises:
            ConfigError: A configured file cannot be used.
        """
        if not config.serves_tls:
            return cls(config, access, None, None)
        tls = TlsFiles(config.ca_file, config.cert_file, config.key_file)
        handshakes = Handshakes(listener, config.handshake_timeout_s)
        access.refusals.handshakes = handshakes
        return cls(config, access, tls, handshakes)


def server(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_sent_bytes: int = 0,
    protection: Protection | None = None,
) -> grpc.aio.Server:
    """A server with Baton's limits; the caller adds services and a port.

    Args:
        max_message_bytes: Largest message in each direction; a longer one is refused by its length
            header, before its content is read.
        max_sent_bytes: Largest sent message, if larger than `max_message_bytes`.
        protection: Authentication and limits; None allows every call.
    """
    from baton.runtime.security.security_config import SecurityConfig

    limits = protection.config if protection is not None else SecurityConfig()
    most_pending = max(limits.max_calls, _LEAST_PENDING_CALLS)
    guards = []
    # Without authentication and TLS there is nothing to check, so the guard's cost is avoided.
    if protection is not None and (
        limits.authenticates_clients or limits.authenticates_workers or protection.tls
    ):
        max_open_streams = max(1, limits.max_calls // _OPEN_PART)
        max_unchecked = max(1, limits.max_calls // _UNCHECKED_PART)
        guards = [Guard(protection.access, max_open_streams, max_unchecked, protection.handshakes)]
    return grpc.aio.server(
        interceptors=guards,
        maximum_concurrent_rpcs=limits.max_calls,
        options=[
            *_keepalive(PING_INTERVAL_S, PING_TIMEOUT_S),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max(max_message_bytes, max_sent_bytes)),
            # A port in use must be an error, not a second listener that gets half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", limits.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", connection_limit(limits.max_connections)),
            ("grpc.max_concurrent_streams", limits.max_calls),
            # gRPC cancels random calls when a thousand wait for a handler. Instead,
            # `maximum_concurrent_rpcs` refuses excess calls with RESOURCE_EXHAUSTED.
            ("grpc.server.max_pending_requests", most_pending),
            ("grpc.server.max_pending_requests_hard_limit", most_pending),
            ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        ],
    )


def bind(
    server: grpc.aio.Server, listen: str, key: str, protection: Protection | None = None
) -> str:
    """Binds a server's port and returns host:port with the actual port.

    Raises:
        ConfigError: The address is invalid, in use or needs a permission; the message names `key`.
    """
    host, number = split_address(listen, key)
    try:
        if protection is None or protection.tls is None or protection.handshakes is None:
            port = server.add_insecure_port(listen)
        else:
            credentials = protection.tls.server_credentials(
                protection.handshakes, client_auth=protection.config.needs_certificates
            )
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"{key}: cannot listen on {listen}: {_bind_problem(host, number)}")
    return f"{host}:{port}"


def _bind_problem(host: str, port: int) -> str:
    """Says why an address cannot be bound; gRPC keeps the reason to itself."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as probe:
                # As gRPC does: a port of which only closed connections remain is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return "address in use or not of this host"


def add_health_and_reflection(server: grpc.aio.Server, services: Sequence[str]) -> HealthServicer:
    """Adds the standard grpc.health.v1 and server reflection.

    Args:
        server: Server that is not started yet.
        services: Full service names, such as "baton.v1.Inference".

    Returns:
        The health service, on which the caller sets each service's status.
    """
    health_servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return health_servicer
