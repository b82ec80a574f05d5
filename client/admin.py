"""The operators' client. It returns the contract's own messages (baton.v1.admin_pb2)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from typing import Any, Self, TypeVar

import grpc
from google.protobuf import duration_pb2

from baton.client import errors
from baton.client.call_metadata import interceptors
from baton.client.credentials import ApiKey, Tls, dial
from baton.runtime import rpc
from baton.runtime.closing import AsyncClosing
from baton.runtime.errors import RemoteError
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2

T = TypeVar("T")


# As Baton's own times: three years stand for "for ever".
_LONGEST_S = 1e8


class AdminClient(AsyncClosing):
    """State and control of a cell: `async with AdminClient("127.0.0.1:7070") as admin:`.

    Every call raises a RemoteError of client/errors.py when it fails, UnavailableError when no
    coordinator is there. One that changes something may have done so although it has failed: not
    with UnreachableError, nor where the coordinator has refused it, but where the connection broke
    (UnavailableError) or no answer came in time (DeadlineExceededError). Nothing is sent twice.

    Args:
        address: of the coordinator, host:port.
        timeout_s: of each call.
        tls: None: without.
        api_key: of an operator, where the coordinator asks for one.

    Attributes:
        may_have_acted: whether something may have been done there: a call was answered, or one that
            changes something has failed after it may have arrived.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        tls: Tls | None = None,
        api_key: ApiKey = "",
    ) -> None:
        self.address = address
        self._dial = dial(tls, api_key)
        self._interceptors = interceptors(self._dial) if api_key else []
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._num_calls = 0
        self.may_have_acted = False

    @classmethod
    def over(cls, channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> Self:
        """For one who is not entered: the channel is somebody else's, and stays open.

        Args:
            channel: adds the credential to its calls.
            address: where it leads, for errors.
            timeout_s: of each call.
        """
        client = cls(address, timeout_s=timeout_s)
        client._channel = channel
        return client

    async def __aenter__(self) -> Self:
        self._channel = rpc.channel(self.address, dial=self._dial, interceptors=self._interceptors)
        return self

    async def aclose(self) -> None:
        """Closes the connection; idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def list_pools(self) -> admin_pb2.ListPoolsResponse:
        """Pools, lanes, the model, and since when."""
        request = admin_pb2.ListPoolsRequest()
        return await self._answer(self._stub.ListPools(request, timeout=self._timeout_s))

    async def list_workers(
        self, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED
    ) -> list[admin_pb2.WorkerInfo]:
        """Workers of a role; of both by default."""
        request = admin_pb2.ListWorkersRequest(role=role)
        answer = await self._answer(self._stub.ListWorkers(request, timeout=self._timeout_s))
        return list(answer.workers)

    async def list_requests(
        self, *, include_ended: bool = False, limit: int = 0
    ) -> list[admin_pb2.RequestInfo]:
        """Requests that run, and those that ended recently when asked for; limit 0 is no limit."""
        request = admin_pb2.ListRequestsRequest(include_ended=include_ended, limit=limit)
        answer = await self._answer(self._stub.ListRequests(request, timeout=self._timeout_s))
        return list(answer.requests)

    async def get_request(self, request_id: str, *, tenant: str = "") -> admin_pb2.RequestInfo:
        """One request, running or recently ended. NotFoundError when there is none.

        InvalidArgumentError where several tenants have one of this id, and none is named.
        """
        request = admin_pb2.GetRequestRequest(request_id=request_id, tenant=tenant)
        return await self._answer(self._stub.GetRequest(request, timeout=self._timeout_s))

    async def get_status(self, *, include_history: bool = False) -> admin_pb2.GetStatusResponse:
        """How the cell does now and in the last minute; with its history when asked for."""
        request = admin_pb2.GetStatusRequest(include_history=include_history)
        return await self._answer(self._stub.GetStatus(request, timeout=self._timeout_s))

    async def cancel_request(self, request_id: str, *, tenant: str = "") -> None:
        """Cancels a request. NotFoundError when it is not running; tenants as in get_request."""
        request = admin_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)
        await self._change(self._stub.CancelRequest(request, timeout=self._timeout_s))

    # ---- Sizes. FailedPreconditionError where the coordinator starts no workers.

    async def scale_pool(
        self, role: common_pb2.Role.ValueType, workers: int
    ) -> admin_pb2.ScalePoolResponse:
        """Sets a pool's size, which holds until autoscaling is switched on (again)."""
        request = admin_pb2.ScalePoolRequest(role=role, workers=workers)
        return await self._change(self._stub.ScalePool(request, timeout=self._timeout_s))

    async def set_targets(
        self, targets: Iterable[admin_pb2.LaneTargets] = ()
    ) -> list[admin_pb2.LaneTargets]:
        """Changes what pools are sized for; fields that are absent stay. Returns all lanes'."""
        request = admin_pb2.SetTargetsRequest(targets=targets)
        call = self._stub.SetTargets(request, timeout=self._timeout_s)
        answer = await (self._change(call) if request.targets else self._answer(call))
        return list(answer.targets)

    async def set_autoscale(self, *, enabled: bool) -> bool:
        """Whether pools size themselves from now on."""
        request = admin_pb2.SetAutoscaleRequest(enabled=enabled)
        answer = await self._change(self._stub.SetAutoscale(request, timeout=self._timeout_s))
        return answer.enabled

    async def drain_worker(self, worker_id: str, drain_s: float | None = None) -> str:
        """Has a worker finish and leave. NotFoundError when there is none.

        Args:
            worker_id: attached, or being started.
            drain_s: what it may take; None: the configured time.

        Returns:
            What follows, in words.
        """
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id)
        if drain_s is not None:
            _set(request.timeout, "timeout", drain_s)
        answer = await self._change(self._stub.DrainWorker(request, timeout=self._timeout_s))
        return answer.message

    async def flip_worker(self, worker_id: str, role: common_pb2.Role.ValueType) -> str:
        """Has a worker change to the other pool. NotFoundError when there is none.

        Returns:
            What follows, in words.
        """
        request = admin_pb2.FlipWorkerRequest(worker_id=worker_id, role=role)
        answer = await self._change(self._stub.FlipWorker(request, timeout=self._timeout_s))
        return answer.message

    async def list_decisions(
        self, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED, *, limit: int = 0
    ) -> list[admin_pb2.ScalingDecision]:
        """The last decisions on a pool's size, newest first; of both, one after the other."""
        request = admin_pb2.ListDecisionsRequest(role=role, limit=limit)
        answer = await self._answer(self._stub.ListDecisions(request, timeout=self._timeout_s))
        return list(answer.decisions)

    # ---- Rollouts.

    async def start_rollout(
        self,
        revision: str,
        *,
        share: float,
        model: str = "",
        engine_args: Mapping[str, Any] | None = None,
        num_prefill: int | None = None,
        num_decode: int | None = None,
        abort_if_worse: bool = False,
    ) -> str:
        """Sends new sessions to another revision, a share of 0 to 1.

        Args:
            revision: a new name for what its workers run.
            share: of new sessions, and of requests without one.
            model: as in the configuration; empty: the stable revision's.
            engine_args: over the stable revision's.
            num_prefill: workers to start; None: those that are attached, or one.
            num_decode: likewise.
            abort_if_worse: by itself, once the verdict is that the canary is worse.

        Returns:
            What follows, in words.
        """
        request = admin_pb2.StartRolloutRequest(
            revision=revision,
            share=share,
            model=model,
            engine_args={key: json.dumps(one) for key, one in (engine_args or {}).items()},
            prefill=num_prefill,
            decode=num_decode,
            abort_if_worse=abort_if_worse,
        )
        answer = await self._change(self._stub.StartRollout(request, timeout=self._timeout_s))
        return answer.message

    async def set_rollout_share(self, share: float) -> str:
        """The canary's share from now on, 0 to 1; returns it in words."""
        request = admin_pb2.SetRolloutShareRequest(share=share)
        answer = await self._change(self._stub.SetRolloutShare(request, timeout=self._timeout_s))
        return answer.message

    async def get_rollout(self) -> admin_pb2.RolloutStatus:
        """Stable revision and canary side by side; of the last rollout where none runs."""
        request = admin_pb2.GetRolloutRequest()
        return await self._answer(self._stub.GetRollout(request, timeout=self._timeout_s))

    async def promote_rollout(self, drain_s: float | None = None) -> str:
        """The canary becomes the stable revision; returns what follows, in words.

        Args:
            drain_s: what requests of the old one may take; None: as long as any request may.
        """
        request = admin_pb2.PromoteRolloutRequest()
        if drain_s is not None:
            _set(request.drain_timeout, "drain_timeout", drain_s)
        answer = await self._change(self._stub.PromoteRollout(request, timeout=self._timeout_s))
        return answer.message

    async def abort_rollout(self, drain_s: float | None = None) -> str:
        """The canary gets nothing new and leaves; returns what follows, in words.

        Args:
            drain_s: what its requests may take; None: as long as any request may.
        """
        request = admin_pb2.AbortRolloutRequest()
        if drain_s is not None:
            _set(request.drain_timeout, "drain_timeout", drain_s)
        answer = await self._change(self._stub.AbortRollout(request, timeout=self._timeout_s))
        return answer.message

    async def watch(
        self, min_interval_s: float = 1.0
    ) -> AsyncGenerator[admin_pb2.WatchEvent, None]:
        """Pools, workers and the rollout, again whenever they change; without end."""
        request = admin_pb2.WatchRequest()
        _set(request.min_interval, "min_interval", min_interval_s)
        call = self._stub.Watch(request)
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.address) from None
        finally:
            call.cancel()

    async def profile(
        self, worker_id: str, seconds: float | None = None
    ) -> AsyncGenerator[admin_pb2.ProfileEvent, None]:
        """Records what a worker's engine computes, and gives its traces; see Admin.Profile.

        Leaving ends the recording. NotFoundError, FailedPreconditionError (it is being profiled
        already, or cannot be), ResourceExhaustedError (too large), UnavailableError (it was lost).

        Args:
            worker_id: attached.
            seconds: 1 to 60; None: 5.
        """
        request = admin_pb2.ProfileRequest(worker_id=worker_id)
        if seconds is not None:
            _set(request.duration, "duration", seconds)
        call = self._stub.Profile(request)
        try:
            async for event in call:
                self.may_have_acted = True
                yield event
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error, self.address) from None
        finally:
            call.cancel()

    @property
    def _stub(self) -> admin_pb2_grpc.AdminAsyncStub:
        """For one call, which is counted."""
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with AdminClient(...)`")
        self._num_calls += 1
        return admin_pb2_grpc.AdminStub(self._channel)

    async def _answer(self, call: Awaitable[T]) -> T:
        """Of the call that has just begun."""
        num_calls = self._num_calls
        try:
            answer = await call
        except grpc.RpcError as error:
            alone = num_calls == self._num_calls
            raise errors.of_call(
                error, self.address, self._channel, self._timeout_s, alone=alone
            ) from None
        self.may_have_acted = True
        return answer

    async def _change(self, call: Awaitable[T]) -> T:
        """The same of a call that changes something."""
        try:
            return await self._answer(call)
        except RemoteError as error:
            found = errors.of_change(error)
            self.may_have_acted |= found is not error
            raise found from None


def _set(into: duration_pb2.Duration, field: str, seconds: float) -> None:
    """Raises InvalidArgumentError for what no duration is; the rest is the coordinator's to say."""
    if not abs(seconds) <= _LONGEST_S:
        raise errors.invalid(field, f"{seconds:g} s", f"must be at most {_LONGEST_S:g} s")
    into.FromMicroseconds(round(seconds * 1e6))
