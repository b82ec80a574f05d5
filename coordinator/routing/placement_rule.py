"""The interface of the rules that choose workers for requests."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.routing.choices import NoPlacement, Placement, PrefillChoice
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.state.requests import Request, SessionKey


class PlacementRule(Protocol):
    """Chooses workers for the requests of one fleet.

    A cell has one rule: StrictRule if its workers have fixed roles, ElasticRule if any worker may
    compute prompts and decode.
    """

    def place(self, request: Request) -> Placement | NoPlacement:
        """Returns the workers for a request whose turn it is, or why it waits.

        A question changes no later answer: the rule learns only from `begins` and `becomes_late`.
        """

    def begins(self, request: Request, placement: Placement) -> None:
        """Records that a request was placed; the load of its workers does not contain it yet."""

    def becomes_late(self, request: Request) -> None:
        """Records that `place` found a request late; the caller lets others go first."""

    def room_at(self, request: Request) -> float:
        """Predicts when a worker has room for the prompt of a request that cannot be placed now.

        Returns:
            Time by the core's clock; infinite if no prediction is possible, or if the request
            waits for something else.
        """

    def is_crowded(self, entry: WorkerLoad) -> bool:
        """Whether batch outputs on a worker push its interactive outputs over their ITL target."""

    def soonest(
        self, match: PrefixMatch, num_tokens: int, session: SessionKey | None
    ) -> PrefillChoice | None:
        """Returns where a prompt's first token would come soonest if it were queued there now.

        Args:
            match: prefix match of the prompt.
            num_tokens: tokens of the prompt.
            session: the session; None means no session.

        Returns:
            None if there is no worker for it.
        """

    def alone_s(self, match: PrefixMatch, num_tokens: int, session: SessionKey | None) -> float:
        """Predicted seconds to compute a prompt on the best worker if all workers were idle.

        Arguments as in `soonest`.

        Returns:
            Seconds without queues, decodes and loads of cached blocks; infinite if no worker
            computes prompts.
        """
