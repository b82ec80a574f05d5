"""The clients of a random cell: what each was promised, what it gets, and when it comes back.

A client whose session is lost resumes with the tokens that it has, as baton.client does, and takes
no for an answer only where there is a reason for it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.rpc import code_pb2
from hashed_output import NUM_TOKENS, is_last, most_tokens, text_of, undisturbed
from random_conditions import TENANTS

from baton.client.retry_policy import resume_retry_delay_s
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey, Submission
from baton.runtime.errors import AlreadyExists, BatonError, RemoteError
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from random_cell import RandomCell

_LANES = (common_pb2.LANE_INTERACTIVE, common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH)
# Of a request whose revision has no workers any more: another one does not go on with it.
_GONE = "REVISION_GONE"
_NUM_SESSIONS, _MOST_REFUSALS = 3, 60


@dataclass(slots=True, eq=False)
class Client:
    """One request, as its client sees it.

    Attributes:
        deadline: by the cell's clock.
        session: that it is submitted over. to: its stream there; None while it has none.
        resumes: it is about to go on over another session. has_resumed: it has tried.
        ends_itself: it, or an operator, has cancelled it.
        outcome: in a word, once it is over for its client.
    """

    request_id: str
    tenant: str
    lane: int
    prompt: list[int]
    sampling: common_pb2.SamplingParams
    adapter: str = ""
    conversation: str = ""
    slo_ttft_s: float | None = None
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
        """Its whole output, had nothing happened."""
        max_tokens = most_tokens(self.sampling)
        return undisturbed(self.prompt, self.adapter, self.revision, max_tokens)


class RandomClients:
    """All clients, and what their streams may carry: whatever else comes fails the test.

    Attributes:
        everyone: in the order in which they came.
        outcomes: how many ended how.
    """

    def __init__(self, cell: RandomCell) -> None:
        self._cell = cell
        self.everyone: list[Client] = []
        self.outcomes: Counter[str] = Counter()
        self._by_stream: dict[StreamKey, Client] = {}
        self._over: set[StreamKey] = set()
        self._numbers, self._streams = itertools.count(1), itertools.count(1)
        self._session_numbers = itertools.count(1)
        self._sessions = [next(self._session_numbers) for _ in range(_NUM_SESSIONS)]

    # ---- What they do.

    def submit(self, *, plain: bool = False) -> Client:
        """Another one comes; a plain one has no wishes that could be in its way."""
        chance, cell = self._cell.chance, self._cell
        length = chance.choice([5, 20, 33, 64, 200, 400])
        if chance.random() < 0.6:
            family = chance.randrange(6)
            prompt = [family] * 4 + [family * 7] * (length - 4)
        else:
            prompt = [chance.randrange(NUM_TOKENS) for _ in range(length)]
        sampling = common_pb2.SamplingParams()
        if max_tokens := chance.choice([1, 2, 8, 30, 80, 200, None]):
            sampling.max_tokens = max_tokens
        if chance.random() < 0.1:
            # Its state has to be replayed, token by token, wherever it goes on.
            sampling.temperature, sampling.seed = 1.0, 7
        client = Client(
            request_id=f"r{next(self._numbers)}",
            tenant="default" if plain else chance.choice(["default", "default", *TENANTS]),
            lane=common_pb2.LANE_BATCH if plain else chance.choice(_LANES),
            prompt=prompt,
            sampling=sampling,
        )
        if not plain:
            # Of others the server says that there are none.
            served = cell.coordinator.core.workers.model
            adapters = served.adapters if served is not None else ()
            client.adapter = chance.choice(("", *(one.name for one in adapters)))
            client.conversation = chance.choice(["", "a", "b", "c", "d"])
            if cell.conditions.tight:
                client.slo_ttft_s = chance.choice([None, None, 0.5])
            if cell.conditions.faults and chance.random() < 0.1:
                client.deadline = cell.now + chance.choice([3.0, 20.0])
        self.everyone.append(client)
        self._send(client)
        return client

    def cancel(self, how: Callable[[Client], None]) -> None:
        """One that is on its way is ended, by itself or by somebody else, and then is no more."""
        if client := self._any_running():
            client.ends_itself = True
            how(client)
            core = self._cell.coordinator.core
            assert client.outcome or not core.running_request(client.request_id, client.tenant)

    def submit_twice(self) -> None:
        """Somebody else uses the id of one that runs."""
        client = self._any_running()
        if client is None:
            return
        core = self._cell.coordinator.core
        runs = core.running_request(client.request_id, client.tenant) is not None
        other = Client(client.request_id, client.tenant, client.lane, [1], client.sampling)
        other.session, other.ends_itself = self._cell.chance.choice(self._sessions), not runs
        self._send(other)
        if runs:
            assert isinstance(other.error, AlreadyExists), other
        elif not other.outcome:
            self._cell.coordinator.post(ev.StreamCancelled(other.to))

    def lose_session(self) -> None:
        """A connection breaks. The coordinator hears of it, or not yet; most clients come again."""
        cell, chance = self._cell, self._cell.chance
        session = chance.choice(self._sessions)
        self._sessions[self._sessions.index(session)] = next(self._session_numbers)
        coordinator = cell.coordinator
        heard_s = chance.choice([0.0, 0.0, 0.0, 0.3, 1.0, 4.0])
        if heard_s:
            cell.after(heard_s, lambda: coordinator.post(ev.SessionLost(session)))
        else:
            coordinator.post(ev.SessionLost(session))
        for client in self.everyone:
            if not client.outcome and client.session == session:
                if client.to is None or chance.random() < 0.8:
                    self._resume(client)
                else:
                    self._end(client, "abandoned")

    def lost_coordinator(self) -> None:
        """All sessions are over; nobody gives up."""
        self._sessions = [next(self._session_numbers) for _ in range(_NUM_SESSIONS)]
        for client in self.everyone:
            if not client.outcome:
                self._resume(client)

    def _any_running(self) -> Client | None:
        running = [each for each in self.everyone if not each.outcome and each.to is not None]
        return self._cell.chance.choice(running[-10:]) if running else None

    def _resume(self, client: Client) -> None:
        client.resumes, client.has_resumed, client.to = True, True, None
        # A revision that leaves waits for those who come back at once.
        late = [2.0] if self._cell.conditions.faults else []
        self._later(client, self._cell.chance.choice([0.01, 0.1, 0.5, *late]))

    def _later(self, client: Client, seconds: float) -> None:
        """Unless it has been sent, or is over, by then."""
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
            client.session = cell.chance.choice(self._sessions)
        client.to = StreamKey(client.session, next(self._streams))
        client.accepted = False
        self._by_stream[client.to] = client
        cell.say(client.request_id, "is submitted", client.to, len(client.token_ids))
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
            slo_ttft_s=client.slo_ttft_s,
        )
        cell.coordinator.post(ev.Submitted(submission))

    # ---- What they get.

    def take_accepted(self, to: StreamKey) -> None:
        client = self._by_stream[to]
        assert to not in self._over
        assert not client.accepted or client.to != to, client
        if client.to == to:
            client.accepted, client.resumes, client.num_refusals = True, False, 0

    def take_delta(self, to: StreamKey, delta: common_pb2.TokenDelta) -> None:
        """Every token in its place, and of the revision that the output began with."""
        assert to not in self._over, f"tokens after the end of {to}"
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
        """With the whole output, or because somebody wanted it."""
        client = self._last_of(finished.to)
        if client is None:
            return
        if finished.reason == common_pb2.FINISH_REASON_CANCELLED:
            assert client.ends_itself, f"cancelled by nobody: {client}"
            self._end(client, "cancelled")
            return
        assert client.token_ids == client.expected(), client
        stops = is_last(client.token_ids[-1])
        reason = common_pb2.FINISH_REASON_STOP if stops else common_pb2.FINISH_REASON_LENGTH
        assert finished.reason == reason, (client, finished)
        self._end(client, "finished")

    def take_failed(self, to: StreamKey, error: BatonError) -> None:
        """For a reason, and not if it may come back."""
        client = self._last_of(to)
        if client is None:
            return
        if client.ends_itself:
            self._end(client, "cancelled")
            return
        if client.resumes and (wait_s := self._comes_again_s(client, error)) is not None:
            client.num_refusals += 1
            self._later(client, wait_s)
            return
        client.error = error
        code = code_pb2.Code.Name(error.code)
        self._cell.say(client.request_id, "fails:", error)
        if client not in self.everyone:
            client.outcome = "refused"
            return
        assert self._is_justified(client, error), (client, error)
        self._end(client, f"{code} {getattr(error, 'reason', '')}".strip())

    def _last_of(self, to: StreamKey) -> Client | None:
        """Whose stream that ends is; None if it has another one by now."""
        assert to not in self._over, f"a second end of {to}"
        self._over.add(to)
        client = self._by_stream[to]
        return client if client.to == to and not client.outcome else None

    def _comes_again_s(self, client: Client, error: BatonError) -> float | None:
        if getattr(error, "reason", "") == _GONE or client.num_refusals > _MOST_REFUSALS:
            return None
        refusal = RemoteError(error.code, str(error), error.details())
        return resume_retry_delay_s(refusal, client.num_refusals, self._cell.chance.random())

    def _is_justified(self, client: Client, error: BatonError) -> bool:
        """Whether a request may fail so, given what has happened in this run."""
        cell, code = self._cell, error.code
        if code == code_pb2.DEADLINE_EXCEEDED:
            return client.deadline is not None or cell.conditions.faults
        if code == code_pb2.RESOURCE_EXHAUSTED:
            # One that lost its workers waits no longer than for others, busy or not.
            return not client.accepted or cell.conditions.tight or cell.num_losses > 0
        if getattr(error, "reason", "") == _GONE:
            return cell.conditions.faults and bool(client.revision)
        if code == code_pb2.FAILED_PRECONDITION:
            # Nobody can go on with it, also for its client that comes back.
            is_lost = cell.conditions.faults or client.has_resumed
            is_exact = client.sampling.HasField("seed")
            return is_lost and is_exact and not cell.conditions.forces_tokens
        if code == code_pb2.INVALID_ARGUMENT:
            # The server would tell one that comes back without a token that there is none.
            return bool(client.adapter) and (cell.conditions.faults or client.has_resumed)
        if not cell.conditions.faults:
            # Where queues are short, it may have waited too long for a worker that starts.
            return code == code_pb2.UNAVAILABLE and cell.conditions.tight
        if code == code_pb2.INTERNAL:
            return cell.conditions.fails > 0 or cell.num_losses > 1
        return code == code_pb2.UNAVAILABLE

    def _end(self, client: Client, outcome: str) -> None:
        client.outcome, client.to = outcome, None
        self.outcomes[outcome] += 1
