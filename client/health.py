"""Waits until a coordinator can serve, with the standard service grpc.health.v1."""

from __future__ import annotations

import asyncio

import grpc
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import errors

_INFERENCE = "baton.v1.Inference"
_RETRY_S = 0.1


async def wait_serving(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Returns when the service baton.v1.Inference is SERVING.

    Raises:
        UnavailableError: The service was not SERVING within timeout_s; the message has its last
            status. UnreachableError if there was no connection.
        RemoteError: Another kind of server listens at the address.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=_INFERENCE)
    seen = "unreachable"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    async for response in stub.Watch(request, wait_for_ready=True):
                        seen = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
                        if response.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                    seen = "unreachable"
                except grpc.RpcError as error:
                    found = errors.from_rpc_error(error, address)
                    is_transient = found.retry_after_s is not None
                    if found.code != code_pb2.UNAVAILABLE and not is_transient:
                        raise found from None
                    seen = f"busy ({found})" if is_transient else "unreachable"
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        message = f"the coordinator at {address} is {seen} after {timeout_s:g} s"
        if seen == "NOT_SERVING":
            message += (
                ": its workers cannot serve requests yet (see `baton pools`), or it is stopping"
            )
        if seen == "unreachable":
            raise errors.UnreachableError(code_pb2.UNAVAILABLE, message, []) from None
        raise errors.make(code_pb2.UNAVAILABLE, message) from None
