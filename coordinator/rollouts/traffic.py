"""Chooses the fleet of each new request.

Everything that an output depends on (weights, KV cache, sampling state) belongs to one fleet, so a
request stays in the fleet that began its output.
"""

from __future__ import annotations

import xxhash

from baton.coordinator.state.fleets import Fleet, Fleets
from baton.coordinator.state.requests import Submission
from baton.v1 import common_pb2


class Traffic:
    """Chooses the fleet of a new request by a hash, so that a session keeps its fleet.

    Only `Rollouts` changes the attributes.

    Args:
        fleets: All fleets; its `stable` fleet gets the requests that the canary does not get.

    Attributes:
        canary: The fleet that runs the new revision; None: no rollout runs.
        share: Share of new sessions that the canary gets while it is `open`, 0 to 1.
        open: Whether the canary has serving workers for prompts and for outputs.
    """

    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets
        self.canary: Fleet | None = None
        self.share, self.open = 0.0, False

    @property
    def stable(self) -> Fleet:
        """The stable fleet."""
        return self._fleets.stable

    def is_current(self, fleet: Fleet) -> bool:
        """Whether the fleet is the stable one or the canary."""
        return fleet is self.stable or fleet is self.canary

    def gets_new(self, fleet: Fleet) -> bool:
        """Whether the fleet gets new requests now."""
        return fleet is self.stable or (fleet is self.canary and self.open)

    def fleet_of(self, submission: Submission, began_in: str = "") -> Fleet:
        """Returns the fleet of a new or resumed request.

        A resumed output stays in the fleet that began it. Otherwise the session, or the request if
        it has no session, is hashed together with the canary's name: a growing share keeps the
        sessions it had, and each canary gets other sessions.

        Args:
            submission: A new or resumed submission.
            began_in: Name of the fleet that began the output, for a submission that does not name
                it; empty: not known.
        """
        revision = submission.revision or began_in
        if revision and len(submission.known_token_ids):
            return self._fleets.named(revision)
        canary = self.canary
        # Admission checked the request against the stable fleet's context length and adapters.
        if canary is None or not self.open or not fits(submission, canary.workers.model):
            return self.stable
        key = submission.session_id or submission.request_id
        place = xxhash.xxh3_64_intdigest(f"{canary.name}\0{key}".encode()) / 2**64
        return canary if place < self.share else self.stable


def fits(submission: Submission, model: common_pb2.ModelDescription | None) -> bool:
    """Whether workers that serve this model can compute a request; True if `model` is None.

    An output without max_tokens may end at the context of any model.
    """
    if model is None:
        return True
    if submission.adapter and all(one.name != submission.adapter for one in model.adapters):
        return False
    if submission.images and not model.takes_images:
        return False
    num_output = max(1, submission.sampling.min_tokens, submission.sampling.max_tokens)
    num_tokens = len(submission.prompt_token_ids) + num_output
    return not model.max_model_len or num_tokens <= model.max_model_len
