"""TLS settings from files, for servers and channels.

Changed files apply to every handshake that begins afterwards; established connections stay as they
are.
"""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import cast

import grpc

from baton.runtime.config_error import ConfigError
from baton.runtime.security.watched_file import WatchedFiles

_log = logging.getLogger(__name__)

# Configuration keys of the three files, for error messages.
CONFIG_KEYS = ("security.ca_file", "security.cert_file", "security.key_file")
# Remembered connections that calls came over.
_MAX_PEERS = 65_536
_SAME_CONNECTION_S = 60.0
# A port scan, or repeated attempts with a wrong certificate, must not fill the log.
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the three files; empty where no file is configured."""

    ca: bytes
    cert: bytes
    key: bytes


class TlsFiles:
    """A CA certificate, and this process's certificate with its private key.

    Args:
        ca_file: CA that signs the peers' certificates; empty means the system's trusted CAs.
        cert_file: Certificate chain of this process; empty means none.
        key_file: Private key of `cert_file`.
        names: Names of the three files in error messages.

    Raises:
        ConfigError: A file cannot be read, or the files do not belong together.
    """

    def __init__(
        self,
        ca_file: str,
        cert_file: str = "",
        key_file: str = "",
        *,
        names: tuple[str, str, str] = CONFIG_KEYS,
    ) -> None:
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        self._files = dict(zip(names, (ca_file, cert_file, key_file), strict=True))
        self._pems = WatchedFiles(self._files, self._read)

    @property
    def version(self) -> int:
        """Version of the files; it grows with each change."""
        self._pems.get()
        return self._pems.version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a new channel, from the current files."""
        pems = self._pems.get()
        return grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)

    def server_credentials(
        self, handshakes: Handshakes, *, client_auth: bool
    ) -> grpc.ServerCredentials:
        """Credentials for a server's port; gRPC fetches the current files at every handshake.

        Args:
            handshakes: Counter that is notified of each handshake.
            client_auth: Whether clients need a certificate.
        """
        shown = self._pems.get()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            handshakes.started()
            pems = self._pems.get()
            if pems is shown:
                return None
            shown = pems
            return _configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            # A None result keeps the current configuration; the type stubs do not allow it.
            cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
            require_client_authentication=client_auth,
        )

    def server_context(
        self, *, client_auth: bool, handshakes: Handshakes | None = None
    ) -> ssl.SSLContext:
        """SSL context for a listening socket; each handshake uses the current files.

        With `client_auth`, clients need TLS 1.3, and no session can be resumed.
        """
        context = self._server_context(client_auth)
        # Keyed by the version that was read: the files may become invalid before a handshake.
        current = {self._pems.version: context}

        def at_handshake(socket: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            if handshakes is not None:
                handshakes.started()
            version = self.version
            if version not in current:
                current.clear()
                current[version] = self._server_context(client_auth)
            socket.context = current[version]

        context.sni_callback = at_handshake
        return context

    def _server_context(self, client_auth: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An empty password makes an encrypted key an error instead of a prompt at the terminal.
        context.load_cert_chain(self._cert_file, self._key_file, password="")
        if client_auth:
            context.load_verify_locations(self._ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session verifies no certificate, so a client of a removed CA could come
            # back with one. TLS 1.3 resumes by tickets only. TLS 1.2 resumes by session IDs also,
            # which Python cannot switch off.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def _read(self) -> Pems:
        """Raises ConfigError when a file is not PEM, or key and certificate do not match."""
        # Read the files first, because ssl does not say which file it cannot read.
        pems = Pems(*(Path(one).read_bytes() if one else b"" for one in self._files.values()))
        ca, *own = (f"{name}: {path}" for name, path in self._files.items())
        try:
            told = f"{ca} is not a certificate in PEM"
            if self._ca_file:
                ssl.create_default_context(cafile=self._ca_file)
            told = f"{' and '.join(own)} are not PEM, or do not belong together"
            if self._cert_file:
                self._server_context(client_auth=False)
        except ssl.SSLError as error:
            raise ConfigError(f"{told}: {error.reason or error}") from None
        return pems


class Handshakes:
    """Counts TLS handshakes that no call follows. All methods are thread-safe.

    gRPC does not report why a handshake failed (no certificate, wrong CA, expired certificate, no
    TLS at all), nor whether the peer sent a byte, so a handshake without a call within `wait_s`
    counts as refused.

    Args:
        listener: Configuration key of the listen address, for the log.
        wait_s: Longest time from a handshake to its first call, in seconds.
        clock: Returns monotonic seconds.

    Attributes:
        num_refused: Refused handshakes since the start.
    """

    def __init__(
        self, listener: str, wait_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listener, self._wait_s, self._clock = listener, wait_s, clock
        self._lock = Lock()
        self._begun_at: deque[float] = deque()
        # Time of the latest call per peer.
        self._peers: OrderedDict[str, float] = OrderedDict()
        self._num_logged, self._logged_at = 0, -math.inf
        self.num_refused = 0

    def started(self) -> None:
        with self._lock:
            self._begun_at.append(self._clock())
        self.expire()

    def succeeded(self) -> None:
        """Records that a call followed a handshake: most likely the latest handshake."""
        with self._lock, contextlib.suppress(IndexError):
            self._begun_at.pop()

    def on_call(self, peer: str) -> None:
        """Records a call over the connection of a peer, given as host and port."""
        now = self._clock()
        last_at = self._peers.get(peer, -math.inf)
        with self._lock:
            self._peers[peer] = now
            self._peers.move_to_end(peer)
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        # After a pause this may be a new connection from the same port.
        if now - last_at > _SAME_CONNECTION_S:
            self.succeeded()

    def expire(self, now: float | None = None) -> None:
        """Counts and logs handshakes without a call; call it before reading `num_refused`."""
        now = now if now is not None else self._clock()
        with self._lock:
            while self._begun_at and self._begun_at[0] <= now - self._wait_s:
                self._begun_at.popleft()
                self.num_refused += 1
            num_new = self.num_refused - self._num_logged
            if not num_new or now - self._logged_at < _LOG_INTERVAL_S:
                return
            self._num_logged, self._logged_at = self.num_refused, now
        _log.warning(
            "TLS handshakes were not followed by a call: no certificate, a wrong or expired "
            "one, or the peer does not speak TLS or only connects, as some health probes do",
            extra={"listener": self._listener, "handshakes": num_new},
        )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.ca or None
    )
