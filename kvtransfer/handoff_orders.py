"""A worker's orders to its engine: which handoff a request sends, and which one it loads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SendHandoff:
    """Tells the engine to save a request's KV blocks in staging as it computes them.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        offset: Where the handoff's bytes begin in the shared segment (LocalSendOpened).
        num_tokens: Number of prompt tokens, from the first, that the handoff covers.
        skip_tokens: Number of these tokens, from the first, that the handoff leaves out; a multiple
            of the block size.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveHandoff:
    """Tells the engine to start from KV blocks that another worker sent.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        num_tokens: Number of tokens that the handoff covers, from the first: the prompt, then known
            tokens. 0 as in FetchPlan: see `only_waits`.
        timeout_s: Longest wait for the commit, in seconds. After it the engine computes the prompt.
        skip_tokens: Number of these tokens, from the first, that the handoff leaves out; a multiple
            of the block size. If the prefix cache does not hold them, the request ends with
            Finish.PREFIX_GONE.
        is_fetch: Whether the handoff brings only a prefix of the prompt, as whole blocks. The
            engine computes the tokens after it. If the handoff fails, or the prefix cache does not
            hold the tokens that it leaves out, the engine computes the prompt.
    """

    handoff_id: bytes
    num_tokens: int
    timeout_s: float
    skip_tokens: int = 0
    is_fetch: bool = False

    @property
    def only_waits(self) -> bool:
        """Whether another request fetches the prefix, and this one waits until it is loaded."""
        return not self.num_tokens
