"""Computes the chained block hashes of prompts, which are the keys of the prefix index."""

from __future__ import annotations

from array import array

from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_traits import block_size_of
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.state.requests import Request, Submission
from baton.coordinator.state.workers import AttachedWorkers
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.prompts.prompt_images import ImageKey, block_keys

_NO_BLOCKS = array("Q")


class PromptBlocks:
    """Cuts prompts into the blocks of one fleet's workers.

    Args:
        view: View of the same workers; this class only reads it.
        workers: Workers of one fleet.
    """

    def __init__(self, view: FleetView, workers: AttachedWorkers) -> None:
        self._view, self._workers = view, workers

    def hashes(self, submission: Submission) -> array[int]:
        """The hashes of a prompt's blocks; empty until a worker has reported the block size."""
        worker = self._workers.first
        if worker is None:
            return array("Q")
        root = root_of(submission.adapter, submission.cache_salt)
        prompt, size = submission.prompt_token_ids, block_size_of(worker.hello)
        return block_hashes(prompt, size, root, _keys(submission, 0, len(prompt), size))

    def hashes_of(self, request: Request) -> array[int]:
        """The hashes of a request's prompt; cached in the request once they can be computed."""
        if request.hashes is not None:
            return request.hashes
        hashes = self.hashes(request.submission)
        if self._workers.first is not None:
            request.hashes = hashes
        return hashes

    def hashes_with_output(self, request: Request) -> array[int]:
        """The hashes of a request's prompt and of its output so far."""
        hashes, worker = self.hashes_of(request), self._workers.first
        if worker is None:
            return hashes
        size, submission = block_size_of(worker.hello), request.submission
        rest = array("I", submission.prompt_token_ids[len(hashes) * size :]) + request.token_ids
        if len(rest) < size:
            return hashes
        last = hashes[-1] if hashes else root_of(submission.adapter, submission.cache_salt)
        keys = _keys(submission, len(hashes) * size, len(rest), size)
        return hashes + block_hashes(rest, size, last, keys)

    def match(self, request: Request) -> PrefixMatch:
        """The prefix of a request's prompt that each worker holds in its prefix cache."""
        return self._view.match(self.hashes_of(request))

    def usable(self, request: Request) -> PrefixMatch:
        """The prefix of a request's prompt that each worker need not compute."""
        return self.usable_for(request.submission, self.hashes_of(request))

    def usable_for(self, submission: Submission, hashes: array[int]) -> PrefixMatch:
        """The prefix of a prompt with these block hashes that each worker need not compute."""
        return self._view.match(_NO_BLOCKS if submission.computes_whole_prompt else hashes)


def _keys(
    submission: Submission, first_token: int, num_tokens: int, size: int
) -> list[list[ImageKey]]:
    """Keys of the images in the blocks; empty without images, as nearly all prompts are."""
    images = submission.images
    return block_keys(images, first_token, num_tokens, size) if images else []
