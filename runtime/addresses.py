"""Addresses of this host, as others see them."""

from __future__ import annotations

import ipaddress
import socket


def is_wildcard(host: str) -> bool:
    """Whether a host to listen on means every interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def outward_address(family: socket.AddressFamily) -> str | None:
    """Of the interface with the default route; connecting a datagram socket sends nothing."""
    # Documentation addresses (RFC 5737, RFC 3849): routed like any foreign one.
    target = "2001:db8::1" if family is socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
            found = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if ipaddress.ip_address(found).is_loopback else found
