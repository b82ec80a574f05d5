"""Where a transfer service listens, and the address it tells others to dial."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import grpc

from baton.runtime import rpc
from baton.runtime.addresses import (
    is_wildcard,
    joined,
    local_address,
    outward_address,
    split_address,
)
from baton.runtime.config_error import ConfigError
from baton.runtime.kv_transfer_config import KvTransferConfig


def towards(config: KvTransferConfig, coordinator: str) -> KvTransferConfig:
    """The configuration with a `listen` that those who reach the coordinator can dial.

    Workers of one coordinator find each other where they find it: over loopback when it is on this
    host and listens there, otherwise on the interface that leads to it.

    Args:
        config: what listen already says is kept.
        coordinator: host:port.

    Raises:
        ConfigError: there is no way to the coordinator.
    """
    if config.listen:
        return config
    host, port = split_address(coordinator, "coordinator")
    try:
        local = local_address(host.strip("[]"), port)
    except OSError as error:
        raise ConfigError(
            f"kv_transfer.listen: is empty, and there is no way to the coordinator at "
            f"{coordinator} to tell the interface by: {error}"
        ) from None
    return config.model_copy(update={"listen": joined(local, 0)})


def bind(
    server: grpc.aio.Server, config: KvTransferConfig, protection: rpc.Protection | None = None
) -> str:
    """Binds the server's port and returns host:port, with the port that 0 became.

    Args:
        server: not started yet.
        config: where.
        protection: as the server's.

    Raises:
        ConfigError: the address is wrong, or every port of it is in use.
    """
    listen = config.listen or "127.0.0.1:0"
    host, port = split_address(listen, "kv_transfer.listen")
    if port or not config.port_range:
        return rpc.bind(server, listen, "kv_transfer.listen", protection)
    for candidate in _ports(config.port_range):
        try:
            listen, key = f"{host}:{candidate}", "kv_transfer.port_range"
            return rpc.bind(server, listen, key, protection)
        except ConfigError:
            continue
    raise ConfigError(
        f"kv_transfer.port_range: every port of {config.port_range} is in use on {host}, or "
        f"{host} is no address of this host"
    )


def _ports(port_range: str) -> Iterable[int]:
    first, _, last = port_range.partition("-")
    return range(int(first), int(last) + 1)


def advertised(bound: str, advertise_host: str) -> str:
    """host:port that other workers can dial.

    Args:
        bound: host:port listened on, with its real port.
        advertise_host: configured; empty: that of `bound`, or for a wildcard bind the address of
            this host's interface towards the outside.

    Raises:
        ConfigError: a wildcard bind, and no address but loopback ones to be found.
    """
    host, port = split_address(bound, "kv_transfer.listen")
    if advertise_host:
        return f"{advertise_host}:{port}"
    if not is_wildcard(host):
        return f"{host}:{port}"
    found = outward_address(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if found is None:
        raise ConfigError(
            f"kv_transfer.advertise_host: is empty while kv_transfer.listen is {bound}, and this "
            "host has no address others could dial; set it to one"
        )
    return joined(found, port)
