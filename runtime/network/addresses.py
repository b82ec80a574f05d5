"""Parses addresses and finds the addresses under which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket

from baton.runtime.config_error import ConfigError


def is_wildcard(host: str) -> bool:
    """Whether listening on this host means listening on every interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def joined(host: str, port: int | str) -> str:
    """Formats host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str, key: str) -> tuple[str, int]:
    """Splits host:port.

    Raises:
        ConfigError: The address is not host:port; the message names `key`.
    """
    host, separator, port = address.rpartition(":")
    is_host = bool(host) and host.isprintable() and not host.startswith(("http:", "https:"))
    if not separator or not is_host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{key}: is {address!r}; must be host:port with a port up to 65535")
    return host, int(port)


def local_address(host: str, port: int) -> str:
    """Address of the local interface on the route to `host`; may resolve `host` through DNS.

    Raises:
        OSError: No route to the host, or its name cannot be resolved.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing; it only picks the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward_address(family: socket.AddressFamily) -> str | None:
    """Address of the interface with the default route; None without one."""
    # RFC 5737 and RFC 3849 reserve these addresses for documentation; they use the default route.
    target = "2001:db8::1" if family is socket.AF_INET6 else "192.0.2.1"
    try:
        found = local_address(target, 9)
    except OSError:
        return None
    return None if ipaddress.ip_address(found).is_loopback else found
