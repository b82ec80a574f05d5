"""Addresses of this host, as others see them."""

from __future__ import annotations

import ipaddress
import socket

from baton.runtime.config_error import ConfigError


def is_wildcard(host: str) -> bool:
    """Whether a host to listen on means every interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def joined(host: str, port: int | str) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str, key: str) -> tuple[str, int]:
    """host:port as its parts.

    Raises:
        ConfigError: naming `key` when it is not host:port.
    """
    host, separator, port = address.rpartition(":")
    is_url = host.startswith(("http:", "https:"))
    if not separator or not host or is_url or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{key}: is {address!r}; must be host:port with a port up to 65535")
    return host, int(port)


def local_address(host: str, port: int) -> str:
    """Of the interface on the route to another host; may look its name up.

    Raises:
        OSError: there is no way there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing; it only picks the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward_address(family: socket.AddressFamily) -> str | None:
    """Of the interface with the default route."""
    # Documentation addresses (RFC 5737, RFC 3849): routed like any foreign one.
    target = "2001:db8::1" if family is socket.AF_INET6 else "192.0.2.1"
    try:
        found = local_address(target, 9)
    except OSError:
        return None
    return None if ipaddress.ip_address(found).is_loopback else found
