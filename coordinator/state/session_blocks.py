"""The KV blocks that each session's requests have had, so that an operator can delete them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.coordinator.state.requests import SessionKey
from baton.runtime.errors import InvalidArgument, NotFound

# Most hashes of blocks that are remembered, 8 bytes each: those of 134 million tokens in blocks
# of 16. The sessions used least recently are forgotten first.
_MAX_BLOCKS = 2**23
# Most sessions that are remembered.
_MAX_SESSIONS = 65536
# Most chains of one session: continued conversations replace their chain, so that a session has
# as many as it has branches.
_MAX_CHAINS = 256


@dataclass(slots=True)
class _Session:
    """Chained hashes of prompts with their outputs; none is the beginning of another."""

    chains: list[array[int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.chains))


class TakenSession(NamedTuple):
    """Blocks of a session that is forgotten.

    Attributes:
        key: The session.
        chains: All that was remembered, for `put_back`.
        hashes: Blocks that no other session has had.
        num_shared: Number of its other blocks.
    """

    key: SessionKey
    chains: list[array[int]]
    hashes: frozenset[int]
    num_shared: int


class SessionBlocks:
    """Remembers the blocks of the sessions used most recently; memory is bounded.

    Hashes are chained (runtime/prompts/block_hashes.py): two chains have the blocks up to some
    index in common, and none after it.

    Args:
        max_blocks: Most hashes that are remembered.
        max_sessions: Most sessions that are remembered.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_blocks, self._max_sessions = max_blocks, max_sessions
        # Least recently used first.
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, key: SessionKey, hashes: array[int]) -> None:
        """Adds the blocks of a request.

        Args:
            key: The request's session.
            hashes: Hashes of all its blocks, from the first; the caller must not change them
                afterwards.
        """
        if not hashes:
            return
        session = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        chains = session.chains
        # A request nearly always continues the latest chain.
        for index in range(len(chains) - 1, -1, -1):
            chain = chains[index]
            if _begins_with(chain, hashes):
                return
            if _begins_with(hashes, chain):
                self._num_blocks -= len(chains.pop(index))
        chains.append(hashes)
        self._num_blocks += len(hashes)
        if len(chains) > _MAX_CHAINS:
            self._num_blocks -= len(chains.pop(0))
        while self._num_blocks > self._max_blocks or len(self._sessions) > self._max_sessions:
            _, oldest = self._sessions.popitem(last=False)
            self._num_blocks -= oldest.num_blocks

    def take(self, session_id: str, tenant: str = "") -> TakenSession:
        """Forgets a session and returns its blocks.

        Args:
            session_id: ID of the session.
            tenant: Its tenant; empty: the only tenant with a session of this ID.

        Raises:
            NotFound: No blocks of such a session are remembered.
            InvalidArgument: `tenant` is empty and several tenants have a session of this ID.
        """
        key = self._find(session_id, tenant)
        chains = self._sessions.pop(key).chains
        own = {one for chain in chains for one in chain}
        self._num_blocks -= sum(map(len, chains))
        shared = set[int]()
        for other in self._sessions.values():
            for chain in other.chains:
                num_common = _num_common(chain, own)
                if num_common and chain[num_common - 1] not in shared:
                    shared.update(chain[:num_common])
        return TakenSession(key, chains, frozenset(own - shared), len(shared))

    def put_back(self, taken: TakenSession) -> None:
        """Remembers a session again whose blocks may not all be deleted."""
        for chain in taken.chains:
            self.add(taken.key, chain)

    def _find(self, session_id: str, tenant: str) -> SessionKey:
        if tenant:
            found = [SessionKey(tenant, session_id)]
        else:
            found = [key for key in self._sessions if key.session_id == session_id]
        if len(found) > 1:
            tenants = ", ".join(sorted(key.tenant for key in found))
            raise InvalidArgument(
                "tenant", "", f"several tenants have a session {session_id!r}; name one: {tenants}"
            )
        if not found or found[0] not in self._sessions:
            of_tenant = f" of tenant {tenant!r}" if tenant else ""
            raise NotFound(
                f"no KV blocks of session {session_id!r}{of_tenant} are known: the coordinator "
                "knows those of the latest sessions since its start; blocks that it does not know "
                "can only be deleted with all others of their tenant"
            )
        return found[0]

    def check_integrity(self) -> None:
        """Raises AssertionError if a sum or a bound is wrong, or a chain is kept twice."""
        assert self._num_blocks == sum(one.num_blocks for one in self._sessions.values())
        assert self._num_blocks <= self._max_blocks
        assert len(self._sessions) <= self._max_sessions
        for session in self._sessions.values():
            assert 0 < len(session.chains) <= _MAX_CHAINS
            ends = {chain[-1] for chain in session.chains}
            assert len(ends) == len(session.chains)
            assert not any(ends.intersection(chain[:-1]) for chain in session.chains)


def _begins_with(chain: array[int], first: array[int]) -> bool:
    return len(first) <= len(chain) and chain[len(first) - 1] == first[-1]


def _num_common(chain: array[int], own: set[int]) -> int:
    """Returns how many of the first blocks of a chain are among the blocks of a session."""
    if chain[0] not in own:
        return 0
    return bisect_left(range(len(chain)), True, key=lambda index: chain[index] not in own)
