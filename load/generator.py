"""Sends requests to a cluster through one client session and measures the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.client import BatonClient, Finished, Prompt, Tokens, errors
from baton.client.request import LaneName
from baton.client.stream import TokenStream
from baton.load.measured import Measured, Sample, Slo
from baton.load.plan import Planned
from baton.load.prompts import Prompts
from baton.runtime.errors import RemoteError

# Closed loop: a caller waits before the next request after a failure. The wait is the server's
# retry_after_s, or _PAUSE_S if the server sent none, and never longer than _MAX_PAUSE_S.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0


@dataclass(slots=True)
class Outcome:
    """The measurements of a complete or interrupted run.

    Attributes:
        lanes: Measurements by lane; lanes without a request are left out.
        lasted_s: Seconds from the end of the warm-up to the end of the last counted request.
        interrupted: Whether the run was stopped before all requests were sent and answered.
    """

    lanes: dict[LaneName, Measured] = field(default_factory=dict)
    lasted_s: float = 0.0
    interrupted: bool = False


class Generator:
    """Sends one load through one client. A generator runs once.

    Args:
        client: An open client. Its `max_requests` must be at least the number of requests that
            this generator keeps in flight.
        prompts: Makes each prompt shortly before the prompt is sent.
        slo: Latency targets that define goodput.
        timeout_s: Timeout of one request.
        warm_up_s: Requests due within this time are sent but not counted.
        tenant: Tenant that the requests are accounted to; empty for the default tenant.
    """

    def __init__(
        self,
        client: BatonClient,
        prompts: Prompts,
        slo: Slo,
        *,
        timeout_s: float,
        warm_up_s: float = 0.0,
        tenant: str = "",
    ) -> None:
        self._client, self._prompts, self._slo = client, prompts, slo
        self._timeout_s, self._warm_up_s, self._tenant = timeout_s, warm_up_s, tenant
        self._lanes: dict[LaneName, Measured] = {}
        self._warm_up = Measured(slo)
        self._num_in_flight = 0
        self._began_at = self._ended_at = 0.0

    @property
    def progress(self) -> str:
        """One line for the terminal about the running load."""
        seen = Measured.merged(self._lanes.values(), self._slo)
        num_failed = sum(seen.sheds.values()) + sum(seen.failures.values())
        return (
            f"{time.perf_counter() - self._began_at:.0f} s: {seen.num_ended} ended, "
            f"{num_failed} failed, {self._num_in_flight} in flight"
        )

    async def open_loop(
        self, plan: Iterable[Planned], max_in_flight: int, stop: asyncio.Event
    ) -> Outcome:
        """Sends every request at its planned time, however many requests are still in flight.

        Args:
            plan: Requests in order of time.
            max_in_flight: A request that is due while this many are in flight is not sent and
                counts as failed.
            stop: Ends the run early and cancels the requests in flight.
        """
        return await self._run(self._open_loop(plan, max_in_flight), stop)

    async def closed_loop(
        self, plan: Iterable[Planned], concurrency: int, lasts_s: float, stop: asyncio.Event
    ) -> Outcome:
        """Keeps `concurrency` requests in flight: a new request follows each one that ended.

        Args:
            plan: Requests; their planned times are ignored.
            concurrency: Requests in flight, at least 1.
            lasts_s: No request is sent after this many seconds.
            stop: Ends the run early and cancels the requests in flight.
        """
        return await self._run(self._closed_loop(iter(plan), concurrency, lasts_s), stop)

    async def _run(self, load: Coroutine[Any, Any, None], stop: asyncio.Event) -> Outcome:
        self._began_at = self._ended_at = time.perf_counter()
        work = asyncio.create_task(load, name="load")
        stopping = asyncio.create_task(stop.wait(), name="load's stop")
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            interrupted = not work.done()
        finally:
            for task in (work, stopping):
                task.cancel()
            await asyncio.wait({work, stopping})
        if not work.cancelled():
            work.result()
        lasted_s = max(0.0, self._ended_at - self._began_at - self._warm_up_s)
        return Outcome(self._lanes, lasted_s, interrupted)

    async def _open_loop(self, plan: Iterable[Planned], max_in_flight: int) -> None:
        async with asyncio.TaskGroup() as group:
            for one in plan:
                # The prompt is built before the request is due, so building it causes no delay.
                prompt, due_at = self._prompts.of(one), self._began_at + one.at_s
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                measured = self._measured_for(one, due_at)
                if self._num_in_flight >= max_in_flight:
                    measured.not_sent(max_in_flight)
                    continue
                sample = Sample(due_at, time.perf_counter())
                self._num_in_flight += 1
                group.create_task(self._send(one, prompt, sample, measured))

    async def _closed_loop(self, plan: Iterator[Planned], concurrency: int, lasts_s: float) -> None:
        async def caller() -> None:
            for one in plan:
                now = time.perf_counter()
                if now - self._began_at >= lasts_s:
                    return
                prompt, sample = self._prompts.of(one), Sample(now, now)
                self._num_in_flight += 1
                error = await self._send(one, prompt, sample, self._measured_for(one, now))
                if error is not None:
                    # Without a pause, a caller that is refused at once would retry in a busy loop.
                    pause_s = _PAUSE_S if error.retry_after_s is None else error.retry_after_s
                    await asyncio.sleep(min(_MAX_PAUSE_S, pause_s))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())

    def _measured_for(self, one: Planned, due_at: float) -> Measured:
        """Returns the counters of the request's lane, or the warm-up's, which are not reported."""
        if due_at - self._began_at < self._warm_up_s:
            return self._warm_up
        return self._lanes.setdefault(one.lane, Measured(self._slo))

    async def _send(
        self, one: Planned, prompt: Prompt, sample: Sample, measured: Measured
    ) -> RemoteError | None:
        """Sends one request and reads its stream to the end; returns the error if it failed."""
        measured.sent(sample)
        settled = False
        try:
            async with self._client.generate(
                prompt,
                max_tokens=one.num_output_tokens,
                ignore_eos=True,
                temperature=0,
                lane=one.lane,
                tenant=self._tenant,
                timeout_s=self._timeout_s,
            ) as stream:
                settled = await _read(stream, sample, measured)
                measured.num_resumed += stream.num_resumes
        except RemoteError as error:
            measured.failed(error)
            settled = True
            return error
        finally:
            self._num_in_flight -= 1
            if not settled:
                measured.num_unfinished += 1
            if measured is not self._warm_up:
                self._ended_at = time.perf_counter()
        return None


async def _read(stream: TokenStream, sample: Sample, measured: Measured) -> bool:
    """Measures the tokens of a request until its end; returns False if the end is missing.

    Raises:
        RemoteError: The request failed.
    """
    async for event in stream:
        if isinstance(event, Tokens) and event.token_ids:
            measured.tokens(sample, len(event.token_ids), time.perf_counter())
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise errors.cancelled_elsewhere()
            measured.finished(sample, event.usage)
            return True
    return False
