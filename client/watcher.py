"""Looking at a cell again and again: what `baton top` and the dashboard draw."""

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
    """A cell at one moment.

    Attributes:
        address: of the coordinator that answered.
        decisions: the last ones that changed a pool's size, newest first; None where nothing
            scales the pools.
    """

    address: str
    status: admin_pb2.GetStatusResponse
    findings: tuple[Finding, ...]
    decisions: tuple[admin_pb2.ScalingDecision, ...] | None


class Watcher(AsyncClosing):
    """Keeps a connection to the coordinator that answered last: `async with Watcher(...)`.

    Any number may ask at a time, each with the credential of its own context.

    Args:
        addresses: host:port of each; at least one.
        tls: as AdminClient's.
        api_key: as AdminClient's; asked for with every question.
        timeout_s: of each call.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tls: Tls | None = None,
        api_key: ApiKey = "",
        timeout_s: float = 3.0,
    ) -> None:
        # The one that answered last is asked first.
        self._addresses, self._timeout_s = list(addresses), timeout_s
        made = dial(tls, api_key)
        self._channels = SharedChannels(made, interceptors(made) if api_key else ())

    async def aclose(self) -> None:
        """Closes the connection; idempotent. Looking opens another."""
        await self._channels.aclose()

    async def look(self, *, include_history: bool = False) -> View:
        """The cell as it is now.

        Raises:
            RemoteError: no coordinator answers, or the one that did refuses.
        """
        return await self._ask(lambda admin: self._look(admin, include_history))

    async def request(self, request_id: str, tenant: str = "") -> admin_pb2.RequestInfo:
        """One request, running or recently ended; as AdminClient.get_request.

        Raises:
            RemoteError: as above; NotFoundError when there is none.
        """
        return await self._ask(lambda admin: admin.get_request(request_id, tenant=tenant))

    async def requests(self, limit: int) -> list[admin_pb2.RequestInfo]:
        """Those that run, and then those that ended last.

        Raises:
            RemoteError: as above.
        """
        return await self._ask(lambda admin: admin.list_requests(include_ended=True, limit=limit))

    async def _ask(self, question: Callable[[AdminClient], Awaitable[T]]) -> T:
        failures = list[RemoteError]()
        for address in tuple(self._addresses):
            async with self._channels.to(address) as channel:
                try:
                    answer = await question(
                        AdminClient.over(channel, address, timeout_s=self._timeout_s)
                    )
                except errors.UnavailableError as error:
                    failures.append(error)
                    await self._channels.leave(address, channel)
                    continue
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return answer
        raise errors.of_all(failures)

    @staticmethod
    async def _look(admin: AdminClient, include_history: bool) -> View:
        status = await admin.get_status(include_history=include_history)
        decisions: tuple[admin_pb2.ScalingDecision, ...] | None = None
        # Of a coordinator that starts no workers; of an older one.
        with contextlib.suppress(errors.FailedPreconditionError, errors.UnimplementedError):
            decisions = _changes(await admin.list_decisions())
        return View(admin.address, status, tuple(diagnose(status)), decisions)


def _changes(
    decisions: Sequence[admin_pb2.ScalingDecision],
) -> tuple[admin_pb2.ScalingDecision, ...]:
    """The latest of them that changed a size, newest first."""
    found = [one for one in decisions if one.from_workers != one.to_workers]
    found.sort(key=lambda one: one.at.ToNanoseconds(), reverse=True)
    return tuple(found[:_MAX_DECISIONS])
