"""Fetches a cell's status repeatedly, for `baton top` and the dashboard."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.client import errors
from baton.client.admin import AdminClient
from baton.client.call_metadata import interceptors
from baton.client.credentials import ApiKey, Tls, dial
from baton.client.doctor import Finding, diagnose
from baton.client.shared_channels import SharedChannels
from baton.runtime.closing import AsyncClosing
from baton.runtime.errors import RemoteError
from baton.v1 import admin_pb2

T = TypeVar("T")

_MAX_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class View:
    """Status of a cell at one moment.

    Attributes:
        address: Address of the coordinator that responded.
        status: The cell's status.
        findings: Problems that the doctor finds in the status.
        decisions: Latest scaling decisions that changed a pool's size, newest first; None if the
            coordinator does not scale the pools.
    """

    address: str
    status: admin_pb2.GetStatusResponse
    findings: tuple[Finding, ...]
    decisions: tuple[admin_pb2.ScalingDecision, ...] | None


class Watcher(AsyncClosing):
    """Queries the coordinators of a cell, the last one that responded first.

    `async with Watcher(...)`. Concurrent calls are allowed, each with its own credential.

    Args:
        addresses: host:port of each coordinator; at least one.
        tls: TLS files; None: no TLS.
        api_key: API key, or a function that is called for the API key of every call.
        timeout_s: Timeout of each call in seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tls: Tls | None = None,
        api_key: ApiKey = "",
        timeout_s: float = 3.0,
    ) -> None:
        # The coordinator that responded last comes first.
        self._addresses, self._timeout_s = list(addresses), timeout_s
        made = dial(tls, api_key)
        self._channels = SharedChannels(made, interceptors(made) if api_key else ())

    async def aclose(self) -> None:
        """Closes the connections; idempotent. A later call opens a new one."""
        await self._channels.aclose()

    async def look(self, *, include_history: bool = False) -> View:
        """Fetches the cell's current status.

        Raises:
            RemoteError: No coordinator responds, or the coordinator refuses the call.
        """
        return await self._call_any(lambda admin: self._look(admin, include_history))

    async def request(self, request_id: str, tenant: str = "") -> admin_pb2.RequestInfo:
        """Fetches a request that runs or ended recently, like AdminClient.get_request.

        Raises:
            RemoteError: As in `look`; NotFoundError if there is no such request.
        """
        return await self._call_any(lambda admin: admin.get_request(request_id, tenant=tenant))

    async def requests(self, limit: int) -> list[admin_pb2.RequestInfo]:
        """Fetches at most `limit` requests: running requests first, then recently ended ones.

        Raises:
            RemoteError: As in `look`.
        """
        return await self._call_any(
            lambda admin: admin.list_requests(include_ended=True, limit=limit)
        )

    async def _call_any(self, call: Callable[[AdminClient], Awaitable[T]]) -> T:
        failures = list[RemoteError]()
        for address in tuple(self._addresses):
            async with self._channels.use(address) as channel:
                try:
                    response = await call(
                        AdminClient.from_channel(channel, address, timeout_s=self._timeout_s)
                    )
                except RemoteError as error:
                    if not errors.has_no_answer(error):
                        raise
                    failures.append(errors.as_unavailable(error))
                    # The connection to a coordinator that hangs may still be good.
                    if isinstance(error, errors.UnavailableError):
                        await self._channels.discard(address, channel)
                    continue
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return response
        raise errors.combine(failures)

    @staticmethod
    async def _look(admin: AdminClient, include_history: bool) -> View:
        status = await admin.get_status(include_history=include_history)
        decisions: tuple[admin_pb2.ScalingDecision, ...] | None = None
        # Raised by a coordinator that does not start workers, or that is older than this call.
        with contextlib.suppress(errors.FailedPreconditionError, errors.UnimplementedError):
            decisions = _size_changes(await admin.list_decisions())
        return View(admin.address, status, tuple(diagnose(status)), decisions)


def _size_changes(
    decisions: Sequence[admin_pb2.ScalingDecision],
) -> tuple[admin_pb2.ScalingDecision, ...]:
    """Returns the latest decisions that changed a pool's size, newest first."""
    found = [one for one in decisions if one.from_workers != one.to_workers]
    found.sort(key=lambda one: one.at.ToNanoseconds(), reverse=True)
    return tuple(found[:_MAX_DECISIONS])
