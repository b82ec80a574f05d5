"""Effects of the event that the core handles: messages to workers and to the clients' streams."""

from __future__ import annotations

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import Request, StreamKey, Submission
from baton.runtime import errors
from baton.v1 import common_pb2


class Effects:
    """Collects the effects of one event, in order; the core takes them after the event."""

    def __init__(self) -> None:
        self._effects: list[ev.Effect] = []
        # The list inside the last SendDeltas of `_effects`; empty: there is no SendDeltas yet.
        self._deltas: list[tuple[StreamKey, bytes]] = []

    def add(self, effect: ev.Effect) -> None:
        """Adds an effect after the others."""
        self._effects.append(effect)

    def take(self) -> list[ev.Effect]:
        """Returns the effects since the last call."""
        effects, self._effects, self._deltas = self._effects, [], []
        return effects

    def deltas(self) -> list[tuple[StreamKey, bytes]]:
        """Returns the list for encoded tokens; all tokens of one event are one effect."""
        if not self._deltas:
            self.add(ev.SendDeltas(self._deltas))
        return self._deltas

    def accepted(self, request: Request) -> None:
        """Tells the client that its request waits for workers."""
        to, adapter = request.submission.to, request.submission.adapter
        self.add(ev.SendAccepted(to, request.id, request.num_prompt_tokens, adapter))

    def finished(
        self,
        request: Request,
        reason: common_pb2.FinishReason.ValueType,
        stop: str,
        budget: common_pb2.LatencyBudget,
    ) -> None:
        """Ends the stream of a request whose output is complete or cancelled.

        Args:
            request: The request.
            reason: The finish reason.
            stop: Stop string or token id that ended the output; empty: none.
            budget: Where the request's time went.
        """
        usage = common_pb2.Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=len(request.token_ids),
            cached_prompt_tokens=request.num_cached_prompt_tokens or 0,
        )
        logprobs = tuple(request.prompt_logprobs)
        self.add(ev.SendFinished(request.submission.to, reason, stop, usage, budget, logprobs))

    def failed(self, submission: Submission, error: errors.BatonError) -> None:
        """Ends the stream of a submission with an error."""
        self.add(ev.SendFailed(submission.to, error))
