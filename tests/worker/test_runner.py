"""A worker's requests without its processes: handoffs that have ended, and refused requests."""

import asyncio
from types import SimpleNamespace

import pytest

from baton.engine.base import EngineOutput, EngineStep, Finish
from baton.kvtransfer.layout import KvLayout
from baton.v1 import cluster_pb2
from baton.v1 import kv_transfer_pb2 as pb
from baton.worker.outbox import Outbox
from baton.worker.runner import Runner
from baton.worker.tier_reports import TierReports
from tests.worker.scripted_coordinator import WAIT_S

LAYOUT = KvLayout("m", "r", "uint8", 1, 1, 64, 4, 64, "axes")
SENT, FOREIGN = b"s" * 16, b"f" * 16
COMMITTED = pb.LocalSendState(handoff_id=SENT, state=pb.LocalSendState.STATE_COMMITTED)
NO_ROOM, GIVEN_UP = pb.REFUSAL_REASON_NO_ROOM, pb.REFUSAL_REASON_CANCELLED
FAILED = pb.LocalSendState(handoff_id=SENT, state=pb.LocalSendState.STATE_FAILED, reason=NO_ROOM)


class Transfer:
    """A transfer service that reserves at once; it records what is dropped."""

    def __init__(self):
        self.dropped = []
        self.events = asyncio.Queue()

    async def open_send(self, *_):
        return 0

    def abort_send(self, handoff_id):
        pass

    def drop(self, handoff_id):
        self.dropped.append(handoff_id)

    async def next_events(self):
        return [await self.events.get()]


class Engine:
    """An engine whose requests end when a test says so.

    Attributes:
        submitted: IDs of the submitted requests.
    """

    def __init__(self):
        self.submitted, self.steps = asyncio.Queue(), asyncio.Queue()

    async def submit(self, request):
        self.submitted.put_nowait(request.engine_request_id)

    async def abort(self, engine_request_ids):
        pass

    async def next_step(self):
        return await self.steps.get()


class Worker:
    """A runner, and what it reports to the coordinator."""

    def __init__(self, max_requests=9):
        self.transfer, self.engine, self.outbox = Transfer(), Engine(), Outbox()
        log = SimpleNamespace(record=lambda *_: None)
        self.runner = Runner(
            self.engine, LAYOUT, self.transfer, self.outbox, TierReports(self.outbox), log,
            max_requests=max_requests, open_timeout_s=1,
        )  # fmt: skip

    def prefill(self, request_id, **command):
        spec = cluster_pb2.RequestSpec(request_id=request_id, attempt=1, prompt_token_ids=[1] * 9)
        self.runner.start_prefill(cluster_pb2.PrefillCommand(spec=spec, **command))

    def cancel(self, request_id, handoff_id=b""):
        command = cluster_pb2.CancelCommand(request_id=request_id, attempt=1, handoff_id=handoff_id)
        self.runner.cancel(command)

    async def report(self, kind):
        """Returns the next report of this kind."""
        while True:
            for report in self.reports(kind):
                return report
            self.outbox.posted.clear()
            await self.outbox.posted.wait()

    def reports(self, kind):
        """Yields the reports of this kind that have been made."""
        while (message := self.outbox.next_unsent()) is not None:
            if message.WhichOneof("message") == kind:
                yield getattr(message, kind)


@pytest.fixture
async def worker():
    worker = Worker()
    run = asyncio.create_task(worker.runner.run())
    yield worker
    run.cancel()
    await asyncio.wait([run])


def sends(handoff_id=SENT):
    return cluster_pb2.HandoffPlan(handoff_id=handoff_id, target="x:1", num_tokens=9)


def prefix():
    command = cluster_pb2.SendPrefixCommand(handoff=sends(), prompt_token_ids=[1] * 8)
    command.timeout.FromSeconds(round(WAIT_S))
    return command


async def test_a_cancellation_after_the_handoff_drops_nothing_of_its_sender(worker):
    """The request decodes on another worker, and this one has nothing of it any more."""
    worker.prefill("r", handoff=sends())
    worker.transfer.events.put_nowait(COMMITTED)
    assert (await worker.report("handoff")).state == pb.HANDOFF_STATE_COMMITTED
    output = EngineOutput(await worker.engine.submitted.get(), [5], finish=Finish.CUT)
    worker.engine.steps.put_nowait(EngineStep([output]))
    assert (await worker.report("step")).outputs[0].HasField("finished")
    worker.cancel("r", SENT)
    # A handoff that this worker has not sent is one to this worker.
    worker.cancel("other", FOREIGN)
    assert worker.transfer.dropped == [FOREIGN]


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (FAILED, pb.HANDOFF_STATE_FAILED, NO_ROOM),
        (COMMITTED, pb.HANDOFF_STATE_COMMITTED, pb.REFUSAL_REASON_UNSPECIFIED),
        (None, pb.HANDOFF_STATE_FAILED, GIVEN_UP),
    ],
    ids=["failed", "committed", "not ended"],
)
async def test_the_end_of_a_sent_prefix_is_reported_once(worker, end, state, reason):
    """The send may end before its request does, and the coordinator then cancels the request."""
    worker.runner.send_prefix(prefix())
    await worker.engine.submitted.get()
    reports = []
    if end is not None:
        worker.transfer.events.put_nowait(end)
        reports.append(await worker.report("handoff"))
    worker.runner.cancel(cluster_pb2.CancelCommand(handoff_id=SENT))
    await worker.runner.settle(WAIT_S)
    reports += worker.reports("handoff")
    assert [(report.state, report.reason) for report in reports] == [(state, reason)]


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_prefix_that_is_not_sent_is_reported(is_full):
    """The worker is full, or the cancellation comes in the same message as the command."""
    worker = Worker(max_requests=0 if is_full else 9)
    worker.runner.send_prefix(prefix())
    if not is_full:
        worker.runner.cancel(cluster_pb2.CancelCommand(handoff_id=SENT))
    assert (await worker.report("handoff")).reason == GIVEN_UP
    await worker.runner.idle.wait()
    assert worker.transfer.dropped == []


@pytest.mark.parametrize(("num_tokens", "dropped"), [(8, [FOREIGN]), (0, [])])
async def test_a_refused_request_drops_its_fetch(num_tokens, dropped):
    """A request with a fetch of no tokens waits for the fetch of another request."""
    worker = Worker(max_requests=0)
    fetch = cluster_pb2.FetchPlan(handoff_id=FOREIGN, num_tokens=num_tokens)
    worker.prefill("r", fetch=fetch)
    assert (await worker.report("step")).outputs[0].failed.message
    assert worker.transfer.dropped == dropped
