"""Prompts as their chained block hashes, by which prefix caches are looked up."""

from __future__ import annotations

from array import array

from baton.coordinator.routing.prefix_index import PrefixMatch
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_traits import block_size_of
from baton.coordinator.state.requests import Request, Submission
from baton.coordinator.state.workers import AttachedWorkers
from baton.runtime.block_hashes import block_hashes, root_of


class PromptBlocks:
    """Cuts prompts into the blocks of one fleet's workers.

    Args:
        router: of these workers; it is only read.
        workers: Workers of one fleet.
    """

    def __init__(self, router: Router, workers: AttachedWorkers) -> None:
        self._router, self._workers = router, workers

    def hashes(self, submission: Submission) -> array[int]:
        """The hashes of a prompt's blocks; none while no worker has said how large blocks are."""
        worker = self._workers.first
        if worker is None:
            return array("Q")
        return block_hashes(
            submission.prompt_token_ids, block_size_of(worker.hello), root_of(submission.adapter)
        )

    def hashes_of(self, request: Request) -> array[int]:
        """The same of a request, which keeps them."""
        if request.hashes is None:
            request.hashes = self.hashes(request.submission)
        return request.hashes

    def match(self, request: Request) -> PrefixMatch:
        """Which workers hold how much of a request's prompt in their prefix caches."""
        return self._router.match(self.hashes_of(request))
