"""State of a request inside vLLM, and the output that each step adds for its client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.outputs import RequestOutput
from vllm.v1.metrics.stats import PrefillStats

from baton.engine.base import EngineOutput, EngineRequest, Finish, Logprob
from baton.engine.vllm_request import logprobs
from baton.v1 import cluster_pb2

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}


@dataclasses.dataclass(slots=True)
class LiveRequest:
    """A request inside vLLM.

    Attributes:
        request: The request as submitted.
        vllm_id: vLLM's ID of the request; never reused, unlike the request's own ID.
        submitted_at: Submission, by time.monotonic.
        num_known_tokens: Replayed tokens that vLLM has yet to report and the client already has.
        num_known_chars: Characters of text that vLLM has yet to report and the client already has.
        pending_text: Text that became final with the known tokens but was not sent with them.
        scheduled_at: When vLLM first ran the request, by vLLM's clock.
        prefill_stats: vLLM's statistics of the prompt.
        num_host_tokens: Prompt tokens loaded from host memory.
        num_disk_tokens: Prompt tokens loaded from disk, through host memory.
        prompt_logprobs: Rows that vLLM has reported and the client does not have: vLLM reports them
            with its first token, which the client may know.
        reported: True once an output was returned.
        cut: True if the first token is out and another worker continues the request.
        retried: True if the request was run again after a failed load.
        features: Images of the request for vLLM.
    """

    request: EngineRequest
    vllm_id: str
    submitted_at: float
    num_known_tokens: int = 0
    num_known_chars: int = 0
    pending_text: str = ""
    scheduled_at: float | None = None
    prefill_stats: PrefillStats | None = None
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    prompt_logprobs: Sequence[Sequence[Logprob]] = ()
    reported: bool = False
    cut: bool = False
    retried: bool = False
    features: Sequence[MultiModalFeatureSpec] = ()

    def without_known(self, text: str) -> str:
        """Returns the part of vLLM's next text that the client does not have."""
        num_known = min(self.num_known_chars, len(text))
        self.num_known_chars -= num_known
        return text[num_known:]

    def gone(self, num_held_tokens: int) -> EngineOutput:
        """Returns the output that ends a request which cannot get the KV cache that it needs.

        Args:
            num_held_tokens: See EngineOutput.
        """
        if self.reported:
            # Another worker computes the prompt again and continues the output.
            error = "vLLM preempted the request, and this worker does not have its images"
            return EngineOutput(self.request.engine_request_id, finish=Finish.ABORTED, error=error)
        gone = EngineOutput(self.request.engine_request_id, finish=Finish.PREFIX_GONE)
        gone.num_held_tokens = num_held_tokens
        return gone

    def output(self, made: RequestOutput, timestamp: float) -> EngineOutput | None:
        """Returns the client's output of a step; None if there is none.

        Args:
            made: Output of vLLM's output processor.
            timestamp: End of the step, by time.monotonic.
        """
        completion = made.outputs[0]
        if made.prompt_logprobs:
            # Known tokens that vLLM computes with the prompt have rows too.
            num_rows = len(self.request.prompt_token_ids)
            self.prompt_logprobs = logprobs(made.prompt_logprobs[:num_rows])
        token_ids = list(completion.token_ids)
        num_known = min(self.num_known_tokens, len(token_ids))
        self.num_known_tokens -= num_known
        text = self.pending_text + self.without_known(completion.text)
        self.pending_text = ""
        output = EngineOutput(
            self.request.engine_request_id,
            token_ids[num_known:],
            text,
            logprobs=logprobs((completion.logprobs or [])[num_known:]),
        )
        if completion.finish_reason is not None:
            self.cut = False
            output.finish = _FINISH.get(completion.finish_reason, Finish.ERROR)
            if output.finish is Finish.ERROR:
                output.error = f"vLLM ended the request: {completion.finish_reason}"
            if completion.stop_reason is not None:
                output.stop = str(completion.stop_reason)
        elif self.cut:
            output.finish = Finish.CUT
        elif not output.token_ids and not output.text:
            return None
        if not self.reported:
            self.reported = True
            scheduled_at = self.scheduled_at or self.submitted_at
            output.timings = cluster_pb2.StageTimings(
                queue_us=round(max(0.0, scheduled_at - self.submitted_at) * 1e6),
                run_us=round(max(0.0, timestamp - scheduled_at) * 1e6),
            )
            if (stats := self.prefill_stats) is not None:
                output.num_cached_tokens = stats.num_local_cached_tokens
                output.num_host_tokens = self.num_host_tokens
                output.num_disk_tokens = self.num_disk_tokens
                num_stored = self.num_host_tokens + self.num_disk_tokens
                num_external = stats.num_external_cached_tokens
                output.num_handoff_tokens = max(0, num_external - num_stored)
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
        return output
