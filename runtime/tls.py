"""TLS from files: what servers show and ask for, what channels dial with.

Files that change are used for every handshake that begins after that; connections that are up stay
as they are.
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
from baton.runtime.watched_file import WatchedFiles

_log = logging.getLogger(__name__)

# Of a configuration.
CONFIG_KEYS = ("security.ca_file", "security.cert_file", "security.key_file")
# Connections over which calls have come.
_MAX_PEERS = 65_536
_SAME_CONNECTION_S = 60.0
# Whoever scans ports, or tries again and again with a wrong certificate, does not fill the log.
_LOG_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Pems:
    """The files' contents; empty where there is no file."""

    ca: bytes
    cert: bytes
    key: bytes


class TlsFiles:
    """A CA's certificate, and a certificate of this process with its key.

    Args:
        ca_file: who signs peers' certificates; empty: whom the system trusts.
        cert_file, key_file: of this process; empty: it has none.
        names: what errors call the three.

    Raises:
        ConfigError: a file cannot be read, or they do not fit together.
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
        """Grows when the files change."""
        self._pems.get()
        return self._pems.version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is made now."""
        pems = self._pems.get()
        return grpc.ssl_channel_credentials(pems.ca or None, pems.key or None, pems.cert or None)

    def server_credentials(
        self, handshakes: Handshakes, *, client_auth: bool
    ) -> grpc.ServerCredentials:
        """For a server's port; asked again at every handshake.

        Args:
            handshakes: told of each.
            client_auth: whether clients need a certificate.
        """
        shown = self._pems.get()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            handshakes.begun()
            pems = self._pems.get()
            if pems is shown:
                return None
            shown = pems
            return _configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            # None keeps what is shown; the stubs do not know.
            cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
            require_client_authentication=client_auth,
        )

    def server_context(
        self, *, client_auth: bool, handshakes: Handshakes | None = None
    ) -> ssl.SSLContext:
        """For a listening socket: each handshake takes the files of the moment."""
        context = self._server_context(client_auth)
        # Of the version that is read already: the files may be wrong by the first handshake.
        current = {self._pems.version: context}

        def at_handshake(socket: ssl.SSLObject | ssl.SSLSocket, *_: object) -> None:
            if handshakes is not None:
                handshakes.begun()
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
        # Without a password a key that needs one would be asked for at the terminal.
        context.load_cert_chain(self._cert_file, self._key_file, password="")
        if client_auth:
            context.load_verify_locations(self._ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _read(self) -> Pems:
        """Raises ConfigError where the files are no PEM, or key and certificate no pair."""
        # First: ssl does not say which one it cannot read.
        pems = Pems(*(Path(one).read_bytes() if one else b"" for one in self._files.values()))
        ca, *own = (f"{name}: {path}" for name, path in self._files.items())
        try:
            told = f"{ca} is no certificate in PEM"
            if self._ca_file:
                ssl.create_default_context(cafile=self._ca_file)
            told = f"{' and '.join(own)} are no PEM, or not of one another"
            if self._cert_file:
                self._server_context(client_auth=False)
        except ssl.SSLError as error:
            raise ConfigError(f"{told}: {error.reason or error}") from None
        return pems


class Handshakes:
    """Counts handshakes that come to nothing. Any thread may call anything.

    gRPC does not say why a handshake failed: no certificate, one of another CA, an expired one,
    garbage. So one that no call follows in time has been refused.

    Args:
        listener: the configuration's key of where it listens, for the log.
        wait_s: how long a call may take to come.

    Attributes:
        num_refused: since the start.
    """

    def __init__(self, listener: str, wait_s: float) -> None:
        self._listener, self._wait_s = listener, wait_s
        self._lock = Lock()
        self._begun_at: deque[float] = deque()
        # When the latest call of each came.
        self._peers: OrderedDict[str, float] = OrderedDict()
        self._num_logged, self._logged_at = 0, -math.inf
        self.num_refused = 0

    def begun(self) -> None:
        with self._lock:
            self._begun_at.append(time.monotonic())
        self.expire()

    def used(self) -> None:
        """A handshake has come to something. Most likely the latest one, since that is soon."""
        with self._lock, contextlib.suppress(IndexError):
            self._begun_at.pop()

    def called(self, peer: str) -> None:
        """A call has come over a peer's connection, which is known by its host and port."""
        now = time.monotonic()
        last_at = self._peers.get(peer, -math.inf)
        with self._lock:
            self._peers[peer] = now
            self._peers.move_to_end(peer)
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        # After a pause it may be another connection from the same port.
        if now - last_at > _SAME_CONNECTION_S:
            self.used()

    def expire(self, now: float | None = None) -> None:
        """Counts and logs those without a call; to be called before `num_refused` is read."""
        now = now if now is not None else time.monotonic()
        with self._lock:
            while self._begun_at and self._begun_at[0] <= now - self._wait_s:
                self._begun_at.popleft()
                self.num_refused += 1
            num_new = self.num_refused - self._num_logged
            if not num_new or now - self._logged_at < _LOG_INTERVAL_S:
                return
            self._num_logged, self._logged_at = self.num_refused, now
        _log.warning(
            "TLS handshakes that nothing followed: no certificate, a wrong or expired one, or "
            "something else than TLS",
            extra={"listener": self._listener, "handshakes": num_new},
        )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.ca or None
    )
