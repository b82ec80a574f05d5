"""Outputs that cannot be resumed elsewhere: they stay on their worker while it lives.

An output with sampler state (here a seed) needs forced tokens to continue on another worker.
"""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH, BATCH = common_pb2.FINISH_REASON_LENGTH, common_pb2.LANE_BATCH
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 900}
# An ITL target of 1 ms: batch outputs are parked as soon as an interactive request decodes.
LANES = LanesConfig(interactive=InteractiveLaneConfig(itl_ms=1))


@pytest.fixture
def cell(new_world):
    """A core with workers p, d and d2, whose engines do not support forced tokens."""
    world = new_world(lanes=LANES)
    capacity = cluster_pb2.Capacity(
        kv_tokens=65536, block_size_tokens=16, max_send_bytes=2**20, max_receive_bytes=2**20
    )
    for name, role in (("p", PREFILL), ("d", DECODE)):
        world.attach(name, role, capacity=capacity)
    world.attach("d2", DECODE, capacity=capacity)
    return world


@pytest.fixture
def seeded(cell, out):
    """A batch request with a seed, which is decoding."""
    return begin(cell, out)


def begin(cell, out):
    to = cell.submit(sampling=SEEDED, lane=BATCH)
    request = cell.core.request(f"r{to.stream}")
    cell.step(request.decode[0], out(request.id, [1]))
    return request


def finishes(cell, out, request):
    """Finishes the output on its first worker; returns whether its client got the end."""
    assert request.state is RequestState.DECODING
    cell.step(request.decode[0], out(request.id, [2], offset=1, finish=LENGTH))
    return cell.kinds(request.submission.to)[-1] == "Finished"


def test_a_role_change_waits_until_the_output_ends(cell, out, seeded):
    worker_id = seeded.decode[0]
    cell.handle(ev.FlipRequested(worker_id, PREFILL))
    for _ in range(400):
        cell.after(1.0)
        for worker in cell.core.workers:
            cell.handle(ev.LoadReported(worker.key, cluster_pb2.LoadReport()))
    assert finishes(cell, out, seeded)
    assert isinstance(cell.commands[worker_id][-1], cluster_pb2.SetRoleCommand)


def test_the_output_is_not_preempted_for_interactive_requests(cell, out, seeded):
    cell.handle(ev.WorkerLost("d2" if seeded.decode[0] == "d" else "d", "was killed"))
    others = [begin(cell, out) for _ in range(2)]
    cell.submit()
    interactive = cell.core.request("r4")
    cell.step(interactive.prefill[0], out("r4", [1], finish=0))
    assert interactive.decode == seeded.decode
    assert all(finishes(cell, out, one) for one in [seeded, *others])


def test_the_output_stays_on_a_silent_worker(cell, out, seeded):
    cell.wait(5, silent=[seeded.decode[0]])
    assert cell.core.workers.get(seeded.decode).unresponsive
    assert finishes(cell, out, seeded)


def resume(cell, request, known, num_chars, **fields):
    """The client resumes the request over another session with its known tokens."""
    again = {"request_id": request.id, "session": 2, "sampling": SEEDED, **fields}
    return cell.submit(known_token_ids=known, known_text_chars=num_chars, lane=BATCH, **again)


@pytest.mark.parametrize("num_known", [1, 2, 4, 5])
def test_a_returning_client_gets_its_missing_tokens(cell, out, seeded, num_known):
    """The stream moves to the new session; the worker is not told to cancel the output."""
    worker, first = seeded.decode, seeded.submission.to
    cell.step_columns(worker[0], (seeded.handle, 1, 2))
    cell.step(worker[0], out(seeded.id, [3, 4], offset=2, text="ab"))
    cell.step_columns(worker[0], (seeded.handle, 4, 5))
    num_chars = {1: 0, 2: 1, 4: 3, 5: 4}[num_known]
    num_commands = len(cell.commands[worker[0]])
    to = resume(cell, seeded, [1, 2, 3, 4, 5][:num_known], num_chars)
    assert cell.kinds(to)[0] == "Accepted"
    assert cell.tokens(to) == [1, 2, 3, 4, 5][num_known:]
    assert "".join(one.delta.text for one in cell.sent[to][1:]) == "éabé"[num_chars:]
    assert "another connection" in str(cell.last(first).error)
    # The old stream can no longer cancel the request, and the worker gets no command.
    cell.handle(ev.SessionLost(first.session))
    cell.handle(ev.StreamCancelled(first))
    assert len(cell.commands[worker[0]]) == num_commands
    cell.step(worker[0], out(seeded.id, [6], offset=5, finish=LENGTH))
    assert cell.tokens(to) == [1, 2, 3, 4, 5, 6][num_known:]
    assert cell.last(to).usage.completion_tokens == 6
    assert cell.core.num_requests == 0


@pytest.mark.parametrize(
    "differs",
    [
        {"known": [9]},
        {"num_chars": 3},
        {"num_prompt": 21},
        {"sampling": {**SEEDED, "seed": 8}},
        {"adapter": "other"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_client_that_asks_for_another_output_is_refused(cell, seeded, differs):
    to = resume(cell, seeded, **{"known": [1], "num_chars": 0, **differs})
    assert isinstance(cell.last(to).error, errors.FailedPrecondition)


def test_the_output_may_be_taken_over_twice_and_ends_at_the_deadline(cell, out, seeded):
    again = resume(cell, seeded, [1], 0, timeout_s=60.0)
    cell.step(seeded.decode[0], out(seeded.id, [2], offset=1, text="a"))
    last = resume(cell, seeded, [1], 0, session=3)
    assert cell.tokens(again) == cell.tokens(last) == [2]
    cell.wait(61)
    assert isinstance(cell.last(last).error, errors.DeadlineExceeded)
