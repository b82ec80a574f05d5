"""The kv_transfer_params of a vLLM request: what Baton's engine tells the connector and scheduler.

vLLM carries them to the process of its scheduler as a dict of plain values. Only this module knows
the dict's keys: `encode` writes it; RequestParams and `read_itl_s` read it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff

_DROP = "baton_drop"
_DUE_AT = "baton_due_at"
_ITL_S = "baton_itl_s"
_NEEDED_TOKENS = "baton_needed_tokens"
_ONLY_CACHED = "baton_only_cached"
_RECEIVE = "baton_receive"
_SEND = "baton_send"
_IS_FETCH = "is_fetch"


@dataclass(frozen=True, slots=True)
class DropOrder:
    """An order to delete KV blocks (cache_drops.py).

    Attributes:
        drop_id: ID of the order, unique among the engine's orders.
        cache_salt: Only blocks with this salt are deleted; None: blocks of any salt.
        block_hashes: Only these blocks, and those after them, are deleted; None: all blocks.
    """

    drop_id: int
    cache_salt: str | None = None
    block_hashes: Collection[int] | None = None


def encode(
    *,
    send: SendHandoff | None = None,
    receive: ReceiveHandoff | None = None,
    only_cached: bool = False,
    num_needed_tokens: int = 0,
    due_at: float = math.inf,
    itl_s: float | None = None,
    drop: DropOrder | None = None,
) -> dict[str, Any]:
    """Returns the kv_transfer_params of a request.

    RequestParams and read_itl_s describe the arguments.
    """
    params: dict[str, Any] = {}
    if send is not None:
        params[_SEND] = {
            "handoff_id": send.handoff_id.hex(),
            "offset": send.offset,
            "num_tokens": send.num_tokens,
            "skip_tokens": send.skip_tokens,
        }
    if receive is not None:
        params[_RECEIVE] = {
            "handoff_id": receive.handoff_id.hex(),
            "num_tokens": receive.num_tokens,
            "timeout_s": receive.timeout_s,
            "skip_tokens": receive.skip_tokens,
            _IS_FETCH: receive.is_fetch,
        }
    if only_cached:
        params[_ONLY_CACHED] = True
    if num_needed_tokens:
        params[_NEEDED_TOKENS] = num_needed_tokens
    if due_at < math.inf:
        params[_DUE_AT] = due_at
    if itl_s is not None:
        params[_ITL_S] = itl_s
    if drop is not None:
        hashes = None if drop.block_hashes is None else list(drop.block_hashes)
        params[_DROP] = {"id": drop.drop_id, "salt": drop.cache_salt, "hashes": hashes}
    return params


class RequestParams:
    """Reads the kv_transfer_params of a request.

    Each property decodes its own part, because the scheduler reads some of them for every prompt in
    every step.

    Args:
        params: The request's kv_transfer_params; None: it has none.
    """

    __slots__ = ("_params",)

    def __init__(self, params: Mapping[str, Any] | None) -> None:
        self._params = params or {}

    @property
    def send(self) -> SendHandoff | None:
        """The handoff that the request sends; None: none."""
        if (send := self._params.get(_SEND)) is None:
            return None
        return SendHandoff(**{**send, "handoff_id": bytes.fromhex(send["handoff_id"])})

    @property
    def receive(self) -> ReceiveHandoff | None:
        """The handoff that the request loads; None: none."""
        if (receive := self._params.get(_RECEIVE)) is None:
            return None
        return ReceiveHandoff(**{**receive, "handoff_id": bytes.fromhex(receive["handoff_id"])})

    @property
    def loads_whole_prompt(self) -> bool:
        """Whether the request loads a handoff that is not a fetch (as EngineRequest)."""
        receive = self._params.get(_RECEIVE)
        return receive is not None and not receive[_IS_FETCH]

    @property
    def only_cached(self) -> bool:
        """Whether the request must find its prompt in the cache (EngineRequest.only_cached)."""
        return _ONLY_CACHED in self._params

    @property
    def num_needed_tokens(self) -> int:
        """Prompt tokens that the engine cannot compute (EngineRequest.num_needed_tokens)."""
        return int(self._params.get(_NEEDED_TOKENS, 0))

    @property
    def due_at(self) -> float:
        """When the first token is due, by time.time; infinite without a TTFT target."""
        return float(self._params.get(_DUE_AT, math.inf))

    @property
    def drop(self) -> DropOrder | None:
        """The order to delete KV blocks that the request carries; None: none."""
        if (drop := self._params.get(_DROP)) is None:
            return None
        return DropOrder(drop["id"], drop["salt"], drop["hashes"])


def read_itl_s(params: Mapping[str, Any] | None) -> float | None:
    """Returns the ITL target that the client named, in seconds; None: the engine's applies.

    This is a function, because the scheduler calls it for every stream in every step.

    Args:
        params: The request's kv_transfer_params; None: it has none.
    """
    return params.get(_ITL_S) if params else None
