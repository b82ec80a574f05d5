"""Names of the transfer service's gRPC methods, by which services of other workers call them."""

from __future__ import annotations

SERVICE = "baton.v1.KvTransfer"
# The stream of one handoff. Workers of other versions know it by this name.
HANDOFF_NAME = "Push"
HANDOFF_METHOD = f"/{SERVICE}/{HANDOFF_NAME}"


def link_method(backend: str) -> str:
    """Returns the method of the streams that join links of a backend, such as "nccl"."""
    return f"/{SERVICE}/Link{backend.capitalize()}"
