"""gRPC channels and servers, set up one way in every process."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from baton.runtime.addresses import split_address
from baton.runtime.config_error import ConfigError
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.guard import Guard
from baton.runtime.tls import Handshakes, TlsFiles

if TYPE_CHECKING:
    # Clients have neither, and what these import takes longer than all of theirs.
    from baton.runtime.access import Access
    from baton.runtime.security_config import SecurityConfig

# One message at most: a submission of the longest prompt, or one step's outputs.
MAX_MESSAGE_BYTES = 16 * 2**20
# Transfer frames are larger than anything else.
MAX_FRAME_BYTES = 64 * 2**20

# A peer that vanishes without closing (stopped, power, network) is noticed within 15 s.
PING_INTERVAL_S, PING_TIMEOUT_S = 10.0, 5.0
# Pings that come faster than this are cut off, so it is below every interval in use.
_MIN_PING_INTERVAL_MS = 1_000
# Calls that wait to be taken up: fewer than gRPC's own limit would refuse them without a reason.
_LEAST_PENDING_CALLS = 3_000
# Of the calls at a time, what streams that need no credential may be.
_OPEN_PART = 8


def _keepalive(interval_s: float, timeout_s: float) -> list[tuple[str, int]]:
    timeout_ms = round(timeout_s * 1e3)
    return [
        ("grpc.keepalive_time_ms", round(interval_s * 1e3)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # The longer of the two counts, and this one is a minute by default.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    """As gRPC takes it: in 32 bits."""
    return min(2**31 - 1, round(seconds * 1e3))


def _most_connections(limits: SecurityConfig) -> int:
    """Each is an open file, and others need some too."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(limits.max_connections, max(1, most_files * 3 // 4))


def channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    ping_interval_s: float = PING_INTERVAL_S,
    ping_timeout_s: float = PING_TIMEOUT_S,
    dial: Dial = PLAIN,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to host:port that keeps itself alive and reconnects within two seconds.

    Args:
        address: host:port.
        max_message_bytes: each way.
        ping_interval_s: at least a second, or the server takes them for abuse.
        ping_timeout_s: a peer that is silent for so long after a ping is gone.
        dial: with TLS, its files as they are now; calls say `dial.metadata()` themselves.
        interceptors: of its calls.
    """
    options: list[tuple[str, str | int]] = [
        *_keepalive(ping_interval_s, ping_timeout_s),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt to connect may take, not a pause: a busy peer needs some time.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # One connection per channel object: transfers do not share one with tokens.
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
    """What a server asks of those who connect.

    Attributes:
        config: limits, and whether clients need certificates.
        access: who may call what.
        tls: None: without.
        handshakes: of the port; None without TLS.
    """

    config: SecurityConfig
    access: Access
    tls: TlsFiles | None
    handshakes: Handshakes | None

    @classmethod
    def of(cls, config: SecurityConfig, access: Access, listener: str) -> Protection:
        """For one server.

        Args:
            config: of this process.
            access: counts whom it refuses.
            listener: the configuration's key of where it listens, for logs.

        Raises:
            ConfigError: a file cannot be used.
        """
        if not config.serves_tls:
            return cls(config, access, None, None)
        tls = TlsFiles(config.ca_file, config.cert_file, config.key_file)
        handshakes = Handshakes(listener, config.handshake_timeout_s)
        access.refusals.handshakes = handshakes
        return cls(config, access, tls, handshakes)


def server(
    *, max_message_bytes: int = MAX_MESSAGE_BYTES, protection: Protection | None = None
) -> grpc.aio.Server:
    """A server with the project's limits; the caller adds services and a port.

    Args:
        max_message_bytes: each way; a longer one is refused by its length, before it is there.
        protection: None: anybody may call anything.
    """
    from baton.runtime.security_config import SecurityConfig

    limits = protection.config if protection is not None else SecurityConfig()
    most_pending = max(limits.max_calls, _LEAST_PENDING_CALLS)
    guards = []
    # Without anything to look at, calls do not pay for it.
    if protection is not None and (limits.knows_clients or limits.knows_workers or protection.tls):
        max_open_streams = max(1, limits.max_calls // _OPEN_PART)
        guards = [Guard(protection.access, max_open_streams, protection.handshakes)]
    return grpc.aio.server(
        interceptors=guards,
        maximum_concurrent_rpcs=limits.max_calls,
        options=[
            *_keepalive(PING_INTERVAL_S, PING_TIMEOUT_S),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # A port in use is an error, not a second listener that steals half the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", limits.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
            ("grpc.max_allowed_incoming_connections", _most_connections(limits)),
            ("grpc.max_concurrent_streams", limits.max_calls),
            # gRPC cancels calls at random while a thousand wait to be taken up. What is too much is
            # for `maximum_concurrent_rpcs` to say, with a status that means it.
            ("grpc.server.max_pending_requests", most_pending),
            ("grpc.server.max_pending_requests_hard_limit", most_pending),
            ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_timeout_s)),
            ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        ],
    )


def bind(
    server: grpc.aio.Server, listen: str, key: str, protection: Protection | None = None
) -> str:
    """Binds a server's port and returns host:port, with the port that 0 became.

    Raises:
        ConfigError: naming `key` when the address is wrong or in use.
    """
    host, _ = split_address(listen, key)
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
        raise ConfigError(f"{key}: cannot listen on {listen}: address in use or not of this host")
    return f"{host}:{port}"


def add_health_and_reflection(server: grpc.aio.Server, services: Sequence[str]) -> HealthServicer:
    """Adds the standard grpc.health.v1 and server reflection.

    Args:
        server: not started yet.
        services: full names, such as "baton.v1.Inference".

    Returns:
        The health service; the caller sets each service's status.
    """
    health_servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return health_servicer
