"""The client for operators. It returns the protobuf messages of baton.v1.admin_pb2."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from typing import Any, Self, TypeVar

import grpc
from google.protobuf import duration_pb2

from baton.client import errors
from baton.client.call_metadata import interceptors
from baton.client.credentials import ApiKey, Tls, dial
from baton.runtime.closing import AsyncClosing
from baton.runtime.errors import RemoteError
from baton.runtime.kv.cache_drops import DROP_TIMEOUT_S
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2

T = TypeVar("T")


# Longest duration that Baton accepts: three years, which stand for "no limit".
_LONGEST_S = 1e8


class AdminClient(AsyncClosing):
    """State and control of a cell: `async with AdminClient("127.0.0.1:7070") as admin:`.

    A failed call raises a RemoteError of client/errors.py, for example UnavailableError when the
    coordinator cannot be reached. The client never sends a call twice.

    A failed call may still have changed something at the coordinator if the connection broke
    (UnavailableError) or no response arrived in time (DeadlineExceededError). It has changed
    nothing if the error is UnreachableError or the coordinator refused the call.

    Args:
        address: Address of the coordinator, host:port.
        timeout_s: Timeout of each call in seconds.
        tls: TLS files; None: no TLS.
        api_key: API key of an operator, if the coordinator requires one.
        use_http_proxy: Whether to connect through the proxy of `https_proxy` and `http_proxy`.

    Attributes:
        may_have_acted: Whether a call may have had an effect: the coordinator responded, or a
            changing call failed after it may have arrived.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        tls: Tls | None = None,
        api_key: ApiKey = "",
        use_http_proxy: bool = False,
    ) -> None:
        self.address = address
        self._dial = dial(tls, api_key, use_http_proxy=use_http_proxy)
        self._interceptors = interceptors(self._dial) if api_key else []
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None
        self._num_calls = 0
        self.may_have_acted = False

    @classmethod
    def from_channel(cls, channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> Self:
        """Returns a client that uses a given channel, which the caller owns and closes.

        Args:
            channel: Open channel, which adds the credential to its calls.
            address: Address of the coordinator, for error messages.
            timeout_s: Timeout of each call in seconds.
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
        """Returns the pools, the lanes, the model and the uptime."""
        request = admin_pb2.ListPoolsRequest()
        return await self._answer(self._stub.ListPools(request, timeout=self._timeout_s))

    async def list_workers(
        self, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED
    ) -> list[admin_pb2.WorkerInfo]:
        """Returns the workers of a role; by default of both roles."""
        request = admin_pb2.ListWorkersRequest(role=role)
        answer = await self._answer(self._stub.ListWorkers(request, timeout=self._timeout_s))
        return list(answer.workers)

    async def list_requests(
        self, *, include_ended: bool = False, limit: int = 0
    ) -> list[admin_pb2.RequestInfo]:
        """Returns running requests, optionally with recently ended requests. Limit 0: no limit."""
        request = admin_pb2.ListRequestsRequest(include_ended=include_ended, limit=limit)
        answer = await self._answer(self._stub.ListRequests(request, timeout=self._timeout_s))
        return list(answer.requests)

    async def get_request(self, request_id: str, *, tenant: str = "") -> admin_pb2.RequestInfo:
        """Returns one request that runs or ended recently.

        Raises:
            NotFoundError: There is no such request.
            InvalidArgumentError: Several tenants have a request with this ID, and no tenant is
                given.
        """
        request = admin_pb2.GetRequestRequest(request_id=request_id, tenant=tenant)
        return await self._answer(self._stub.GetRequest(request, timeout=self._timeout_s))

    async def get_status(self, *, include_history: bool = False) -> admin_pb2.GetStatusResponse:
        """Returns the cell's status now and over the last minute, optionally with its history."""
        request = admin_pb2.GetStatusRequest(include_history=include_history)
        return await self._answer(self._stub.GetStatus(request, timeout=self._timeout_s))

    async def cancel_request(self, request_id: str, *, tenant: str = "") -> None:
        """Cancels a request. Raises NotFoundError if it does not run; tenants as in get_request."""
        request = admin_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)
        await self._change(self._stub.CancelRequest(request, timeout=self._timeout_s))

    # ---- Scaling. FailedPreconditionError: the coordinator does not start workers.

    async def scale_pool(
        self, role: common_pb2.Role.ValueType, workers: int
    ) -> admin_pb2.ScalePoolResponse:
        """Sets a pool's size, which holds until autoscaling is switched on (again)."""
        request = admin_pb2.ScalePoolRequest(role=role, workers=workers)
        return await self._change(self._stub.ScalePool(request, timeout=self._timeout_s))

    async def set_targets(
        self, targets: Iterable[admin_pb2.LaneTargets] = ()
    ) -> list[admin_pb2.LaneTargets]:
        """Changes latency targets of lanes; absent fields keep their value. Returns all targets."""
        request = admin_pb2.SetTargetsRequest(targets=targets)
        call = self._stub.SetTargets(request, timeout=self._timeout_s)
        answer = await (self._change(call) if request.targets else self._answer(call))
        return list(answer.targets)

    async def set_autoscale(self, *, enabled: bool) -> bool:
        """Switches autoscaling on or off; returns the new state."""
        request = admin_pb2.SetAutoscaleRequest(enabled=enabled)
        answer = await self._change(self._stub.SetAutoscale(request, timeout=self._timeout_s))
        return answer.enabled

    async def drain_worker(self, worker_id: str, drain_s: float | None = None) -> str:
        """Drains a worker: the worker finishes its requests and stops.

        Args:
            worker_id: ID of a worker that is attached or starting.
            drain_s: Drain timeout in seconds; None: the configured timeout.

        Returns:
            A message that says what happens next.

        Raises:
            NotFoundError: There is no such worker.
        """
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id)
        if drain_s is not None:
            _set(request.timeout, "timeout", drain_s)
        answer = await self._change(self._stub.DrainWorker(request, timeout=self._timeout_s))
        return answer.message

    async def flip_worker(self, worker_id: str, role: common_pb2.Role.ValueType) -> str:
        """Moves a worker to the other pool. Raises NotFoundError if there is no such worker.

        Returns:
            A message that says what happens next.
        """
        request = admin_pb2.FlipWorkerRequest(worker_id=worker_id, role=role)
        answer = await self._change(self._stub.FlipWorker(request, timeout=self._timeout_s))
        return answer.message

    async def drop_cache(
        self, tenant: str | None = None, *, session_id: str = ""
    ) -> admin_pb2.DropCacheResponse:
        """Deletes KV blocks from every tier of every worker, and waits for the end.

        Args:
            tenant: Delete only blocks of this tenant; None: all blocks, or those of the session.
            session_id: Delete only blocks of this session that no other session has.

        Returns:
            The numbers of deleted blocks by worker. A worker with an `error` may have blocks left.

        Raises:
            FailedPreconditionError: Tenants share KV blocks, so that blocks belong to no tenant.
            NotFoundError: The coordinator knows no blocks of the session.
            InvalidArgumentError: Several tenants have a session of this ID, and none is named.
        """
        request = admin_pb2.DropCacheRequest(
            tenant=tenant or "", all=tenant is None and not session_id, session_id=session_id
        )
        timeout_s = DROP_TIMEOUT_S + self._timeout_s
        return await self._change(self._stub.DropCache(request, timeout=timeout_s))

    async def list_decisions(
        self, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED, *, limit: int = 0
    ) -> list[admin_pb2.ScalingDecision]:
        """Returns the latest scaling decisions of a pool, newest first; by default of each pool."""
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
        """Starts a rollout: sends a share of new sessions to a canary revision.

        Args:
            revision: Name of the canary revision.
            share: Share of new sessions, and of requests without a session, from 0 to 1.
            model: Model of the canary; empty: the model of the stable revision.
            engine_args: Engine arguments that override those of the stable revision.
            num_prefill: Number of prefill workers, attached ones included; None: the attached ones,
                or one.
            num_decode: Number of decode workers, counted as for num_prefill.
            abort_if_worse: Abort automatically when the canary is judged to be worse.

        Returns:
            A message that says what happens next.
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
        """Sets the canary's share of new sessions, from 0 to 1; returns a message."""
        request = admin_pb2.SetRolloutShareRequest(share=share)
        answer = await self._change(self._stub.SetRolloutShare(request, timeout=self._timeout_s))
        return answer.message

    async def get_rollout(self) -> admin_pb2.RolloutStatus:
        """Returns the stable revision and the canary of the current rollout, or of the last one."""
        request = admin_pb2.GetRolloutRequest()
        return await self._answer(self._stub.GetRollout(request, timeout=self._timeout_s))

    async def promote_rollout(self, drain_s: float | None = None) -> str:
        """Makes the canary the stable revision; returns a message that says what happens next.

        Args:
            drain_s: Drain timeout of the old revision's requests in seconds; None: the longest
                time that any request may take.
        """
        request = admin_pb2.PromoteRolloutRequest()
        if drain_s is not None:
            _set(request.drain_timeout, "drain_timeout", drain_s)
        answer = await self._change(self._stub.PromoteRollout(request, timeout=self._timeout_s))
        return answer.message

    async def abort_rollout(self, drain_s: float | None = None) -> str:
        """Stops the canary: it gets no new requests; returns a message that says what happens next.

        Args:
            drain_s: Drain timeout of the canary's requests in seconds; None: the longest time
                that any request may take.
        """
        request = admin_pb2.AbortRolloutRequest()
        if drain_s is not None:
            _set(request.drain_timeout, "drain_timeout", drain_s)
        answer = await self._change(self._stub.AbortRollout(request, timeout=self._timeout_s))
        return answer.message

    async def watch(
        self, min_interval_s: float = 1.0
    ) -> AsyncGenerator[admin_pb2.WatchEvent, None]:
        """Yields the pools, the workers and the rollout whenever they change, without end."""
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
        """Records a profile of a worker's engine and yields the trace files; see Admin.Profile.

        Closing the generator ends the recording.

        Args:
            worker_id: ID of an attached worker.
            seconds: Length of the recording, 1 to 60; None: 5.

        Raises:
            NotFoundError: There is no such worker.
            FailedPreconditionError: The worker is already being profiled, or cannot be profiled.
            ResourceExhaustedError: The traces are too large.
            UnavailableError: The worker was lost.
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
        """Returns the stub for one call, and counts the call."""
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with AdminClient(...)`")
        self._num_calls += 1
        return admin_pb2_grpc.AdminStub(self._channel)

    async def _answer(self, call: Awaitable[T]) -> T:
        """Awaits the response of the call that was just started."""
        num_calls = self._num_calls
        try:
            answer = await call
        except grpc.RpcError as error:
            alone = num_calls == self._num_calls
            raise errors.from_call(
                error, self.address, self._channel, self._timeout_s, alone=alone
            ) from None
        self.may_have_acted = True
        return answer

    async def _change(self, call: Awaitable[T]) -> T:
        """Awaits the response of a call that changes something at the coordinator."""
        try:
            return await self._answer(call)
        except RemoteError as error:
            converted = errors.from_change(error)
            self.may_have_acted |= converted is not error
            raise converted from None


def _set(into: duration_pb2.Duration, field: str, seconds: float) -> None:
    """Sets a duration. Raises InvalidArgumentError if it is longer than _LONGEST_S."""
    if not abs(seconds) <= _LONGEST_S:
        raise errors.invalid(field, f"{seconds:g} s", f"must be at most {_LONGEST_S:g} s")
    into.FromMicroseconds(round(seconds * 1e6))
