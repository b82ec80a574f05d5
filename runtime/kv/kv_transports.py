"""The transports that may carry handoffs, by the names that `kv_transfer.transports` accepts.

A new transport is a module in kvtransfer/transports/ with a subclass of Transport, and one line
here. The names stand in this package because every process reads the configuration; only the
transfer service imports the classes (kvtransfer/transports/registry.py).
"""

from __future__ import annotations

_PACKAGE = "baton.kvtransfer.transports"
TRANSPORTS = {
    "shm": f"{_PACKAGE}.shm_transport:ShmTransport",
    "nixl": f"{_PACKAGE}.nixl_transport:NixlTransport",
    "nccl": f"{_PACKAGE}.nccl_transport:NcclTransport",
    "gloo": f"{_PACKAGE}.nccl_transport:GlooTransport",
    "grpc": f"{_PACKAGE}.grpc_transport:GrpcTransport",
}
# Best first: shared memory within a host; between hosts NIXL where it is installed, else gRPC.
DEFAULT_TRANSPORTS = ("shm", "nixl", "grpc")
# By contract, an open without offers and a reply without a transport mean this one.
UNNAMED_TRANSPORT = "grpc"
