"""How far a worker's prompts are computed by prediction, and whom that admits."""

from __future__ import annotations

import itertools

import pytest

from baton.coordinator.routing.loads.prompt_queue import PromptQueue, QueuedPrompt
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import StreamKey
from baton.runtime import errors
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import cluster_pb2, common_pb2

FINISHED = common_pb2.FINISH_REASON_LENGTH
# A prompt token takes 10 ms; other costs are negligible.
MODEL = LatencyModel(0.0, 0.01, 0.0, 0.01, 0.0, 0.0)
# A step of 100 prompt tokens takes 1 s, and a worker gets the next prompt with less than two left.
CAPACITY = cluster_pb2.Capacity(
    kv_tokens=65536,
    block_size_tokens=16,
    max_num_seqs=64,
    max_num_batched_tokens=100,
    max_send_bytes=2**20,
    max_receive_bytes=2**20,
    keeps_prefixes=True,
)


class StrictCell:
    """A prefill worker and a decode worker, and the prompts of one-token requests."""

    def __init__(self, new_world, out) -> None:
        self.world, self._out = new_world(latency=MODEL), out
        for name, role in (("p", common_pb2.ROLE_PREFILL), ("d", common_pb2.ROLE_DECODE)):
            self.world.attach(name, role, capacity=CAPACITY)
        self._firsts = itertools.count(100)

    def submit(self, num_prompt: int, **changes) -> StreamKey:
        """Submits a prompt that shares no prefix with others."""
        prompt = [next(self._firsts), *[1] * (num_prompt - 1)]
        sampling = {"max_tokens": 1}
        return self.world.submit(prompt_token_ids=prompt, sampling=sampling, **changes)

    def send(self, num_prompt: int) -> StreamKey:
        """Submits a prompt that a worker gets at once."""
        stream = self.submit(num_prompt)
        assert self.world.core.request(f"r{stream.stream}").prefill == ("p", 1)
        return stream

    def compute(self, stream: StreamKey) -> None:
        self.world.step("p", self._out(f"r{stream.stream}", [7], finish=FINISHED))

    def is_admitted(self, num_prompt: int, ttft_s: float) -> bool:
        """Whether a request with this TTFT target is admitted; otherwise it would be too late."""
        stream = self.submit(num_prompt, slo_ttft=TtftTarget(ttft_s))
        if self.world.kinds(stream) == ["Accepted"]:
            return True
        error = self.world.last(stream).error
        assert isinstance(error, errors.ResourceExhausted)
        assert error.reason == "TOO_LATE"
        return False


@pytest.fixture
def cell(new_world, out) -> StrictCell:
    return StrictCell(new_world, out)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_long_prompt_keeps_its_progress_when_a_later_short_one_ends(cell, is_cancelled):
    cell.send(500)
    cell.world.after(3.5)
    short = cell.send(20)
    cell.world.after(0.2)
    if is_cancelled:
        cell.world.handle(ev.StreamCancelled(short))
    else:
        cell.compute(short)
    # 1.5 s of the long prompt are left, of 5 s. A wait is predicted as one step (1 s) longer.
    assert not cell.is_admitted(20, ttft_s=2.6)
    assert cell.is_admitted(20, ttft_s=2.8)


def test_a_cancelled_prompt_takes_only_its_remaining_work_away(cell):
    long = cell.send(500)
    cell.world.after(3.5)
    cell.send(80)
    cell.world.after(0.4)
    cell.world.handle(ev.StreamCancelled(long))
    # 0.4 s of the short prompt are left. A wait of less than a step is predicted as twice as long.
    assert not cell.is_admitted(20, ttft_s=0.9)
    assert cell.is_admitted(20, ttft_s=1.1)


def test_a_prompt_that_took_longer_than_predicted_leaves_the_next_one_whole(cell):
    first = cell.send(100)
    cell.send(150)
    cell.world.after(4)
    cell.compute(first)
    assert not cell.is_admitted(20, ttft_s=2.6)
    assert cell.is_admitted(20, ttft_s=2.8)


class Queue:
    """A queue whose worker computes one second of work in a second."""

    def __init__(self) -> None:
        self.queue, self.now = PromptQueue(), 0.0

    def after(self, seconds: float) -> None:
        self.now += seconds

    def add(self, name: str, work_s: float, due_at: float = 1e9, *, is_batch: bool = False) -> None:
        self.queue.advance(self.now, 1.0)
        self.queue.add(name, QueuedPrompt(work_s, round(100 * work_s), due_at, is_batch))
        self.queue.check_integrity()

    def end(self, name: str, *, is_computed: bool = True) -> float:
        """Ends a prompt, and returns the work that is left."""
        self.queue.advance(self.now, 1.0)
        self.queue.end(name, is_computed=is_computed)
        self.queue.check_integrity()
        return self.queue.left_s


def test_many_short_prompts_overtake_a_long_one():
    queue = Queue()
    queue.add("long", 5.0)
    for number in range(10):
        queue.after(0.3)
        queue.add(f"{number}", 0.1)
        queue.after(0.1)
        assert queue.end(f"{number}") == pytest.approx(5.0 - 0.3 * (number + 1))


@pytest.mark.parametrize(
    ("is_batch", "due_at"), [(True, 1e9), (False, 2.0)], ids=["batch", "overdue"]
)
def test_an_interactive_prompt_in_time_overtakes_a_shorter_one(is_batch, due_at):
    queue = Queue()
    queue.add("other", 5.0, due_at, is_batch=is_batch)
    queue.after(4.0)
    queue.add("in time", 3.0)
    queue.after(2.0)
    assert queue.end("other", is_computed=False) == pytest.approx(1.0)


def test_prompts_that_the_worker_did_not_reach_count_whole():
    """A worker computes prompts in the order of arrival with `steps.scheduler: vllm`."""
    for is_computed in (True, False):
        queue = Queue()
        queue.add("first", 5.0)
        queue.add("second", 1.0)
        queue.add("third", 1.0)
        queue.after(4.0)
        assert queue.end("first", is_computed=is_computed) == pytest.approx(2.0)
        queue.after(0.5)
        assert queue.end("third", is_computed=False) == pytest.approx(0.5)


def test_an_empty_queue_has_no_work_left():
    queue = Queue()
    queue.add("a", 0.1)
    queue.add("b", 0.2)
    queue.after(9.0)
    queue.end("b")
    assert queue.end("a") == 0.0
    queue.after(9.0)
    queue.add("c", 0.3)
    assert queue.queue.left_s == 0.3


def test_interactive_work_becomes_less_with_time() -> None:
    """The autoscaler looks at it between two changes of the queue."""
    queue = PromptQueue()
    for name, work_s, is_batch in (("batch", 10.0, True), ("interactive", 5.0, False)):
        queue.add(name, QueuedPrompt(work_s, 100, 1e9, is_batch))
    assert [queue.interactive_left_s(now, 0.5) for now in (0.0, 4.0, 12.0)] == [5.0, 3.0, 0.0]
    # The worker's time went to the interactive prompt alone.
    queue.advance(4.0, 0.5)
    assert queue.interactive_left_s(4.0, 0.5) == 3.0
    assert queue.left_s == 13.0
