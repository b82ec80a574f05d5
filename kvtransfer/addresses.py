"""The address on which a transfer service listens, and the address that other workers dial."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import grpc

from baton.runtime.config_error import ConfigError
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.runtime.network import rpc
from baton.runtime.network.addresses import (
    is_wildcard,
    joined,
    local_address,
    outward_address,
    split_address,
)


def with_listen_address(config: KvTransferConfig, coordinator: str) -> KvTransferConfig:
    """Returns the configuration with a `listen` address that other workers can dial.

    The address is the one from which this host reaches the coordinator: loopback when the
    coordinator listens there, otherwise that of the interface on the route to the coordinator.

    Args:
        config: The section; a `listen` that is set is kept.
        coordinator: host:port of the coordinator.

    Raises:
        ConfigError: This host has no route to the coordinator.
    """
    if config.listen:
        return config
    host, port = split_address(coordinator, "coordinator")
    try:
        local = local_address(host.strip("[]"), port)
    except OSError as error:
        raise ConfigError(
            f"kv_transfer.listen: is empty, and no interface leads to the coordinator at "
            f"{coordinator}: {error}"
        ) from None
    return config.model_copy(update={"listen": joined(local, 0)})


def bind(
    server: grpc.aio.Server, config: KvTransferConfig, protection: rpc.Protection | None = None
) -> str:
    """Binds the server's port and returns host:port, with the port that 0 became.

    Args:
        server: A server that has not started yet.
        config: The section with the address.
        protection: TLS and access control of the server.

    Raises:
        ConfigError: The address is wrong, or no port of its range can be used.
    """
    listen = config.listen or "127.0.0.1:0"
    host, port = split_address(listen, "kv_transfer.listen")
    if port or not config.port_range:
        return rpc.bind(server, listen, "kv_transfer.listen", protection)
    problem = ""
    for candidate in _ports(config.port_range):
        try:
            listen, key = f"{host}:{candidate}", "kv_transfer.port_range"
            return rpc.bind(server, listen, key, protection)
        except ConfigError as error:
            problem = str(error)
    raise ConfigError(f"{problem}; no other port of {config.port_range} can be used either")


def _ports(port_range: str) -> Iterable[int]:
    first, _, last = port_range.partition("-")
    return range(int(first), int(last) + 1)


def advertised(bound: str, advertise_host: str) -> str:
    """Returns the host:port that other workers can dial.

    Args:
        bound: host:port on which the service listens, with its real port.
        advertise_host: Configured host. Empty: the host of `bound`, or for a wildcard address the
            address of this host's interface towards the outside.

    Raises:
        ConfigError: The address is a wildcard, and this host has only loopback addresses.
    """
    host, port = split_address(bound, "kv_transfer.listen")
    if advertise_host:
        return joined(advertise_host.strip("[]"), port)
    if not is_wildcard(host):
        return f"{host}:{port}"
    found = outward_address(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if found is None:
        raise ConfigError(
            f"kv_transfer.advertise_host: is empty while kv_transfer.listen is {bound}, and this "
            "host has no address that other workers can dial; set it to such an address"
        )
    return joined(found, port)
