"""Keeps the state of one attempt of a request on one worker, in either role."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from baton.engine.base import EngineOutput, EngineRequest, Finish, Logprob
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.runtime.durations import to_seconds
from baton.runtime.errors import BatonError, Internal, Unavailable
from baton.runtime.prompts.request_digest import request_digest
from baton.runtime.steps.request_targets import due_in_s, own_itl_s
from baton.v1 import cluster_pb2, common_pb2

_numbers = itertools.count(1)
_REASONS = {
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.CUT: common_pb2.FINISH_REASON_UNSPECIFIED,
}
# Most characters of an output's text that a restarted coordinator gets in a Hello; clients lag
# behind by much less.
_MAX_LAST_CHARS = 2**15


@dataclass(slots=True, eq=False)
class Attempt:
    """State of one attempt of a request on this worker.

    Attributes:
        spec: The request as the coordinator sent it.
        role: Role in which this worker runs the attempt.
        handoff: Plan of the handoff; None: none.
        fetch: Prefix of the prompt that another worker sends; None: none.
        token_ids: The whole output so far, including known tokens.
        num_text_chars: Characters of text that were sent with these tokens, by any worker.
        arrived_at: Arrival of the command, by time.monotonic.
        submitted_at: Submission to the engine, by time.monotonic; None before it.
        engine_request_id: ID of the attempt at the engine. It is never reused, unlike an attempt
            number, which another coordinator may assign again.
        decoding: True once this worker has produced output.
        num_own_host_tokens: Prompt tokens that were loaded from host memory before the attempt was
            submitted, because its fetch leaves them out.
        own_load_s: Seconds that this load took; they shorten the attempt's wait for its fetch.
    """

    spec: cluster_pb2.RequestSpec
    role: common_pb2.Role.ValueType
    handoff: cluster_pb2.HandoffPlan | None
    fetch: cluster_pb2.FetchPlan | None = None
    token_ids: list[int] = field(init=False)
    num_text_chars: int = field(init=False)
    arrived_at: float = field(init=False, default_factory=monotonic)
    submitted_at: float | None = field(init=False, default=None)
    engine_request_id: str = field(init=False)
    decoding: bool = field(init=False, default=False)
    num_own_host_tokens: int = field(init=False, default=0)
    own_load_s: float = field(init=False, default=0.0)
    _text: list[str] = field(init=False, default_factory=list)
    _prompt_logprobs: Sequence[Sequence[Logprob]] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.known_token_ids)
        self.num_text_chars = self.spec.known_text_chars
        self.engine_request_id = f"{self.spec.request_id}#{self.spec.attempt}.{next(_numbers)}"

    def engine_request(
        self,
        *,
        prefill_only: bool = False,
        send: SendHandoff | None = None,
        receive: ReceiveHandoff | None = None,
    ) -> EngineRequest:
        """Returns the attempt as an EngineRequest.

        Args:
            prefill_only: See EngineRequest.
            send: Handoff to send.
            receive: Handoff of the whole prompt to load; None: the fetch, if there is one.
        """
        return EngineRequest(
            engine_request_id=self.engine_request_id,
            prompt_token_ids=self.spec.prompt_token_ids,
            sampling=self.spec.sampling,
            known_token_ids=self.spec.known_token_ids,
            known_text_chars=self.spec.known_text_chars,
            prefill_only=prefill_only,
            priority=self.spec.priority,
            send=send,
            receive=receive or self._fetched(),
            adapter=self.spec.adapter,
            cache_salt=self.spec.cache_salt,
            # The attempt may have waited for staging, or for a load of its own blocks.
            due_in_s=due_in_s(self.spec) - (monotonic() - self.arrived_at),
            itl_s=own_itl_s(self.spec),
            images=self.spec.images,
            chat=self.spec.chat if self.spec.HasField("chat") else None,
        )

    def _fetched(self) -> ReceiveHandoff | None:
        if (plan := self.fetch) is None:
            return None
        return ReceiveHandoff(
            plan.handoff_id,
            plan.num_tokens,
            max(0.0, to_seconds(plan.timeout) - self.own_load_s),
            plan.skip_tokens,
            is_fetch=True,
        )

    def running(self) -> cluster_pb2.RunningRequest:
        """Returns the attempt's state for a restarted coordinator."""
        return cluster_pb2.RunningRequest(
            request_id=self.spec.request_id,
            attempt=self.spec.attempt,
            role=self.role,
            token_ids=self.token_ids,
            num_text_chars=self.num_text_chars,
            decoding=self.decoding,
            last_text="".join(self._text)[-_MAX_LAST_CHARS:],
            digest=request_digest(
                self.spec.prompt_token_ids,
                self.spec.sampling,
                self.spec.adapter,
                self.spec.images,
            ),
            tenant=self.spec.tenant,
            num_prompt_tokens=len(self.spec.prompt_token_ids),
        )

    def report(self, output: EngineOutput) -> cluster_pb2.RequestOutput:
        """Converts an engine's output to the coordinator's message, and counts its tokens."""
        message = cluster_pb2.RequestOutput(
            request_id=self.spec.request_id, attempt=self.spec.attempt
        )
        if output.token_ids or output.text:
            message.delta.offset = len(self.token_ids)
            message.delta.token_ids.extend(output.token_ids)
            message.delta.text = output.text
            message.delta.logprobs.extend(_logprobs(output.logprobs))
            self._record_output(output)
        if output.timings is not None:
            message.timings.CopyFrom(self._timings(output.timings, output))
        if output.finish is Finish.ERROR:
            return self.failed(Internal(output.error or "the engine failed this request"))
        if output.finish is Finish.ABORTED:
            return self.failed(Unavailable(output.error or "the engine gave this request up"))
        if output.finish is Finish.PREFIX_GONE:
            message.prefix_gone.SetInParent()
            return message
        # The engine may return prompt logprobs before the end; the message of the end has them.
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        if output.finish is not None:
            message.finished.reason = _REASONS[output.finish]
            message.finished.stop = output.stop
            message.finished.prompt_logprobs.extend(_logprobs(self._prompt_logprobs))
        return message

    def report_token(self, output: EngineOutput, tokens: cluster_pb2.StepTokens) -> bool:
        """Adds an output to a step's columns if it is a single token without anything else.

        Returns:
            False if the output has more, or the attempt has no handle. The caller then uses
                `report`.
        """
        if (
            not self.spec.handle
            or len(output.token_ids) != 1
            or output.logprobs
            or output.prompt_logprobs
            or output.has_begun
        ):
            return False
        delta = common_pb2.TokenDelta(
            offset=len(self.token_ids), token_ids=output.token_ids, text=output.text
        )
        tokens.handles.append(self.spec.handle)
        tokens.offsets.append(delta.offset)
        tokens.token_ids.append(output.token_ids[0])
        tokens.num_text_chars.append(len(output.text))
        tokens.deltas.append(delta.SerializeToString())
        self._record_output(output)
        return True

    def _record_output(self, output: EngineOutput) -> None:
        """Records an output for the report to a restarted coordinator."""
        self.token_ids.extend(output.token_ids)
        self.num_text_chars += len(output.text)
        self.decoding = True
        if output.text:
            self._text.append(output.text)

    def failed(self, error: BatonError) -> cluster_pb2.RequestOutput:
        return cluster_pb2.RequestOutput(
            request_id=self.spec.request_id,
            attempt=self.spec.attempt,
            failed=common_pb2.RequestError(
                code=error.code, message=str(error), details=error.details()
            ),
        )

    def handoff_report(self, handoff_id: bytes) -> cluster_pb2.HandoffReport:
        """Returns a report on a handoff of this attempt; the caller fills in the result."""
        return cluster_pb2.HandoffReport(
            request_id=self.spec.request_id, attempt=self.spec.attempt, handoff_id=handoff_id
        )

    def _timings(
        self, timings: cluster_pb2.StageTimings, output: EngineOutput
    ) -> cluster_pb2.StageTimings:
        """Completes the engine's timings; the time before the submission counts as queueing."""
        if self.submitted_at is not None:
            timings.queue_us += round((self.submitted_at - self.arrived_at) * 1e6)
        # OwnBlocks has loaded these tokens from host memory into the prefix cache.
        num_own = min(self.num_own_host_tokens, output.num_cached_tokens)
        timings.num_cached_tokens = output.num_cached_tokens - num_own
        timings.num_host_tokens = output.num_host_tokens + num_own
        timings.num_disk_tokens = output.num_disk_tokens
        if self.fetch is None:
            timings.num_handoff_tokens = output.num_handoff_tokens
        else:
            timings.num_fetched_tokens = output.num_handoff_tokens
        return timings


def _logprobs(rows: Sequence[Sequence[Logprob]]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            entries=[
                common_pb2.TokenLogprob(
                    token_id=one.token_id, logprob=one.logprob, rank=one.rank, text=one.text
                )
                for one in row
            ]
        )
        for row in rows
    ]
