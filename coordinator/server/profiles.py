"""Profiles of workers: sends operators' requests to workers and returns the recorded traces."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from baton.coordinator.state.requests import WorkerKey
from baton.runtime.durations import to_seconds
from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
    from_message,
)
from baton.runtime.profiling import (
    DEFAULT_PROFILE_S,
    LEAST_PROFILE_S,
    MAX_TRACE_BYTES,
    MOST_PROFILE_S,
    WINDOW_BYTES,
)
from baton.v1 import admin_pb2, cluster_pb2

# Timeouts: a worker starts recording only after its running step; writing the traces takes longer
# than recording them.
START_TIMEOUT_S, WRITE_TIMEOUT_S, NEXT_TIMEOUT_S = 60.0, 300.0, 60.0
# Maximum number of reports that wait for the caller.
_MAX_REPORTS = 1024


@dataclass(slots=True)
class Profile:
    """A profile that an operator has requested.

    Attributes:
        id: random ID of the profile.
        worker: worker that is recorded.
        seconds: duration of the recording.
        reports: reports that wait for the caller; bounded by the bytes that the worker may send.
        num_taken_bytes: bytes of traces that the caller has taken.
        num_allowed_bytes: bytes of traces that the worker may send (flow control).
        num_received_bytes: bytes of traces received from the worker.
    """

    id: int
    worker: WorkerKey
    seconds: float
    reports: asyncio.Queue[cluster_pb2.ProfileReport | BatonError] = field(
        default_factory=asyncio.Queue
    )
    num_taken_bytes: int = 0
    num_allowed_bytes: int = 0
    num_received_bytes: int = 0


class Profiles:
    """Running profiles, at most one per worker. Not thread-safe.

    Args:
        send: Function that sends a command to a worker.
    """

    def __init__(self, send: Callable[[WorkerKey, cluster_pb2.ProfileCommand], None]) -> None:
        self._send = send
        self._running: dict[WorkerKey, Profile] = {}

    def begin(self, worker: WorkerKey, seconds: float) -> Profile:
        """Starts recording a worker; the caller must always call `end`.

        Args:
            worker: an attached worker.
            seconds: duration of the recording.

        Raises:
            FailedPrecondition: The worker is being profiled already.
        """
        if worker in self._running:
            raise FailedPrecondition(f"worker {worker[0]} is being profiled already")
        profile = self._running[worker] = Profile(secrets.randbits(63) | 1, worker, seconds)
        command = cluster_pb2.ProfileCommand(profile_id=profile.id)
        command.record.FromMicroseconds(round(seconds * 1e6))
        self._send(worker, command)
        return profile

    async def events(self, profile: Profile) -> AsyncGenerator[admin_pb2.ProfileEvent, None]:
        """Yields the worker's reports until the profile is complete.

        Raises:
            BatonError: The profile failed; the errors are specified in admin.proto.
        """
        limit_s, doing = START_TIMEOUT_S, "begun to record"
        while True:
            report = await _next(profile, limit_s, doing)
            kind = report.WhichOneof("report")
            if kind == "done":
                return
            limit_s, doing = NEXT_TIMEOUT_S, "sent more of its traces"
            if kind == "started":
                limit_s, doing = profile.seconds + WRITE_TIMEOUT_S, "written its traces"
                self._allow(profile)
                yield admin_pb2.ProfileEvent(started=report.started)
            elif kind == "file":
                yield admin_pb2.ProfileEvent(file=report.file)
            elif kind == "data":
                yield admin_pb2.ProfileEvent(data=report.data)
                profile.num_taken_bytes += len(report.data)
                self._allow(profile)

    def end(self, profile: Profile) -> None:
        """Cancels a profile if it still runs, and drops its reports; idempotent."""
        self._cancel(profile)
        while not profile.reports.empty():
            profile.reports.get_nowait()

    def on_report(self, worker: WorkerKey, report: cluster_pb2.ProfileReport) -> None:
        """Handles a worker's report; ignores reports of profiles that have ended."""
        profile = self._running.get(worker)
        if profile is None or profile.id != report.profile_id:
            return
        kind = report.WhichOneof("report")
        profile.num_received_bytes += len(report.data)
        most = min(profile.num_allowed_bytes, MAX_TRACE_BYTES)
        if profile.num_received_bytes > most or profile.reports.qsize() >= _MAX_REPORTS:
            self._cancel(profile)
            profile.reports.put_nowait(
                Internal(f"worker {worker[0]} sends more trace bytes than it may")
            )
            return
        if kind in ("done", "failed"):
            self._mark_ended(profile)
        if kind == "failed":
            profile.reports.put_nowait(from_message(report.failed))
        elif kind is not None:
            profile.reports.put_nowait(report)

    def lost(self, worker: WorkerKey, why: str) -> None:
        """Fails the profile of a lost worker."""
        profile = self._running.pop(worker, None)
        if profile is not None:
            what = f"worker {worker[0]} was lost while it was profiled: {why}"
            profile.reports.put_nowait(Unavailable(what))

    def _mark_ended(self, profile: Profile) -> bool:
        """Marks a profile as ended; returns whether it was still running."""
        if self._running.get(profile.worker) is not profile:
            return False
        del self._running[profile.worker]
        return True

    def _cancel(self, profile: Profile) -> None:
        """Cancels the profile on the worker if it is still running."""
        if self._mark_ended(profile):
            command = cluster_pb2.ProfileCommand(profile_id=profile.id, cancel=True)
            self._send(profile.worker, command)

    def _allow(self, profile: Profile) -> None:
        """Allows the worker to send more, in steps of at least half a window."""
        allowed = profile.num_taken_bytes + WINDOW_BYTES
        if allowed - profile.num_allowed_bytes < WINDOW_BYTES // 2:
            return
        if self._running.get(profile.worker) is not profile:
            return
        profile.num_allowed_bytes = allowed
        command = cluster_pb2.ProfileCommand(profile_id=profile.id, allowed_bytes=allowed)
        self._send(profile.worker, command)


def seconds_of(request: admin_pb2.ProfileRequest) -> float:
    """Seconds to record. Raises InvalidArgument."""
    if not request.HasField("duration"):
        return DEFAULT_PROFILE_S
    seconds = to_seconds(request.duration)
    if not LEAST_PROFILE_S <= seconds <= MOST_PROFILE_S:
        allowed = f"{LEAST_PROFILE_S:g} to {MOST_PROFILE_S:g} s"
        raise InvalidArgument("duration", f"{seconds:g} s", allowed)
    return seconds


async def _next(profile: Profile, limit_s: float, doing: str) -> cluster_pb2.ProfileReport:
    """Waits for the next report; raises the error that ended the profile."""
    try:
        async with asyncio.timeout(limit_s):
            report = await profile.reports.get()
    except TimeoutError:
        late = f"worker {profile.worker[0]} has not {doing} within {limit_s:g} s"
        raise DeadlineExceeded(late) from None
    if isinstance(report, BatonError):
        raise report
    return report
