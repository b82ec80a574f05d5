"""The events that the core handles, and the effects that it returns.

Protobuf messages in them are payloads that pass through unchanged, or messages of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import (
    EndedRequest,
    RequestKey,
    StreamKey,
    Submission,
    WorkerKey,
)
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import Targets
from baton.coordinator.state.scaling_decision import Decision
from baton.runtime.errors import BatonError
from baton.v1 import cluster_pb2, common_pb2

# ---- Events


@dataclass(frozen=True, slots=True)
class Submitted:
    """A client's request, validated and tokenized."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class StreamCancelled:
    """A client cancels one of its requests. Unknown requests are ignored."""

    to: StreamKey


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """An operator cancels a request. Unknown requests are ignored."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The shell cannot send a request's command to a worker. Unknown requests are ignored."""

    key: RequestKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The shell cannot continue a stream, for example because its reader is too slow."""

    to: StreamKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class SessionLost:
    """A client's session has ended. Its requests are cancelled without an answer.

    Attributes:
        session: Number of the session.
        most: Largest number of requests to cancel now; None: all. The event is sent again until
            no request is left.
    """

    session: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker's stream began. The effect is WelcomeWorker or RefuseWorker.

    Attributes:
        returns: Whether the worker served another coordinator before.
        forgets: Whether it has forgotten what it was sent here before, and numbers its messages
            anew: it was attached here, and has served another coordinator since.
    """

    hello: cluster_pb2.Hello
    returns: bool = False
    forgets: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A worker sent a heartbeat without content."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A worker's load report."""

    worker: WorkerKey
    load: cluster_pb2.LoadReport


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """All outputs of one engine step of a worker."""

    worker: WorkerKey
    step: cluster_pb2.StepOutputs


@dataclass(frozen=True, slots=True)
class WorkerHandoff:
    """A worker's report on the end of a handoff."""

    worker: WorkerKey
    report: cluster_pb2.HandoffReport


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """Changes of a worker's prefix cache."""

    worker: WorkerKey
    changes: cluster_pb2.CacheEvents


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker's report of a new state or role."""

    worker: WorkerKey
    change: cluster_pb2.WorkerStateChanged


@dataclass(frozen=True, slots=True)
class WorkerDetached:
    """A worker's stream ended. The worker may come back."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The shell knows that a worker will not or must not come back.

    Attributes:
        reason: Reason in words that continue "worker w1 ...".
        incarnation: The incarnation that is lost; None: any.
    """

    worker_id: str
    reason: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A worker must drain: it gets no new requests and then leaves. Unknown ids are ignored.

    Attributes:
        reason: Reason in words.
    """

    worker_id: str
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FlipRequested:
    """An operator wants a worker to change its role. `Core.flip_error` must have returned None."""

    worker_id: str
    role: common_pb2.Role.ValueType


@dataclass(frozen=True, slots=True)
class LauncherReady:
    """The launcher can start workers from now on.

    Attributes:
        sizes: Initial sizes of the pools.
    """

    sizes: Mapping[Pool, int]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A launched process has ended or could not start. Unknown ids are ignored.

    Attributes:
        reason: Reason in words that continue "worker w1 ...".
        loading_failure: More detailed reason of a process that ended before it attached; or empty.
        gone: Whether the whole process group has ended and holds no GPU (answers EndWorker).
    """

    worker_id: str
    reason: str
    loading_failure: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """A process cannot be started yet. Unknown ids are ignored.

    Attributes:
        reason: Reason in words that continue "worker w1 ..."; empty: it waits no longer.
    """

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """An operator sets a pool's size. `Scaler.scale_error` must have returned None."""

    pool: Pool
    num_workers: int


@dataclass(frozen=True, slots=True)
class AutoscaleRequested:
    """An operator switches autoscaling on or off."""

    enabled: bool


@dataclass(frozen=True, slots=True)
class TargetsRequested:
    """An operator sets the latency targets of lanes. Other lanes keep their targets."""

    targets: Mapping[str, Targets]


@dataclass(frozen=True, slots=True)
class RolloutRequested:
    """An operator starts a rollout. `Rollouts.start_error` must have returned None.

    Attributes:
        revision: The canary's revision.
        share: Share of new sessions that the canary gets, 0 to 1.
        sizes: Number of workers to start, by pool. A pool that is left out uses the attached
            workers, or starts one worker.
        abort_if_worse: Whether to abort the rollout when the canary is worse than the stable
            revision.
    """

    revision: Revision
    share: float
    sizes: Mapping[Pool, int]
    abort_if_worse: bool = False


@dataclass(frozen=True, slots=True)
class ShareRequested:
    """An operator changes the share of the rollout that runs."""

    share: float


@dataclass(frozen=True, slots=True)
class PromotionRequested:
    """An operator promotes the canary. `Rollouts.promote_error` must have returned None.

    Attributes:
        drain_s: Seconds that requests of the old revision may take; None: max_request_s.
    """

    drain_s: float | None = None


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """An operator aborts the rollout: the canary gets no new requests and leaves.

    Attributes:
        why: Reason in words.
        drain_s: Seconds that the canary's requests may take; None: max_request_s.
    """

    why: str
    drain_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdmissionClosed:
    """The process will stop: no new requests are admitted, admitted requests go on.

    Attributes:
        restarts: Whether another coordinator follows, so that clients should come back.
    """

    restarts: bool = False


@dataclass(frozen=True, slots=True)
class ShutdownNow:
    """The process stops now: all requests that have not ended fail.

    Attributes:
        reason: Reason in words.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `Core.next_deadline` has come."""


Event = (
    Submitted
    | StreamCancelled
    | RequestCancelled
    | RequestFailed
    | StreamFailed
    | SessionLost
    | WorkerAttached
    | WorkerHeard
    | LoadReported
    | WorkerStep
    | WorkerHandoff
    | WorkerCache
    | WorkerChanged
    | WorkerDetached
    | WorkerLost
    | DrainRequested
    | FlipRequested
    | LauncherReady
    | WorkerExited
    | WorkerWaits
    | ScaleRequested
    | AutoscaleRequested
    | TargetsRequested
    | RolloutRequested
    | ShareRequested
    | PromotionRequested
    | AbortRequested
    | AdmissionClosed
    | ShutdownNow
    | Tick
)

# ---- Effects


@dataclass(frozen=True, slots=True)
class SendAccepted:
    """The stream's first event."""

    to: StreamKey
    request_id: str
    num_prompt_tokens: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class SendDeltas:
    """All tokens of one event, each an encoded TokenDelta with its stream."""

    deltas: list[tuple[StreamKey, bytes]]


@dataclass(frozen=True, slots=True)
class SendFinished:
    """The stream's last event."""

    to: StreamKey
    reason: common_pb2.FinishReason.ValueType
    stop: str
    usage: common_pb2.Usage
    budget: common_pb2.LatencyBudget
    prompt_logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The stream's last event."""

    to: StreamKey
    error: BatonError


Command = (
    cluster_pb2.PrefillCommand
    | cluster_pb2.DecodeCommand
    | cluster_pb2.CancelCommand
    | cluster_pb2.SetRoleCommand
    | cluster_pb2.DrainCommand
    | cluster_pb2.ReleaseCommand
    | cluster_pb2.ProfileCommand
    | cluster_pb2.RolloutRecord
    | cluster_pb2.StepTargets
    | cluster_pb2.DropCacheCommand
    | cluster_pb2.RenderCommand
    | cluster_pb2.SendPrefixCommand
)


@dataclass(frozen=True, slots=True)
class SendCommand:
    """A command for a worker."""

    worker: WorkerKey
    command: Command


@dataclass(frozen=True, slots=True)
class WelcomeWorker:
    """The worker is attached in this role.

    Attributes:
        adopted: Attempts that the worker continues; it served another coordinator before.
    """

    worker: WorkerKey
    role: common_pb2.Role.ValueType
    adopted: tuple[cluster_pb2.AdoptedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """The worker whose hello just came may not attach."""

    worker: WorkerKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class FenceWorker:
    """A worker is no longer part of the cluster.

    Attributes:
        error: Error that ends its stream; None: the worker leaves and ends the stream itself.
    """

    worker: WorkerKey
    error: BatonError | None


@dataclass(frozen=True, slots=True)
class ExportTrace:
    """A request has ended that is traced by its caller or by tail sampling.

    Attributes:
        traceparent: Trace context of the client; empty: none.
        kept: Why tail sampling traces the request; empty: only the caller traces it.
    """

    record: EndedRequest
    traceparent: str
    kept: str = ""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A worker process must be started. WorkerExited reports a failed start."""

    worker_id: str
    pool: Pool
    revision: Revision


@dataclass(frozen=True, slots=True)
class EndWorker:
    """A started process and its group must end. WorkerExited reports the end."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The autoscaler has made a decision. Separate effects carry it out."""

    decision: Decision


Effect = (
    SendAccepted
    | SendDeltas
    | SendFinished
    | SendFailed
    | SendCommand
    | WelcomeWorker
    | RefuseWorker
    | FenceWorker
    | ExportTrace
    | StartWorker
    | EndWorker
    | Decided
)
