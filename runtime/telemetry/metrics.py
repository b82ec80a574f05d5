"""The Prometheus endpoint of a process."""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.runtime.config_error import ConfigError
from baton.runtime.network.addresses import split_address
from baton.runtime.security.dial import bearer
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.runtime.security.tls import TlsFiles
from baton.runtime.security.watched_file import WatchedFiles, watched_secret

# Each connection has a thread. Scrapes take milliseconds, so the oldest connection is closed first.
_MAX_CONNECTIONS = 32
_TIMEOUT_S = 10.0


class MetricsServer:
    """Serves a registry over HTTP from its own thread until `close`.

    Args:
        listen: Listen address host:port.
        key: Configuration key of the address, for error messages.
        registry: Metrics to serve.
        security: TLS and authentication settings; None means neither.
        refusals: Counter that refused readers are added to.

    Attributes:
        address: host:port that the server is bound to.

    Raises:
        ConfigError: The address cannot be used, or a configured file cannot be used.
    """

    def __init__(
        self,
        listen: str,
        key: str,
        registry: CollectorRegistry,
        security: SecurityConfig | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        host, port = split_address(listen, key)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        security, refusals = security or SecurityConfig(), refusals or Refusals()
        app = make_wsgi_app(registry)
        if path := security.metrics_token_file:
            token = watched_secret(path, "security.metrics_token_file")
            app = _guarded(app, token, refusals)

        context = None
        if security.serves_tls:
            tls = TlsFiles(security.ca_file, security.cert_file, security.key_file)
            context = tls.server_context(client_auth=security.needs_certificates)

        class Server(_Server):
            address_family = family

        try:
            self._server = make_server(host.strip("[]"), port, app, Server, handler_class=_Handler)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{key}: cannot listen on {listen}: {reason}") from None
        self._server.refusals, self._server.tls = refusals, context
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        # Wakes the thread, which otherwise checks only every half second whether it should end.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server with a thread per connection and a limit on connections."""

    daemon_threads = True
    request_queue_size = 64
    tls: ssl.SSLContext | None = None
    refusals: Refusals

    def __init__(self, *arguments: Any) -> None:
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest, _ = self._open.popitem(last=False)
                # Shutdown wakes the connection's thread, which closes the socket.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self.refusals.count("metrics", "connections")
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_TIMEOUT_S)
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        if not _sends_bytes(request):
            return
        peer = f"{client_address[0]}:{client_address[1]}"
        with self._lock:
            self._open.pop(request, None)
            wrapped = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            self._open[wrapped] = None
        try:
            with wrapped:
                try:
                    wrapped.do_handshake()
                except OSError as error:
                    reason = getattr(error, "reason", None) or type(error).__name__
                    self.refusals.count("metrics", f"tls_{reason.lower()}", peer=peer)
                    return
                super().finish_request(wrapped, client_address)
        finally:
            with self._lock:
                self._open.pop(wrapped, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors: peers that disconnect or send garbage are normal."""


def _sends_bytes(connection: socket.socket) -> bool:
    """Whether a peer sends at least one byte, or keeps its connection open without sending.

    Health probes often only connect and close. They are no attempts to read the metrics.
    """
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return True
    except OSError:
        # A reset, which is how some probes close.
        return False


def _guarded(
    app: Callable[..., Iterable[bytes]], token: WatchedFiles[str], refusals: Refusals
) -> Callable[..., Iterable[bytes]]:
    wanted = bearer(token.get)

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "")
        if hmac.compare_digest(shown.encode(), wanted().encode()):
            return app(environ, start)
        reason = "unknown" if shown else "missing"
        refusals.count("metrics", reason, peer=environ.get("REMOTE_ADDR", ""))
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"metrics need security.metrics_token_file's token as a bearer token\n"]

    return guarded
