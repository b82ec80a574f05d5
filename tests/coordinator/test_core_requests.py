"""The lifecycle of a request in the core, from submission to every kind of end."""

from __future__ import annotations

import pytest

from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2, inference_pb2, kv_transfer_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CANCELLED = common_pb2.FINISH_REASON_CANCELLED


def begin(world, out, **changes):
    """Brings a request to its DecodeCommand; returns its stream key and ID."""
    to = world.submit(**changes)
    request_id = world.sent[to][0].request_id
    world.step("p", out(request_id, [7], text="é", finish=0))
    return to, request_id


def test_prefill_then_handoff_then_decode(world, out):
    to = world.submit(num_prompt=20)
    (prefill,) = world.commands["p"]
    assert list(prefill.spec.prompt_token_ids) == list(range(20))
    assert prefill.spec.attempt == 1
    assert len(prefill.handoff.handoff_id) == 16
    assert prefill.handoff.target == "d.test:1"
    assert prefill.handoff.num_tokens == 20
    assert world.commands["d"] == []

    world.step("p", out("r1", [7], text="é", finish=0))
    assert world.kinds(to) == ["Accepted", "Delta"]
    (decode,) = world.commands["d"]
    assert list(decode.spec.known_token_ids) == [7]
    assert decode.spec.known_text_chars == 1
    assert decode.handoff == prefill.handoff
    assert world.core.request("r1").state is RequestState.HANDING_OFF

    world.step("d", out("r1", [8], offset=1, text="x"))
    assert world.core.request("r1").state is RequestState.DECODING
    world.step("d", out("r1", [9], offset=2, finish=STOP, stop="."))
    assert world.tokens(to) == [7, 8, 9]
    finished = world.last(to)
    assert (finished.reason, finished.stop) == (STOP, ".")
    assert finished.usage.prompt_tokens == 20
    assert finished.usage.completion_tokens == 3
    assert world.core.request("r1").state is RequestState.FINISHED
    assert len(world.commands["p"]) == 1


def test_a_prompt_counts_as_tokens_once_its_first_token_comes(world, out):
    stats = world.core.stats
    world.handle(ev.StreamCancelled(world.submit(num_prompt=1000)))
    assert (stats.num_prompt_tokens, sum(stats.requests.values())) == (0, 1)
    begin(world, out, num_prompt=20)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (20, 1)
    world.step("d", out("r2", [8], offset=1, finish=LENGTH))
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (20, 2)


def test_images_go_only_to_workers_that_compute_the_prompt(world, out):
    images = [common_pb2.PromptImage(id="a", offset=2, num_tokens=4)]
    chat = inference_pb2.ChatPrompt()
    chat.messages.add(role="user").parts.add(image=b"file")
    to = world.submit(num_prompt=20, images=images, chat=chat)
    (prefill,) = world.commands["p"]
    assert prefill.spec.chat == chat
    assert list(prefill.spec.images) == images
    world.step("p", out("r1", [7], finish=0))
    (decode,) = world.commands["d"]
    assert not decode.spec.HasField("chat")
    assert list(decode.spec.images) == images

    # The handoff was lost. The next decode worker can compute the prompt itself.
    gone = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    gone.prefix_gone.SetInParent()
    world.step("d", gone)
    prefill = world.commands["p"][-1]
    assert (prefill.spec.attempt, prefill.spec.chat) == (2, chat)
    world.step("p", out("r1", [8], finish=0, attempt=2))
    decode = world.commands["d"][-1]
    assert decode.HasField("handoff")
    assert (decode.spec.attempt, decode.spec.chat) == (2, chat)
    world.step("d", out("r1", [8], offset=1, finish=LENGTH, attempt=2))
    assert world.tokens(to) == [7, 8]


def test_an_output_that_stops_at_its_first_token_cancels_the_handoff(world, out):
    to = world.submit()
    handoff_id = world.commands["p"][0].handoff.handoff_id
    world.step("p", out("r1", [7], finish=STOP))
    assert world.kinds(to) == ["Accepted", "Delta", "Finished"]
    (cancel,) = world.commands["d"]
    assert isinstance(cancel, cluster_pb2.CancelCommand)
    assert cancel.handoff_id == handoff_id


def test_a_request_for_one_token_needs_no_decode_worker(new_world, out):
    world = new_world()
    world.attach("p", common_pb2.ROLE_PREFILL)
    to = world.submit(sampling={"max_tokens": 1})
    (prefill,) = world.commands["p"]
    assert not prefill.HasField("handoff")
    world.step("p", out("r1", [7], finish=LENGTH))
    assert world.last(to).reason == LENGTH


def test_a_resumed_request_computes_its_prompt_and_hands_it_over(world, out):
    to = world.submit(known_token_ids=[5, 6], known_text_chars=3, sampling={"stop": ["x"]})
    (prefill,) = world.commands["p"]
    assert list(prefill.spec.known_token_ids) == []
    # The coordinator discards the token that the prefill worker samples; the token must not end
    # the request.
    assert prefill.spec.sampling.ignore_eos
    assert not prefill.spec.sampling.stop
    world.step("p", out("r1", [5], text="no", finish=0))
    assert world.kinds(to) == ["Accepted"]
    (decode,) = world.commands["d"]
    assert decode.handoff == prefill.handoff
    assert list(decode.spec.known_token_ids) == [5, 6]
    assert decode.spec.known_text_chars == 3
    world.step("d", out("r1", [7], offset=2, finish=LENGTH))
    assert world.tokens(to) == [7]
    assert world.last(to).usage.completion_tokens == 3


def test_resume_with_everything_received_ends_at_once(world):
    to = world.submit(known_token_ids=[5, 6], sampling={"max_tokens": 2})
    assert world.kinds(to) == ["Accepted", "Finished"]
    assert world.last(to).reason == LENGTH
    assert world.commands["d"] == []


@pytest.mark.parametrize("end", ["max_send_bytes", "max_receive_bytes"])
def test_a_handoff_larger_than_staging_memory_runs_on_one_worker(new_world, end):
    world = new_world()
    for worker_id, role in (("p", common_pb2.ROLE_PREFILL), ("d", common_pb2.ROLE_DECODE)):
        capacity = cluster_pb2.Capacity(
            max_send_bytes=2**20, max_receive_bytes=2**20, supports_forced_tokens=True
        )
        setattr(capacity, end, 4 * 1024 * 2)
        world.attach(worker_id, role, capacity=capacity)
    world.submit(num_prompt=32)
    world.submit(num_prompt=33)
    assert world.commands["p"][0].spec.request_id == "r1"
    assert world.commands["d"][0].spec.request_id == "r2"
    assert not world.commands["d"][0].spec.known_token_ids


@pytest.mark.parametrize(
    ("sampling", "split"),
    [
        ({"temperature": 0.0, "seed": 1}, True),
        ({"temperature": 0.5}, True),
        ({"seed": 1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"bad_words": ["x"]}, False),
        ({"structured_output": common_pb2.StructuredOutput(json_object=True)}, False),
    ],
)
def test_requests_with_sampler_state_run_on_one_worker_without_forced_tokens(
    new_world, sampling, split
):
    world = new_world()
    capacity = cluster_pb2.Capacity(max_send_bytes=2**20, max_receive_bytes=2**20)
    world.attach("p", common_pb2.ROLE_PREFILL, capacity=capacity)
    world.attach("d", common_pb2.ROLE_DECODE, capacity=capacity)
    world.submit(sampling=sampling)
    assert (len(world.commands["p"]) == 1) is split
    assert (len(world.commands["d"]) == 1) is not split


def test_repeated_tokens_are_dropped_and_a_gap_starts_a_new_attempt(world, out):
    to, request_id = begin(world, out)
    world.step("d", out(request_id, [7, 8], offset=0, text="a"))
    world.step("d", out(request_id, [8], offset=1, text="a"))
    assert world.tokens(to) == [7, 8]
    world.step("d", out(request_id, [10], offset=3))
    assert world.tokens(to) == [7, 8]
    again, cancel = world.commands["p"][-1], world.commands["d"][-1]
    assert (again.spec.attempt, cancel.attempt) == (2, 1)
    world.step("p", out(request_id, [7], finish=0, attempt=2))
    assert list(world.commands["d"][-1].spec.known_token_ids) == [7, 8]


def test_outputs_of_another_attempt_or_worker_are_dropped(world, out):
    to = world.submit()
    world.attach("p2", common_pb2.ROLE_PREFILL)
    world.step("p", out("r1", [7], attempt=2, finish=0))
    world.step("p2", out("r1", [7], finish=0))
    world.step("d", out("r1", [7], finish=STOP))
    assert world.kinds(to) == ["Accepted"]


def test_tokens_in_the_column_format_are_forwarded_unchanged(world, out):
    ends = [begin(world, out) for _ in range(2)]
    handles = [command.spec.handle for command in world.commands["d"]]
    assert len(set(handles)) == 2
    # A worker may report the first token of an attempt in the column format too.
    for offset in (1, 2):
        world.step_columns("d", *((handle, offset, 10 * handle + offset) for handle in handles))
    for (to, request_id), handle in zip(ends, handles, strict=True):
        assert world.tokens(to) == [7, 10 * handle + 1, 10 * handle + 2]
        assert [one.delta.text for one in world.sent[to][1:]] == ["é"] * 3
        request = world.core.request(request_id)
        assert (request.state, request.text_chars) == (RequestState.DECODING, 3)
        world.step("d", out(request_id, [9], offset=3, finish=STOP))
        assert world.last(to).usage.completion_tokens == 4


def test_a_slow_step_counts_requests_and_not_their_tokens(world, out):
    """With speculative decoding, an output of one step may have several tokens."""
    begin(world, out)
    begin(world, out)
    world.step("d", out("r1", [8], offset=1), out("r2", [8], offset=1))
    world.after(5)
    world.step("d", out("r1", [9, 10, 11], offset=2), out("r2", [9], offset=2))
    slow = world.core.workers.by_id("d").slow_steps[-1]
    assert slow.num_requests == 2


def test_pass_through_from_is_the_key_object_of_the_worker_table(world, out):
    """`pass_through_from` is the table's own key object, not an equal key from an event.

    The core compares keys by identity for each token; an equal copy would take the slow path.
    """
    to, request_id = begin(world, out)
    (command,) = world.commands["d"]
    world.step_columns("d", (command.spec.handle, 1, 8))
    assert world.core.request(request_id).pass_through_from is world.core.workers.by_id("d").key
    world.step_columns("d", (command.spec.handle, 2, 9))
    assert world.tokens(to) == [7, 8, 9]


@pytest.mark.parametrize("lost_at", [None, 3, 16, 17, 40])
def test_a_tenant_is_charged_once_for_each_output_token(world, out, monkeypatch, lost_at):
    """A lost attempt does not charge known tokens a second time when they are computed again."""
    paid, served = [], Lanes.served

    def pay(lanes, request, num_tokens):
        paid.append(num_tokens)
        served(lanes, request, num_tokens)

    monkeypatch.setattr(Lanes, "served", pay)
    world.attach("d2", common_pb2.ROLE_DECODE)
    to, request_id = begin(world, out, sampling={"max_tokens": 60})
    request = world.core.request(request_id)
    for offset in range(1, 59):
        if offset == lost_at:
            world.handle(ev.WorkerLost(request.decode[0], "was killed"))
            world.step("p", out(request_id, [7], finish=0, attempt=2))
            world.step_columns(request.decode[0], (request.handle, offset - 1, 0))
        if offset % 5:
            world.step_columns(request.decode[0], (request.handle, offset, offset))
        else:
            attempt = request.attempt_number
            world.step(request.decode[0], out(request_id, [offset], offset, attempt=attempt))
        assert 0 <= offset + 1 - sum(paid) < 2 * 16
    world.step(
        request.decode[0], out(request_id, [59], 59, finish=STOP, attempt=request.attempt_number)
    )
    assert world.last(to).usage.completion_tokens == sum(paid) == 60


def test_the_reservation_grows_with_an_output_longer_than_expected(world, out):
    """The reserved KV tokens cover the output so far and never exceed its limit."""
    _, request_id = begin(world, out, sampling={"max_tokens": 400})
    request, load = world.core.request(request_id), world.core.placers.load
    worker = world.core.workers.by_id("d")
    rooms = {load(worker).decodes.reserved_tokens}
    for offset in range(1, 399):
        if offset % 7:
            world.step_columns("d", (request.handle, offset, offset))
        else:
            world.step("d", out(request_id, [offset], offset))
        rooms.add(load(worker).decodes.reserved_tokens)
        assert 20 + len(request.token_ids) <= load(worker).decodes.reserved_tokens
    # The first reservation is for 256 expected output tokens; 420 tokens are 27 blocks of 16.
    assert (min(rooms), max(rooms)) == (288, 432)
    world.step("d", out(request_id, [399], 399, finish=STOP))
    assert (load(worker).decodes.reserved_tokens, load(worker).free_tokens) == (0, 65536)


def test_column_format_tokens_of_ended_attempts_are_dropped(world, out):
    to, request_id = begin(world, out)
    handle = world.commands["d"][0].spec.handle
    world.attach("d2", common_pb2.ROLE_DECODE)
    world.step_columns("d2", (handle, 1, 8))
    world.step_columns("d", (handle, 0, 7), (handle + 7, 1, 8))
    assert world.tokens(to) == [7]
    world.step_columns("d", (handle, 1, 8))
    # A gap in the offsets starts another attempt; the old handle is then unknown.
    world.step_columns("d", (handle, 3, 10))
    world.step_columns("d", (handle, 2, 9))
    assert world.tokens(to) == [7, 8]
    again = world.commands["p"][-1].spec
    assert (again.attempt, again.handle > handle) == (2, True)
    world.step("p", out(request_id, [7], finish=0, attempt=2))
    key = world.core.request(request_id).decode
    world.step_columns(key[0], (again.handle, 2, 9))
    world.step_columns(key[0], (again.handle, 3, 10))
    assert world.tokens(to) == [7, 8, 9, 10]
    world.handle(ev.StreamCancelled(to))
    assert world.step_columns(key[0], (again.handle, 4, 11)) == []


def test_text_without_tokens_is_sent(world, out):
    to, request_id = begin(world, out)
    world.step("d", out(request_id, offset=1, text="late", finish=LENGTH))
    assert world.sent[to][-2].delta.text == "late"


@pytest.mark.parametrize("stage", ["queued", "prefilling", "handing off", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "operator", "session", "deadline"])
def test_every_early_end_cancels_both_workers(new_world, out, stage, how):
    world = new_world()
    if stage != "queued":
        world.pair()
    to = world.submit(timeout_s=30.0)
    if stage in ("handing off", "decoding"):
        world.step("p", out("r1", [7], finish=0))
    if stage == "decoding":
        world.step("d", out("r1", [8], offset=1))
    if how == "cancel":
        world.handle(ev.StreamCancelled(to))
    elif how == "operator":
        world.handle(ev.RequestCancelled("r1"))
    elif how == "session":
        world.handle(ev.SessionLost(to.session))
    else:
        for _ in range(4):
            world.after(7.6)
            for worker_id in ("p", "d"):
                world.handle(ev.WorkerHeard((worker_id, 1)))
    assert world.core.num_requests == 0
    if stage == "queued":
        assert not world.commands["p"]
        assert not world.commands["d"]
    else:
        handoff_id = world.commands["p"][0].handoff.handoff_id
        for worker_id in ("p", "d"):
            assert world.commands[worker_id][-1] == cluster_pb2.CancelCommand(
                request_id="r1", attempt=1, handoff_id=handoff_id
            )
    if how == "session":
        assert "Finished" not in world.kinds(to)
    elif how == "deadline":
        assert isinstance(world.last(to).error, errors.DeadlineExceeded)
    else:
        assert world.last(to).reason == CANCELLED


def test_a_queued_request_fails_with_the_name_of_the_empty_pool(new_world):
    world = new_world()
    world.attach("p", common_pb2.ROLE_PREFILL)
    to = world.submit()
    for _ in range(8):
        world.after(7.6)
        world.handle(ev.WorkerHeard(("p", 1)))
    assert isinstance(world.last(to).error, errors.Unavailable)
    assert "no decode worker is attached" in str(world.last(to).error)


def test_queued_requests_start_when_workers_attach(new_world):
    world = new_world()
    world.submit()
    world.after(30.0)
    world.pair()
    assert len(world.commands["p"]) == 1


def test_full_queues_refuse_requests_with_a_retry_time(new_world):
    lanes = LanesConfig(interactive=InteractiveLaneConfig(max_queued=2))
    world = new_world(lanes=lanes, max_running_requests=3)
    first, _second, third = (world.submit() for _ in range(3))
    assert world.kinds(first) == ["Accepted"]
    assert world.last(third).error.reason == "QUEUE_FULL"
    assert world.last(third).error.retry_after_s > 0
    batch = world.submit(lane=common_pb2.LANE_BATCH)
    assert world.kinds(batch) == ["Accepted"]
    last = world.submit(lane=common_pb2.LANE_BATCH)
    assert world.last(last).error.reason == "TOO_MANY_REQUESTS"


def test_interactive_requests_go_first_then_requests_in_order_of_arrival(new_world, out):
    world = new_world(max_prefill_requests=1)
    for lane in (common_pb2.LANE_BATCH, common_pb2.LANE_BATCH, common_pb2.LANE_INTERACTIVE):
        world.submit(lane=lane)
    world.pair()
    for request_id in ("r3", "r1", "r2"):
        assert world.commands["p"][-1].spec.request_id == request_id
        world.step("p", out(request_id, [7], finish=STOP))


def test_requests_go_to_the_least_loaded_worker_of_each_pool(world, out):
    world.attach("p2", common_pb2.ROLE_PREFILL)
    world.attach("d2", common_pb2.ROLE_DECODE)
    for _ in range(4):
        world.submit()
    assert len(world.commands["p"]) == len(world.commands["p2"]) == 2
    targets = {
        command.spec.request_id: command.handoff.target
        for worker_id in ("p", "p2")
        for command in world.commands[worker_id]
    }
    assert sorted(targets.values()) == ["d.test:1", "d.test:1", "d2.test:1", "d2.test:1"]


def test_a_prompt_longer_than_the_model_length_is_refused(world):
    to = world.submit(num_prompt=1024)
    assert isinstance(world.last(to).error, errors.InvalidArgument)


def test_worker_failure_reaches_the_client_with_its_code(world):
    to = world.submit()
    failed = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    failed.failed.CopyFrom(errors.to_message(errors.FailedPrecondition("no such grammar")))
    world.step("p", failed)
    assert world.last(to).error.name == "FAILED_PRECONDITION"
    assert isinstance(world.commands["d"][-1], cluster_pb2.CancelCommand)


def test_closed_admission_refuses_requests_and_shutdown_fails_the_rest(world):
    running = world.submit()
    assert world.core.can_serve
    world.handle(ev.AdmissionClosed())
    assert not world.core.can_serve
    refused = world.submit()
    assert isinstance(world.last(refused).error, errors.Unavailable)
    world.handle(ev.ShutdownNow("the coordinator stopped"))
    assert isinstance(world.last(running).error, errors.Unavailable)
    assert world.core.num_requests == 0


def test_ended_requests_are_kept_up_to_a_bound(new_world):
    world = new_world(max_ended_requests=2)
    for _ in range(3):
        world.handle(ev.StreamCancelled(world.submit()))
    assert world.core.request("r1") is None
    assert [one.request_id for one in world.core.recently_ended()] == ["r3", "r2"]


def test_budget_stages_are_in_order_and_sum_to_the_total(world, out):
    world.now += 1.0
    to = world.submit(arrived_at=world.now - 0.010)
    handoff_id = world.commands["p"][0].handoff.handoff_id
    world.now += 0.150
    world.step("p", out("r1", [7], finish=0, timings={"queue_us": 5_000, "run_us": 140_000}))
    world.now += 0.010
    world.handle(
        ev.WorkerHandoff(
            ("p", 1),
            cluster_pb2.HandoffReport(
                request_id="r1",
                attempt=1,
                handoff_id=handoff_id,
                state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
                num_bytes=4096,
                exposed_us=2_000,
                transport="shm",
            ),
        )
    )
    world.now += 0.030
    timings = {"queue_us": 12_000, "run_us": 23_000, "handoff_wait_us": 9_000}
    world.step("d", out("r1", [8], offset=1, timings=timings))
    world.now += 0.020
    world.step("d", out("r1", [9], offset=2, finish=LENGTH))
    budget = world.last(to).budget
    stages = [(one.stage, one.duration_us, one.worker_id) for one in budget.stages]
    assert stages == [
        (common_pb2.STAGE_TOKENIZE, 10_000, ""),
        (common_pb2.STAGE_PREFILL_QUEUE, 5_000, "p"),
        (common_pb2.STAGE_PREFILL, 140_000, "p"),
        (common_pb2.STAGE_NETWORK, 5_000, ""),
        (common_pb2.STAGE_HANDOFF, 2_000, "d"),
        (common_pb2.STAGE_DECODE_QUEUE, 3_000, "d"),
        (common_pb2.STAGE_NETWORK, 12_000, ""),
        (common_pb2.STAGE_DECODE, 43_000, "d"),
    ]
    assert budget.ttft_us == 160_000
    assert budget.total_us == 220_000
    assert (budget.itl_p50_us, budget.itl_max_us) == (20_000, 40_000)
    assert world.core.stats.handoff_bytes == {"shm": 4096}
