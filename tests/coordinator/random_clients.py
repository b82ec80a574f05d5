"""The clients of a random cell, and the assertions on the streams that they receive.

A client whose session is lost resumes with its received tokens, as baton.client does. A request
may fail only for a reason that the events of the run explain.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.rpc import code_pb2

from baton.client.retry_policy import resume_retry_delay_s
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey, Submission
from baton.runtime.errors import AlreadyExists, BatonError, RemoteError
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2
from tests.coordinator.hashed_output import NUM_TOKENS, is_last, most_tokens, text_of, undisturbed
from tests.coordinator.random_conditions import TENANTS

if TYPE_CHECKING:
    from tests.coordinator.random_cell import RandomCell

_LANES = (common_pb2.LANE_INTERACTIVE, common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH)
# Error reason of a request whose revision has no workers; no other revision may continue it.
_GONE = "REVISION_GONE"
_NUM_SESSIONS, _MAX_REFUSALS = 3, 60


@dataclass(slots=True, eq=False)
class Client:
    """One request, as its client sees it.

    Attributes:
        deadline: Deadline by the cell's clock; None for the server's own limit.
        session: Session that the request was submitted over.
        to: Stream of the request in its session; None while it has none.
        resumes: The client is resuming over another session and has not been accepted yet.
        has_resumed: The client has tried to resume at least once.
        ends_itself: The client or an operator has cancelled the request.
        outcome: Short description of the end; empty while the client waits for output.
    """

    request_id: str
    tenant: str
    lane: int
    prompt: list[int]
    sampling: common_pb2.SamplingParams
    adapter: str = ""
    conversation: str = ""
    slo_ttft: TtftTarget | None = None
    deadline: float | None = None
    session: int = 0
    to: StreamKey | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    revision: str = ""
    accepted: bool = False
    resumes: bool = False
    has_resumed: bool = False
    num_refusals: int = 0
    ends_itself: bool = False
    outcome: str = ""
    error: BatonError | None = None

    @property
    def has_all(self) -> bool:
        return bool(self.token_ids) and is_last(self.token_ids[-1])

    def expected(self) -> list[int]:
        """Returns the whole output of the request in a run without faults."""
        max_tokens = most_tokens(self.sampling)
        return undisturbed(self.prompt, self.adapter, self.revision, max_tokens)


class RandomClients:
    """Runs all clients, and asserts on every effect that their streams receive.

    Attributes:
        everyone: All clients in the order of their first submission.
        outcomes: Number of clients per outcome.
    """

    def __init__(self, cell: RandomCell) -> None:
        self._cell = cell
        self.everyone: list[Client] = []
        self.outcomes: Counter[str] = Counter()
        self._by_stream: dict[StreamKey, Client] = {}
        self._ended_streams: set[StreamKey] = set()
        self._numbers, self._streams = itertools.count(1), itertools.count(1)
        self._session_numbers = itertools.count(1)
        self._sessions = [next(self._session_numbers) for _ in range(_NUM_SESSIONS)]

    # ---- Actions of clients.

    def submit(self, *, plain: bool = False) -> Client:
        """Submits a new request; a plain one has no tenant limit, adapter, target or deadline."""
        rng, cell = self._cell.rng, self._cell
        length = rng.choice([5, 20, 33, 64, 200, 400])
        if rng.random() < 0.6:
            family = rng.randrange(6)
            prompt = [family] * 4 + [family * 7] * (length - 4)
        else:
            prompt = [rng.randrange(NUM_TOKENS) for _ in range(length)]
        sampling = common_pb2.SamplingParams()
        if max_tokens := rng.choice([1, 2, 8, 30, 80, 200, None]):
            sampling.max_tokens = max_tokens
        if rng.random() < 0.1:
            # A seeded sampler has state: a worker that resumes must replay each known token.
            sampling.temperature, sampling.seed = 1.0, 7
        client = Client(
            request_id=f"r{next(self._numbers)}",
            tenant="default" if plain else rng.choice(["default", "default", *TENANTS]),
            lane=common_pb2.LANE_BATCH if plain else rng.choice(_LANES),
            prompt=prompt,
            sampling=sampling,
        )
        if not plain:
            # The server refuses requests for adapters that the model does not have.
            served = cell.coordinator.core.workers.model
            adapters = served.adapters if served is not None else ()
            client.adapter = rng.choice(("", *(one.name for one in adapters)))
            client.conversation = rng.choice(["", "a", "b", "c", "d"])
            if cell.conditions.tight:
                client.slo_ttft = rng.choice([None, TtftTarget(0.5), TtftTarget(0.4, 1.0)])
            if cell.conditions.faults and rng.random() < 0.1:
                client.deadline = cell.now + rng.choice([3.0, 20.0])
        self.everyone.append(client)
        self._send(client)
        return client

    def cancel(self, how: Callable[[Client], None]) -> None:
        """Ends a running request by `how`, and asserts that the core no longer runs the request."""
        if client := self._any_running():
            client.ends_itself = True
            how(client)
            core = self._cell.coordinator.core
            assert client.outcome or not core.running_request(client.request_id, client.tenant)

    def submit_twice(self) -> None:
        """Submits another request with the ID of a running one; the core must refuse it."""
        client = self._any_running()
        if client is None:
            return
        core = self._cell.coordinator.core
        runs = core.running_request(client.request_id, client.tenant) is not None
        other = Client(client.request_id, client.tenant, client.lane, [1], client.sampling)
        other.session, other.ends_itself = self._cell.rng.choice(self._sessions), not runs
        self._send(other)
        if runs:
            assert isinstance(other.error, AlreadyExists), other
        elif not other.outcome:
            self._cell.coordinator.post(ev.StreamCancelled(other.to))

    def lose_session(self) -> None:
        """Breaks a session. The coordinator may notice later; most clients resume."""
        cell, rng = self._cell, self._cell.rng
        session = rng.choice(self._sessions)
        self._sessions[self._sessions.index(session)] = next(self._session_numbers)
        coordinator = cell.coordinator
        heard_s = rng.choice([0.0, 0.0, 0.0, 0.3, 1.0, 4.0])
        if heard_s:
            cell.after(heard_s, lambda: coordinator.post(ev.SessionLost(session)))
        else:
            coordinator.post(ev.SessionLost(session))
        for client in self.everyone:
            if not client.outcome and client.session == session:
                if client.to is None or rng.random() < 0.8:
                    self._resume(client)
                else:
                    self._end(client, "abandoned")

    def lost_coordinator(self) -> None:
        """Ends all sessions; every client resumes."""
        self._sessions = [next(self._session_numbers) for _ in range(_NUM_SESSIONS)]
        for client in self.everyone:
            if not client.outcome:
                self._resume(client)

    def _any_running(self) -> Client | None:
        running = [each for each in self.everyone if not each.outcome and each.to is not None]
        return self._cell.rng.choice(running[-10:]) if running else None

    def _resume(self, client: Client) -> None:
        client.resumes, client.has_resumed, client.to = True, True, None
        # A retired revision keeps its requests only for clients that resume at once, so a late
        # client is a fault.
        late = [2.0] if self._cell.conditions.faults else []
        self._later(client, self._cell.rng.choice([0.01, 0.1, 0.5, *late]))

    def _later(self, client: Client, seconds: float) -> None:
        """Submits again after a pause, unless the request was submitted or ended meanwhile."""
        client.to = None

        def send() -> None:
            if client.to is None and not client.outcome:
                self._send(client)

        self._cell.after(seconds, send)

    def _send(self, client: Client) -> None:
        cell = self._cell
        if client.deadline is not None and client.deadline <= cell.now:
            self._end(client, "late")
            return
        if not cell.coordinator.listens:
            self._later(client, 0.3)
            return
        if client.session not in self._sessions:
            client.session = cell.rng.choice(self._sessions)
        client.to = StreamKey(client.session, next(self._streams))
        client.accepted = False
        self._by_stream[client.to] = client
        cell.log(client.request_id, "is submitted", client.to, len(client.token_ids))
        submission = Submission(
            to=client.to,
            request_id=client.request_id,
            prompt_token_ids=client.prompt,
            sampling=client.sampling,
            lane=client.lane,
            arrived_at=cell.now,
            tenant=client.tenant,
            timeout_s=None if client.deadline is None else client.deadline - cell.now,
            known_token_ids=tuple(client.token_ids),
            known_text_chars=len(client.text),
            known_stop="" if client.has_all else None,
            session_id=client.conversation,
            adapter=client.adapter,
            revision=client.revision,
            slo_ttft=client.slo_ttft,
        )
        cell.coordinator.post(ev.Submitted(submission))

    # ---- Effects that clients receive.

    def take_accepted(self, to: StreamKey) -> None:
        client = self._by_stream[to]
        assert to not in self._ended_streams
        assert not client.accepted or client.to != to, client
        if client.to == to:
            client.accepted, client.resumes, client.num_refusals = True, False, 0

    def take_delta(self, to: StreamKey, delta: common_pb2.TokenDelta) -> None:
        """Asserts the position, value and revision of every token."""
        assert to not in self._ended_streams, f"tokens after the end of {to}"
        client = self._by_stream[to]
        if client.to != to:
            return
        assert client.accepted, client
        assert not client.token_ids or delta.revision in ("", client.revision), (client, delta)
        client.revision = delta.revision or client.revision
        assert delta.offset == len(client.token_ids), (client, delta)
        client.token_ids.extend(delta.token_ids)
        client.text += delta.text
        assert client.token_ids == client.expected()[: len(client.token_ids)], (client, delta)
        assert client.text == "".join(map(text_of, client.token_ids)), (client, delta)

    def take_finished(self, finished: ev.SendFinished) -> None:
        """Asserts that the output is complete, or that the request was cancelled."""
        client = self._end_stream(finished.to)
        if client is None:
            return
        if finished.reason == common_pb2.FINISH_REASON_CANCELLED:
            assert client.ends_itself, f"ended as cancelled without a cancellation: {client}"
            self._end(client, "cancelled")
            return
        assert client.token_ids == client.expected(), client
        stops = is_last(client.token_ids[-1])
        reason = common_pb2.FINISH_REASON_STOP if stops else common_pb2.FINISH_REASON_LENGTH
        assert finished.reason == reason, (client, finished)
        self._end(client, "finished")

    def take_failed(self, to: StreamKey, error: BatonError) -> None:
        """Resumes later if the error allows that; otherwise asserts that the error is justified."""
        client = self._end_stream(to)
        if client is None:
            return
        if client.ends_itself:
            self._end(client, "cancelled")
            return
        if client.resumes and (wait_s := self._retry_delay_s(client, error)) is not None:
            client.num_refusals += 1
            self._later(client, wait_s)
            return
        client.error = error
        code = code_pb2.Code.Name(error.code)
        self._cell.log(client.request_id, "fails:", error)
        if client not in self.everyone:
            client.outcome = "refused"
            return
        assert self._is_justified(client, error), (client, error)
        self._end(client, f"{code} {getattr(error, 'reason', '')}".strip())

    def _end_stream(self, to: StreamKey) -> Client | None:
        """Returns the client of an ended stream, or None if the client no longer uses it."""
        assert to not in self._ended_streams, f"a second end of {to}"
        self._ended_streams.add(to)
        client = self._by_stream[to]
        return client if client.to == to and not client.outcome else None

    def _retry_delay_s(self, client: Client, error: BatonError) -> float | None:
        if getattr(error, "reason", "") == _GONE or client.num_refusals > _MAX_REFUSALS:
            return None
        refusal = RemoteError(error.code, str(error), error.details())
        return resume_retry_delay_s(refusal, client.num_refusals, self._cell.rng.random())

    def _is_justified(self, client: Client, error: BatonError) -> bool:
        """Whether a request may fail so, given what has happened in this run."""
        cell, code = self._cell, error.code
        if code == code_pb2.DEADLINE_EXCEEDED:
            return client.deadline is not None or cell.conditions.faults
        if code == code_pb2.RESOURCE_EXHAUSTED:
            # A request that lost its worker fails after the recovery timeout if all are busy, and
            # a parked one at the end of max_request_s, which is short in runs with faults.
            is_late = cell.conditions.faults and client.lane == common_pb2.LANE_BATCH
            is_lost = cell.conditions.tight or cell.num_losses > 0
            return not client.accepted or is_lost or is_late
        if getattr(error, "reason", "") == _GONE:
            return cell.conditions.faults and bool(client.revision)
        if code == code_pb2.FAILED_PRECONDITION:
            # A seeded output cannot be resumed without forced tokens, also not for a client that
            # reconnects.
            is_lost = cell.conditions.faults or client.has_resumed
            is_exact = client.sampling.HasField("seed")
            return is_lost and is_exact and not cell.conditions.forces_tokens
        if code == code_pb2.INVALID_ARGUMENT:
            # A client that resumes without a token may reach a revision without its adapter.
            return bool(client.adapter) and (cell.conditions.faults or client.has_resumed)
        if not cell.conditions.faults:
            # With short queue limits a request may time out while a worker starts.
            return code == code_pb2.UNAVAILABLE and cell.conditions.tight
        if code == code_pb2.INTERNAL:
            return cell.conditions.p_refused > 0 or cell.num_losses > 1
        return code == code_pb2.UNAVAILABLE

    def _end(self, client: Client, outcome: str) -> None:
        client.outcome, client.to = outcome, None
        self.outcomes[outcome] += 1
