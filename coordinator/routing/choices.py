"""Results of routing decisions: the chosen workers and the predictions behind the choice."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.coordinator.state.requests import PlacementPrediction, PromptHits, WorkerKey


class Fetch(NamedTuple):
    """The beginning of a prompt that the prefill worker gets from another worker.

    Attributes:
        holder: the worker that sends it, from its device, host memory or disk.
        num_tokens: number of leading prompt tokens that the prefill worker has after the fetch;
            whole blocks.
        skip_tokens: number of leading tokens that the fetch leaves out, because the prefill worker
            has them on its device or in host memory; whole blocks.
        fetch_s: predicted seconds until the prefill worker has all `num_tokens` tokens.
        sending_s: the part of `fetch_s` in which the holder sends.
        timeout_s: seconds after which the prefill worker computes the prompt instead.
        least_tokens: smallest `num_tokens` for which the fetch pays if the holder lacks blocks.
        host_tokens: number of tokens at the end of `skip_tokens` that the prefill worker loads from
            its host memory.
    """

    holder: WorkerKey
    num_tokens: int
    skip_tokens: int
    fetch_s: float
    sending_s: float
    timeout_s: float = 0.0
    least_tokens: int = 0
    host_tokens: int = 0

    @property
    def num_sent_tokens(self) -> int:
        return self.num_tokens - self.skip_tokens


class PrefillChoice(NamedTuple):
    """The worker chosen to compute a prompt.

    Attributes:
        worker: the worker, which may be the request's decode worker.
        ttft_s: predicted seconds until the first token: the worker's queue, the load from host
            memory or the fetch, and the prompt's own work.
        work_s: seconds of the prompt's computation; `assign_prefill` adds them to the worker's
            load. A load from host memory delays no other prompt.
        num_work_tokens: tokens of the prompt that the worker must compute.
        hits: tokens of the prompt that the worker should hold.
        fetch: the beginning of the prompt that another worker sends; None: no fetch.
    """

    worker: WorkerKey
    ttft_s: float
    work_s: float
    num_work_tokens: int
    hits: PromptHits = PromptHits()
    fetch: Fetch | None = None


class DecodeChoice(NamedTuple):
    """The decode worker chosen for a request.

    Attributes:
        worker: the decode worker.
        step_s: predicted seconds per decode step on the worker once this request has joined.
        num_kv_tokens: KV tokens that the request needs; `assign_decode` reserves them.
        num_tokens: tokens of the prompt and of the output generated so far.
        hits: tokens of the prompt that the worker holds, or is expected to hold soon.
    """

    worker: WorkerKey
    step_s: float
    num_kv_tokens: int
    num_tokens: int
    hits: PromptHits = PromptHits()


class PlacementSample(NamedTuple):
    """The state of an elastic cell at a placement; the rule learns from it once the request begins.

    Attributes:
        is_busy: whether every fast worker had prompts for more than one step.
        num_assigned: number of outputs that were assigned to the compared workers.
        num_decoding: number of these outputs whose prompts were computed.
        prompt_share: seconds to compute the prompt on a worker without other work, as a share of
            the expected seconds to decode the output.
        due_share: predicted seconds until the first token, as a share of the time until it is due.
    """

    is_busy: bool
    num_assigned: int
    num_decoding: int
    prompt_share: float
    due_share: float


class Placement(NamedTuple):
    """The workers that a request runs on.

    Attributes:
        prefill: the worker that computes the prompt; it may be the decode worker.
        decode: decode worker for the output; None: the request ends with its first token.
        skip_tokens: tokens that the handoff leaves out because the decode worker has them on its
            device, by its reports; a multiple of the block size.
        sample: state of the cell when the rule chose; None: the rule learns nothing from it.
    """

    prefill: PrefillChoice
    decode: DecodeChoice | None
    skip_tokens: int = 0
    sample: PlacementSample | None = None

    @property
    def is_local(self) -> bool:
        """Whether the decode worker computes the prompt itself."""
        return self.decode is not None and self.decode.worker == self.prefill.worker

    @property
    def handoff(self) -> bool:
        """Whether the prefill worker hands the prompt's KV cache over to the decode worker."""
        return self.decode is not None and self.decode.worker != self.prefill.worker

    @property
    def prediction(self) -> PlacementPrediction:
        """The predictions that the workers were chosen by."""
        prefill, decode, fetch = self.prefill, self.decode, self.prefill.fetch
        return PlacementPrediction(
            prefill.worker[0],
            max(0.0, prefill.ttft_s - prefill.work_s),
            prefill.work_s,
            prefill.hits,
            decode.worker[0] if decode is not None else "",
            decode.step_s if decode is not None else 0.0,
            fetch.num_sent_tokens if fetch is not None else 0,
            fetch.holder[0] if fetch is not None else "",
        )


class NoPlacement(Enum):
    """Why a request is not placed now.

    Members:
        FULL: only room on a decode worker is lacking (KV room, or a place in the engine's batch),
            so that it may help to park batch outputs; it keeps its turn. In an elastic cell, its
            prompt needs the same room.
        BUSY: more such room would not help, because other prompts must be computed first, or
            because no worker computes prompts; it keeps its turn.
        LATE: no worker can produce its first token within its TTFT target; others go first.
    """

    FULL = "full"
    BUSY = "busy"
    LATE = "late"


class RoomWanted(NamedTuple):
    """The room that parked batch requests must free on a decode worker.

    Attributes:
        worker: the decode worker.
        num_tokens: KV tokens to free in addition to those that are free already.
        num_requests: minimum number of batch requests that must leave the worker.
    """

    worker: WorkerKey
    num_tokens: int
    num_requests: int
