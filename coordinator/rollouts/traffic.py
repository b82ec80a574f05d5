"""What a revision runs, and which one a new request gets.

A revision is a name for model and engine arguments together. All that an output rests on is of one
revision: weights, KV cache, sampling state. So a request stays on the one that began its output.
"""

from __future__ import annotations

import xxhash

from baton.coordinator.state.requests import Submission
from baton.v1 import common_pb2


class Traffic:
    """Which revision a request gets. Pure: the same session gets the same one.

    Attributes:
        stable: serves all that no rollout takes.
        canary: gets `share` of new sessions while it is `open`; empty: there is none.
        share: 0 to 1.
        open: whether the canary has workers that serve, in both pools.
        canary_model: what the canary's workers serve; None: not known.
    """

    def __init__(self, stable: str) -> None:
        self.stable, self.canary = stable, ""
        self.share, self.open = 0.0, False
        self.canary_model: common_pb2.ModelDescription | None = None

    def gets_new(self, revision: str) -> bool:
        return revision == self.stable or (revision == self.canary and self.open)

    def revision_of(self, submission: Submission) -> str:
        """By a hash of the session, or of the request where it has none.

        A share that grows takes sessions along that were in it before. The canary's name is in the
        hash, so that it is not the same users who try everything.
        """
        if submission.revision and len(submission.known_token_ids):
            return submission.revision
        # What is let in is checked by the stable one's context, and by its adapters.
        if not (self.open and fits(submission, self.canary_model)):
            return self.stable
        key = submission.session_id or submission.request_id
        place = xxhash.xxh3_64_intdigest(f"{self.canary}\0{key}".encode()) / 2**64
        return self.canary if place < self.share else self.stable


def fits(submission: Submission, model: common_pb2.ModelDescription | None) -> bool:
    """Whether workers that serve this model can compute a request; yes where it is not known."""
    if model is None:
        return True
    if submission.adapter and all(one.name != submission.adapter for one in model.adapters):
        return False
    return not model.max_model_len or len(submission.prompt_token_ids) < model.max_model_len
