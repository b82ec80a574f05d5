"""Which tenants one client call is counted to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class CallTenants:
    """A call is each tenant's that has a request in it; one that is idle stays its last one's.

    So an open call is always somebody's, and a gateway's, which is many tenants' one after the
    other, counts to none for longer than it serves it.
    """

    def __init__(self) -> None:
        # What gives the call back, by tenant.
        self._holds: dict[str, Callable[[], None]] = {}
        self._tenants: dict[int, str] = {}
        self._num_live: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether it is counted to anybody."""
        return bool(self._holds)

    def enter(self, stream: int, tenant: str, hold: Callable[[], Callable[[], None]]) -> None:
        """A tenant's request begins.

        Args:
            stream: of the request; none has this number until it has left.
            tenant: as above.
            hold: counts the call to the tenant, and returns what gives it back; what it raises is
                raised.
        """
        if tenant not in self._holds:
            self._holds[tenant] = hold()
        self._tenants[stream] = tenant
        self._num_live[tenant] += 1
        if len(self._holds) > 1:
            self._let_go_of_idle()

    def leave(self, stream: int) -> None:
        """The request has ended; unknown ones are ignored."""
        tenant = self._tenants.pop(stream, None)
        if tenant is None:
            return
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]
            if len(self._holds) > 1:
                self._holds.pop(tenant)()

    def release(self) -> None:
        """The call has ended, and all that runs in it; idempotent."""
        holds, self._holds = self._holds, {}
        self._tenants.clear()
        self._num_live.clear()
        for give_back in holds.values():
            give_back()

    def _let_go_of_idle(self) -> None:
        """There is one at most: whose request was the last to end."""
        for tenant in self._holds.keys() - self._num_live.keys():
            self._holds.pop(tenant)()
