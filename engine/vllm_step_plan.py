"""The requests and the plan of one step of vLLM, as Baton's scheduler sees them.

engine/vllm_scheduler.py divides its requests (StepRequests), distributes the tokens of the step
(StepPlan), and makes vLLM follow the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.request import Request

from baton.engine.vllm_adapter_slots import AdapterSlots
from baton.runtime.steps.step_budget import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A prompt that the step may compute.

    Attributes:
        request: vLLM's request.
        prompt: The request's prompt as the policy sees it.
        rank: Sort key; smaller values go first.
    """

    request: Request
    prompt: Prompt
    rank: tuple[float, ...]

    @property
    def name(self) -> str:
        """ID of the request."""
        return str(self.request.request_id)


class WaitingRequests(NamedTuple):
    """The requests of vLLM's queue `waiting`, each in one list.

    Attributes:
        arrivals: Prompts that may start, in the order of their turns.
        awaiting: Requests for which vLLM asks in this step whether their handoff, or another event,
            has come. They compute one token in their first step.
        blocked: Prompts that get no token: the step has no place for another request, the cache has
            no room, or they are behind a stalled request.
        hidden: Requests that vLLM must not see in the step: those that certainly still wait for
            their handoffs, or for an adapter slot, and those that fail in this step because their
            grammar did not compile.
    """

    arrivals: Sequence[Candidate]
    awaiting: Sequence[Request]
    blocked: Sequence[Request]
    hidden: Sequence[Request]


class StepRequests(NamedTuple):
    """The scheduler's requests, divided by what the next step does with them.

    Each request is in one list, apart from `coming`. Requests whose load is under way are in none.

    Attributes:
        streams: Running requests that decode.
        prompts: Running requests that compute their prompt.
        loaded: Prompts that have loaded their blocks and may start. vLLM starts them before those
            of `waiting`.
        unplaced: Prompts that have loaded their blocks, and that get no token: the step has no
            place or no adapter slot for them.
        waiting: All other waiting requests.
        coming: Interactive streams whose handoffs are on their way or being loaded.
        slots: The adapters of running requests, and of those that may start.
    """

    streams: Sequence[Request]
    prompts: Sequence[Candidate]
    loaded: Sequence[Candidate]
    unplaced: Sequence[Request]
    waiting: WaitingRequests
    coming: Sequence[Request]
    slots: AdapterSlots


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How many tokens a step computes, and of which requests.

    A request has a grant, or it is withheld, or it is neither: then the plan does not limit it.
    Streams have no limit.

    Attributes:
        total: Tokens of the step, of all requests.
        grants: Most tokens of each prompt that the step may compute, and of each request that waits
            for an event, by request ID; at least 1.
        withheld: IDs of requests that get no token in the step.
        hidden: Waiting requests that vLLM must not see in the step.
        limit_s: Longest time of the step that its streams allow, in seconds; 0: no limit is known.
    """

    total: int = 0
    grants: Mapping[str, int] = field(default_factory=dict)
    withheld: frozenset[str] = frozenset()
    hidden: Sequence[Request] = ()
    limit_s: float = 0.0
