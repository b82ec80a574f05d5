"""Makes the transports that a configuration names. runtime/kv/kv_transports.py lists them all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.transport import ServiceContext, Transport, UnavailableTransport
from baton.runtime.kv.kv_transports import TRANSPORTS


def make(names: Sequence[str], service: ServiceContext) -> list[Transport]:
    """Returns the transports of these names in the same order.

    A transport that this process cannot use is an UnavailableTransport, which says why.
    """
    return [_make(name, service) for name in names]


def transport_class(name: str) -> type[Transport]:
    """Imports the class that implements a transport. Raises KeyError for an unknown name."""
    module, _, class_name = TRANSPORTS[name].partition(":")
    found: type[Transport] = getattr(importlib.import_module(module), class_name)
    return found


def _make(name: str, service: ServiceContext) -> Transport:
    try:
        return transport_class(name)(name, service)
    except TransferError as error:
        return UnavailableTransport(name, service, str(error))
