"""What goes into the core and what comes out of it.

Protobuf messages inside are payloads that cross the process untouched, or what a worker said.
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
    """The client cancels one of its requests; unknown ones are ignored."""

    to: StreamKey


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """An operator cancels a request; unknown ones are ignored."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The shell cannot go on with one stream (a reader that is too slow)."""

    to: StreamKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The client is gone: its requests are cancelled and nobody is told."""

    session: int


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker's stream began. Answered with WelcomeWorker or RefuseWorker.

    Attributes:
        returns: it heard another coordinator's welcome last.
    """

    hello: cluster_pb2.Hello
    returns: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A worker gave a sign of life and nothing else."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    worker: WorkerKey
    load: cluster_pb2.LoadReport


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """Everything one engine step of a worker produced."""

    worker: WorkerKey
    step: cluster_pb2.StepOutputs


@dataclass(frozen=True, slots=True)
class WorkerHandoff:
    worker: WorkerKey
    report: cluster_pb2.HandoffReport


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """What changed in a worker's prefix cache."""

    worker: WorkerKey
    changes: cluster_pb2.CacheEvents


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    worker: WorkerKey
    change: cluster_pb2.WorkerStateChanged


@dataclass(frozen=True, slots=True)
class WorkerDetached:
    """A worker's stream ended; it may come back."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The shell knows that a worker will not come back, or must not.

    Attributes:
        reason: in words, continuing "worker w1 ...".
    """

    worker_id: str
    reason: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """A worker is to take nothing new and leave; unknown ones are ignored.

    Attributes:
        reason: in words.
    """

    worker_id: str
    timeout_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class FlipAsked:
    """A worker is to serve the other pool; `Core.flip_error` says why it cannot."""

    worker_id: str
    role: common_pb2.Role.ValueType


@dataclass(frozen=True, slots=True)
class LauncherReady:
    """Workers can be started from now on.

    Attributes:
        sizes: of the pools, to begin with.
    """

    sizes: Mapping[Pool, int]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A process that was started here has ended, or never began; unknown ones are ignored.

    Attributes:
        reason: in words, continuing "worker w1 ...".
        loading_failure: the same of one that had not attached, where more is known of it.
        gone: what EndWorker asked for is done: its whole group has ended, and holds no GPU.
    """

    worker_id: str
    reason: str
    loading_failure: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """A process that is to be started cannot be yet; unknown ones are ignored.

    Attributes:
        reason: in words, continuing "worker w1 ..."; empty: it waits no longer.
    """

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """An operator sets a pool's size; `Scaler.scale_error` says why it cannot be so."""

    pool: Pool
    num_workers: int


@dataclass(frozen=True, slots=True)
class AutoscaleAsked:
    """Pools size themselves from now on, or keep their sizes."""

    enabled: bool


@dataclass(frozen=True, slots=True)
class TargetsAsked:
    """What pools are sized for from now on, by lane; other lanes keep theirs."""

    targets: Mapping[str, Targets]


@dataclass(frozen=True, slots=True)
class RolloutAsked:
    """Another revision is to get a share of the traffic; `Rollouts.start_error` says why not.

    Attributes:
        share: of new sessions, 0 to 1.
        sizes: workers to start; a pool that is left out has those that are attached, or one.
        abort_if_worse: than the stable one, by the verdict on both.
    """

    revision: Revision
    share: float
    sizes: Mapping[Pool, int]
    abort_if_worse: bool = False


@dataclass(frozen=True, slots=True)
class ShareAsked:
    """The share of a rollout that runs."""

    share: float


@dataclass(frozen=True, slots=True)
class PromotionAsked:
    """The canary is to become the stable revision; `Rollouts.promote_error` says why not.

    Attributes:
        drain_s: what requests of the old one may take then; None: as long as any may.
    """

    drain_s: float | None = None


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """The canary is to get nothing new, and to leave.

    Attributes:
        why: in words.
        drain_s: what its requests may take; None: as long as any may.
    """

    why: str
    drain_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdmissionClosed:
    """The process is about to stop: no new requests, those admitted go on.

    Attributes:
        restarts: another coordinator follows; clients are told to come back.
    """

    restarts: bool = False


@dataclass(frozen=True, slots=True)
class EverythingEnds:
    """The process stops now: whatever has not ended fails.

    Attributes:
        reason: in words.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """`Core.next_deadline` has come."""


Event = (
    Submitted
    | StreamCancelled
    | RequestCancelled
    | StreamFailed
    | SessionLost
    | WorkerAttached
    | WorkerHeard
    | WorkerLoad
    | WorkerStep
    | WorkerHandoff
    | WorkerCache
    | WorkerChanged
    | WorkerDetached
    | WorkerLost
    | DrainAsked
    | FlipAsked
    | LauncherReady
    | WorkerExited
    | WorkerWaits
    | ScaleAsked
    | AutoscaleAsked
    | TargetsAsked
    | RolloutAsked
    | ShareAsked
    | PromotionAsked
    | AbortAsked
    | AdmissionClosed
    | EverythingEnds
    | Tick
)

# ---- Effects


@dataclass(frozen=True, slots=True)
class SendAccepted:
    to: StreamKey
    request_id: str
    num_prompt_tokens: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class SendDeltas:
    """All tokens that one event brought, each an encoded TokenDelta."""

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
)


@dataclass(frozen=True, slots=True)
class SendCommand:
    worker: WorkerKey
    command: Command


@dataclass(frozen=True, slots=True)
class WelcomeWorker:
    """The worker is attached in this role.

    Attributes:
        adopted: what it goes on with, of a worker that comes from another coordinator.
    """

    worker: WorkerKey
    role: common_pb2.Role.ValueType
    adopted: tuple[cluster_pb2.AdoptedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """The worker that just said hello is not let in."""

    worker: WorkerKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class FenceWorker:
    """A worker is no longer part of the cluster.

    Attributes:
        error: what ends its stream; None when the worker said that it leaves, and ends it itself.
    """

    worker: WorkerKey
    error: BatonError | None


@dataclass(frozen=True, slots=True)
class TellTrace:
    """A request has ended that its caller traces, or that is worth a trace.

    Attributes:
        traceparent: that the client sent; empty: none.
        kept: why it is traced whatever the caller wants; empty: it is not.
    """

    record: EndedRequest
    traceparent: str
    kept: str = ""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A process is to be started; answered with WorkerExited when it cannot be."""

    worker_id: str
    pool: Pool
    revision: Revision


@dataclass(frozen=True, slots=True)
class EndWorker:
    """Nothing of a started process is to be left; answered with WorkerExited."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The sizes of the pools were decided on; what follows from it are other effects."""

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
    | TellTrace
    | StartWorker
    | EndWorker
    | Decided
)
