"""Sends a load to a cluster through one session of the client, and measures what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.client import BatonClient, Finished, Prompt, Tokens, errors
from baton.client.request import LaneName
from baton.load.measured import Measured, Sample, Slo
from baton.load.plan import Planned
from baton.load.prompts import Prompts
from baton.runtime.errors import RemoteError

# How long a caller of a closed loop waits after a failure when it was not told, and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


@dataclass(slots=True)
class Outcome:
    """A run, over or interrupted.

    Attributes:
        lanes: by name, those that had a request.
        lasted_s: until the last counted request ended.
        interrupted: before all of it was sent and answered.
    """

    lanes: dict[LaneName, Measured] = field(default_factory=dict)
    lasted_s: float = 0.0
    interrupted: bool = False


class Generator:
    """One load on one client.

    Args:
        client: open; its `max_requests` must be at least what is in flight here.
        prompts: made as they are sent.
        slo: of goodput.
        timeout_s: of one request.
        warm_up_s: requests due before that are sent and not counted.
        tenant: who to account to; empty: the default.
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
        self._uncounted = Measured(slo)
        self._num_in_flight = 0
        self._began_at = self._ended_at = 0.0

    @property
    def progress(self) -> str:
        """In words, while a load runs."""
        seen = Measured.of_all(self._lanes.values(), self._slo)
        num_failed = sum(seen.sheds.values()) + sum(seen.failures.values())
        return (
            f"{time.perf_counter() - self._began_at:.0f} s: {seen.num_ended} ended, "
            f"{num_failed} failed, {self._num_in_flight} in flight"
        )

    async def open_loop(
        self, plan: Iterable[Planned], max_in_flight: int, stop: asyncio.Event
    ) -> Outcome:
        """Sends every request when it is due, whatever is still running.

        Args:
            plan: in order of time.
            max_in_flight: a request that is due beyond them is not sent, and counts as failed.
            stop: ends the run early: what is in flight is cancelled.
        """
        return await self._run(self._open_loop(plan, max_in_flight), stop)

    async def closed_loop(
        self, plan: Iterable[Planned], concurrency: int, lasts_s: float, stop: asyncio.Event
    ) -> Outcome:
        """Keeps so many requests running: the next is sent when one has ended.

        Args:
            plan: their times do not matter.
            concurrency: at least 1.
            lasts_s: nothing is sent after that.
            stop: ends the run early: what is in flight is cancelled.
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
                # Made before it is due, so that it is late by nothing but the loop.
                prompt, due_at = self._prompts.of(one), self._began_at + one.at_s
                await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
                measured = self._measured(one, due_at)
                if self._num_in_flight >= max_in_flight:
                    measured.not_sent(max_in_flight)
                    continue
                sample = Sample(due_at, time.perf_counter())
                self._num_in_flight += 1
                group.create_task(self._ask(one, prompt, sample, measured))

    async def _closed_loop(self, plan: Iterator[Planned], concurrency: int, lasts_s: float) -> None:
        async def caller() -> None:
            for one in plan:
                now = time.perf_counter()
                if now - self._began_at >= lasts_s:
                    return
                prompt, sample = self._prompts.of(one), Sample(now, now)
                self._num_in_flight += 1
                error = await self._ask(one, prompt, sample, self._measured(one, now))
                if error is not None:
                    # Whoever is refused at once would do nothing but ask.
                    told_s = error.retry_after_s
                    await asyncio.sleep(
                        min(_LONGEST_PAUSE_S, _PAUSE_S if told_s is None else told_s)
                    )

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())

    def _measured(self, one: Planned, due_at: float) -> Measured:
        """Where a request is counted; what warms up, nowhere."""
        if due_at - self._began_at < self._warm_up_s:
            return self._uncounted
        return self._lanes.setdefault(one.lane, Measured(self._slo))

    async def _ask(
        self, one: Planned, prompt: Prompt, sample: Sample, measured: Measured
    ) -> RemoteError | None:
        """One request to its end; why it failed, if it did."""
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
                async for event in stream:
                    if isinstance(event, Tokens) and event.token_ids:
                        measured.tokens(sample, len(event.token_ids), time.perf_counter())
                    elif isinstance(event, Finished):
                        if event.reason == "cancelled":
                            raise errors.cancelled_elsewhere()
                        measured.finished(sample, event.usage)
                        settled = True
                measured.num_resumed += stream.num_resumes
        except RemoteError as error:
            measured.failed(error)
            settled = True
            return error
        finally:
            self._num_in_flight -= 1
            if not settled:
                measured.num_unfinished += 1
            if measured is not self._uncounted:
                self._ended_at = time.perf_counter()
        return None
