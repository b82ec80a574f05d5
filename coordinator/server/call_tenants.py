"""Tracks which tenants an open client call is charged to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class CallTenants:
    """Charges a call to every tenant with a request in it, or, while idle, to the last tenant.

    After its first request, an open call is therefore always charged to some tenant. A gateway's
    call serves many tenants in turn; the charge of a tenant without a request ends when another
    tenant is charged.
    """

    def __init__(self) -> None:
        # Functions that end the charge, by tenant.
        self._holds: dict[str, Callable[[], None]] = {}
        self._tenants: dict[int, str] = {}
        self._num_live: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether the call is charged to any tenant."""
        return bool(self._holds)

    def enter(self, stream: int, tenant: str, hold: Callable[[], Callable[[], None]]) -> None:
        """Records the start of a request.

        Args:
            stream: stream number of the request, unique among the call's running requests.
            tenant: tenant of the request.
            hold: function that charges the call to the tenant, and returns a function that ends
                the charge. Its exceptions are passed on.
        """
        if tenant not in self._holds:
            self._holds[tenant] = hold()
        self._tenants[stream] = tenant
        self._num_live[tenant] += 1
        if len(self._holds) > 1:
            self._end_idle_charge()

    def leave(self, stream: int) -> None:
        """Records the end of a request; ignores unknown streams."""
        tenant = self._tenants.pop(stream, None)
        if tenant is None:
            return
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            if len(self._holds) > 1:
                self._holds.pop(tenant)()

    def release(self) -> None:
        """Ends all charges at the end of the call; idempotent."""
        holds, self._holds = self._holds, {}
        self._tenants.clear()
        self._num_live.clear()
        for end_charge in holds.values():
            end_charge()

    def _end_idle_charge(self) -> None:
        """Ends the charge of a tenant that was charged only because the call was idle."""
        for tenant in self._holds.keys() - self._num_live.keys():
            self._holds.pop(tenant)()
