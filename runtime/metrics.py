"""The Prometheus endpoint of a process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from baton.runtime.config import ConfigError, split_address


class MetricsServer:
    """Serves a registry over HTTP from a thread of its own until `close`.

    Attributes:
        address: host:port it is bound to.

    Raises:
        ConfigError: when it cannot listen there.
    """

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        host, port = split_address(listen, "metrics_listen")
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics_listen: cannot listen on {listen}: {error}") from None
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
