"""The address a transfer service tells others to dial."""

from __future__ import annotations

import ipaddress
import socket

from baton.runtime.config import ConfigError, split_address


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
    if not _is_wildcard(host):
        return f"{host}:{port}"
    found = _outward_address(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if found is None:
        raise ConfigError(
            f"kv_transfer.advertise_host: is empty while kv_transfer.listen is {bound}, and this "
            "host has no address others could dial; set it to one"
        )
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == "*"


def _outward_address(family: socket.AddressFamily) -> str | None:
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
