"""Workers attach, are refused, drain and get lost; handoff reports are counted."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from baton.coordinator.server.metrics import registry
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.coordinator.state.scaling_config import PoolLimits
from baton.runtime import errors
from baton.runtime.config import BatonConfig
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.launched_world import Launched

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def test_silent_worker_is_lost_and_fenced(world):
    to = world.submit()
    world.after(5.0)
    world.handle(ev.WorkerHeard(("d", 1)))
    world.after(6.0)
    assert world.core.request("r1").state is RequestState.RECOVERING
    assert world.kinds(to) == ["Accepted"]
    fence = world.membership[-1]
    assert isinstance(fence, ev.FenceWorker)
    assert fence.worker == ("p", 1)
    (refusal,) = world.attach("p", PREFILL)
    assert isinstance(refusal.error, errors.Aborted)


def test_disconnected_worker_may_come_back(world, out):
    to = world.submit()
    world.handle(ev.WorkerDetached(("p", 1)))
    assert not world.core.can_serve
    world.after(9.0)
    world.handle(ev.WorkerHeard(("d", 1)))
    world.attach("p", PREFILL)
    world.after(5.0)
    world.step("p", out("r1", [7], finish=common_pb2.FINISH_REASON_STOP))
    assert world.tokens(to) == [7]


@pytest.mark.parametrize(("name", "role"), [("p", PREFILL), ("d", DECODE)])
def test_an_elastic_cell_can_serve_with_one_worker_of_either_role(new_world, out, name, role):
    world = new_world(elastic=True)
    assert not world.core.can_serve
    world.attach(name, role)
    assert world.core.can_serve
    to = world.submit()
    world.step(name, out("r1", [7], finish=common_pb2.FINISH_REASON_STOP))
    assert world.kinds(to) == ["Accepted", "Delta", "Finished"]
    world.handle(ev.WorkerDetached((name, 1)))
    assert not world.core.can_serve


def test_an_elastic_cell_can_serve_when_either_pool_starts_a_worker_for_a_request(new_world):
    limits = {"prefill": PoolLimits(1, 4)}
    for elastic in (False, True):
        world = {"elastic": elastic}
        made = Launched(new_world, 0, 0, autoscale=True, limits=limits, world=world)
        assert made.core.can_serve is elastic


@pytest.mark.parametrize(("elastic", "num_counted"), [(False, 4), (True, 7)])
def test_decode_steps_are_those_of_the_workers_that_decode(new_world, elastic, num_counted):
    """Each step counts once per output."""
    world = new_world(elastic=elastic).pair()
    for name, num_decodes in (("p", 3), ("d", 4)):
        step = cluster_pb2.StepSample(num_decodes=num_decodes, duration_us=20_000)
        prompt = cluster_pb2.StepSample(num_prefill_tokens=64, duration_us=90_000)
        load = cluster_pb2.LoadReport(num_steps=2, num_running=4, steps=[step, prompt])
        world.handle(ev.LoadReported((name, 1), load))
    window = world.core.stats.recent.window(world.now)
    assert (window.steps.num, window.mixed_steps.num) == (num_counted, 0)


def test_cold_starts_are_counted_and_timed_by_stage(world):
    stages = {"process": 400, "weights": 30_000, "unheard_of": 5}
    world.attach("new", DECODE, startup_ms=stages)
    # A worker that reconnects, or that served another coordinator before, is no cold start.
    world.handle(ev.WorkerDetached(("new", 1)))
    world.attach("new", DECODE, startup_ms=stages)
    world.attach("old", DECODE, startup_ms=stages, generation=7)
    shown = generate_latest(registry(world.core, BatonConfig())).decode()
    # The fixture attached one worker to each pool; both count as cold starts.
    assert 'baton_cold_starts_total{pool="prefill"} 1.0' in shown
    assert 'baton_cold_starts_total{pool="decode"} 2.0' in shown
    assert 'baton_cold_start_seconds_count{stage="weights"} 1.0' in shown
    assert 'baton_cold_start_seconds_sum{stage="weights"} 30.0' in shown
    assert 'baton_cold_start_seconds_count{stage="other"} 1.0' in shown
    assert "unheard_of" not in shown


def test_nothing_is_dispatched_to_a_disconnected_or_draining_worker(world):
    world.handle(ev.WorkerDetached(("p", 1)))
    world.submit()
    assert not world.commands["p"]
    world.attach("p", PREFILL)
    assert len(world.commands["p"]) == 1
    world.handle(ev.WorkerChanged(("p", 1), draining()))
    world.submit()
    assert len(world.commands["p"]) == 1


def draining() -> cluster_pb2.WorkerStateChanged:
    return cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_DRAINING)


def last_command(world, worker_id: str) -> str:
    return type(world.commands[worker_id][-1]).__name__ if world.commands[worker_id] else ""


def test_a_draining_worker_is_released_when_its_last_request_has_ended(world, out):
    to = world.submit()
    world.handle(ev.DrainRequested("d", 5.0, "scale down"))
    assert last_command(world, "d") == "DrainCommand"
    world.handle(ev.WorkerChanged(("d", 1), draining()))
    assert last_command(world, "d") == "DrainCommand"
    world.step("p", out("r1", [7], finish=0))
    assert last_command(world, "d") == "DecodeCommand"
    world.step("d", out("r1", [8], offset=1, finish=common_pb2.FINISH_REASON_STOP))
    assert world.tokens(to) == [7, 8]
    assert last_command(world, "d") == "ReleaseCommand"
    world.handle(ev.WorkerChanged(("d", 1), draining()))
    world.attach("d", DECODE, state=cluster_pb2.WORKER_STATE_DRAINING)
    assert [type(one).__name__ for one in world.commands["d"]].count("ReleaseCommand") == 1


def test_a_drain_and_a_flip_last_when_a_worker_returns_from_another_coordinator(world, say_hello):
    def return_from_elsewhere(name):
        hello = say_hello(name, DECODE, generation=99)
        world.handle(ev.WorkerAttached(hello, returns=True, forgets=True))
        return world.core.workers.by_id(name)

    world.attach("d2", DECODE)
    world.handle(ev.DrainRequested("d2", 5.0, "scale down"))
    assert return_from_elsewhere("d2").state == cluster_pb2.WORKER_STATE_DRAINING
    assert last_command(world, "d2") == "DrainCommand"
    assert world.core.workers.by_id("d2").leaves_by < float("inf")
    world.attach("d3", DECODE)
    world.handle(ev.FlipRequested("d3", PREFILL))
    world.handle(ev.WorkerDetached(("d3", 1)))
    assert return_from_elsewhere("d3").next_role == PREFILL


def test_an_idle_worker_is_released_once_it_reports_that_it_drains(world):
    world.handle(ev.DrainRequested("d", 5.0, "scale down"))
    world.handle(ev.WorkerDetached(("d", 1)))
    # The Hello may be older than the DrainCommand; the worker must get no new request.
    world.attach("d", DECODE)
    world.submit()
    assert last_command(world, "d") == "DrainCommand"
    assert not world.commands["p"]
    world.handle(ev.WorkerChanged(("d", 1), draining()))
    assert last_command(world, "d") == "ReleaseCommand"


def test_restarted_worker_replaces_its_older_incarnation(world):
    to = world.submit()
    world.attach("p", PREFILL, incarnation=2)
    again = world.commands["p"][-1].spec
    assert (again.request_id, again.attempt) == ("r1", 2)
    assert world.kinds(to) == ["Accepted"]
    (refusal,) = world.attach("p", PREFILL, incarnation=1)
    assert isinstance(refusal.error, errors.AlreadyExists)


def test_a_stopped_worker_is_removed_at_once(world):
    to = world.submit()
    change = cluster_pb2.WorkerStateChanged(
        state=cluster_pb2.WORKER_STATE_STOPPED, reason="engine died"
    )
    world.handle(ev.WorkerChanged(("p", 1), change))
    assert world.kinds(to) == ["Accepted"]
    assert [worker.id for worker in world.core.workers] == ["d"]


def test_a_worker_of_another_model_is_refused_with_both_values(world):
    (refusal,) = world.attach("x", DECODE, model=common_pb2.ModelDescription(name="other"))
    assert isinstance(refusal.error, errors.FailedPrecondition)
    assert "model.name is 'other', here 'demo'" in str(refusal.error)


def test_a_worker_with_another_kv_layout_is_refused_with_both_values(world):
    fingerprint = kv_transfer_pb2.KvFingerprint()
    fingerprint.CopyFrom(world.core.workers.by_id("p").hello.fingerprint)
    fingerprint.block_size_tokens = 32
    (refusal,) = world.attach("x", DECODE, fingerprint=fingerprint)
    assert isinstance(refusal.error, errors.FailedPrecondition)
    assert "fingerprint.block_size_tokens is 32, here 16" in str(refusal.error)


def test_workers_with_one_kv_shard_match_at_any_tensor_parallel_size(world):
    """Tensor-parallel sizes may differ while the KV cache has one shard, as with MLA latents."""
    fingerprint = kv_transfer_pb2.KvFingerprint()
    fingerprint.CopyFrom(world.core.workers.by_id("p").hello.fingerprint)
    fingerprint.tp_size, fingerprint.num_shards = 8, 1
    world.attach("x", DECODE, fingerprint=fingerprint)
    assert world.core.workers.by_id("x") is not None
    fingerprint.num_shards = 2
    (refusal,) = world.attach("y", DECODE, fingerprint=fingerprint)
    assert "fingerprint.tp_size is 8, here 1" in str(refusal.error)


def test_workers_match_if_their_ranks_divide_the_same_heads(world):
    fingerprint = kv_transfer_pb2.KvFingerprint()
    fingerprint.CopyFrom(world.core.workers.by_id("p").hello.fingerprint)
    # Four ranks: neighbours hold the same head.
    fingerprint.tp_size, fingerprint.num_shards = 4, 2
    fingerprint.num_kv_heads //= 2
    fingerprint.block_bytes //= 2
    world.attach("x", DECODE, fingerprint=fingerprint)
    assert world.core.workers.by_id("x") is not None
    fingerprint.dtype = "bfloat16"
    (refusal,) = world.attach("y", DECODE, fingerprint=fingerprint)
    assert "fingerprint.dtype is 'bfloat16'" in str(refusal.error)
    assert "tp_size" not in str(refusal.error)


def test_only_workers_with_a_draft_must_have_the_same_one(world):
    """Prefill workers may do without the draft of the decode workers."""
    fingerprint = kv_transfer_pb2.KvFingerprint()
    fingerprint.CopyFrom(world.core.workers.by_id("p").hello.fingerprint)
    fingerprint.draft_revision = "eagle w1"
    fingerprint.draft_groups.add(
        kind=kv_transfer_pb2.KvGroup.KIND_FULL, num_layers=1, num_kv_heads=2,
        block_size_tokens=16, block_bytes=1024,
    )  # fmt: skip
    for name in ("x", "y"):
        world.attach(name, DECODE, fingerprint=fingerprint)
        assert world.core.workers.by_id(name) is not None
    fingerprint.draft_revision = "eagle w2"
    (refusal,) = world.attach("z", DECODE, fingerprint=fingerprint)
    assert "fingerprint.draft_revision is 'eagle w2', here 'eagle w1'" in str(refusal.error)


def test_a_worker_with_another_adapter_revision_is_refused(world):
    """The KV caches of two adapter revisions would be confused under one adapter name."""
    model = common_pb2.ModelDescription()
    model.CopyFrom(world.core.workers.by_id("p").hello.model)
    model.adapters.add(name="poet", revision="r7")
    (refusal,) = world.attach("x", DECODE, model=model)
    assert isinstance(refusal.error, errors.FailedPrecondition)
    assert "model.adapters differ: poet (r7, here missing)" in str(refusal.error)


def test_only_the_first_differing_adapters_are_named(new_world):
    world = new_world()
    descriptions = []
    for salt in ("a", "b"):
        model = common_pb2.ModelDescription(
            name="demo", revision="r1", max_model_len=1024, vocab_size=512
        )
        model.adapters.add(name="poet", revision="r7")
        for number in range(250):
            model.adapters.add(name=f"customer-{number}", revision=f"{salt}{number}")
        descriptions.append(model)
    world.attach("p", PREFILL, model=descriptions[0])
    (refusal,) = world.attach("p2", PREFILL, model=descriptions[1])
    told = str(refusal.error)
    assert "model.adapters differ: customer-0 (b0, here a0), customer-1 (b1, here a1)" in told
    assert " and 247 more; " in told
    assert "poet" not in told


def test_block_hashes_of_a_prompt_differ_between_adapters(world):
    found = set[int]()
    for adapter in ("", "poet", "clerk"):
        to = world.submit(num_prompt=64, adapter=adapter)
        submission = world.core.request(f"r{to.stream}").submission
        found |= set(world.core.placers.of(world.core.fleets.stable).prompts.hashes(submission))
    assert len(found) == 3 * 4


def test_a_request_from_before_the_first_worker_goes_where_its_prefix_is(new_world):
    """No worker had reported its block size yet, so the prompt could not be hashed."""
    world = new_world()
    world.submit(num_prompt=640)
    for name in ("p", "p2"):
        world.attach(name, PREFILL)
    stored = block_hashes(range(640), 16, root_of("", ""))
    world.handle(ev.WorkerCache(("p2", 1), cluster_pb2.CacheEvents(stored=stored)))
    world.attach("d", DECODE)
    request = world.core.request("r1")
    assert request.prefill == ("p2", 1)
    assert request.placement_prediction.hits.num_device > 600


def test_unknown_error_codes_and_refusal_reasons_are_handled(world, out):
    to = world.submit()
    failed = out("r1")
    failed.failed.code, failed.failed.message = 99, "new"
    for attempt in range(1, 5):
        failed.attempt = attempt
        world.step("p", failed)
    why = "worker p failed the request with code 99: new"
    assert str(world.last(to).error).endswith(f"without a new token: {why}")
    report = cluster_pb2.HandoffReport(
        handoff_id=b"h", state=kv_transfer_pb2.HANDOFF_STATE_FAILED, reason=99
    )
    world.handle(ev.WorkerHandoff(("p", 1), report))
    assert dict(world.core.stats.handoff_failures) == {"other": 1}


def test_a_flip_moves_a_worker_to_the_other_pool(world):
    world.attach("p2", PREFILL)
    change = cluster_pb2.WorkerStateChanged(
        state=cluster_pb2.WORKER_STATE_SERVING, role=common_pb2.ROLE_DECODE
    )
    world.handle(ev.WorkerChanged(("p2", 1), change))
    assert {worker.id for worker in world.core.workers if worker.role == DECODE} == {"d", "p2"}


def test_messages_of_a_lost_incarnation_change_nothing(world, out):
    to = world.submit()
    world.handle(ev.WorkerLost("p", "was killed"))
    world.step("p", out("r1", [7]))
    world.handle(ev.WorkerDetached(("p", 1)))
    assert world.kinds(to) == ["Accepted"]


def test_reports_from_both_workers_count_as_one_handoff(world):
    world.submit()
    handoff_id = world.commands["p"][0].handoff.handoff_id
    # The receiving worker reports first; only the sending worker knows the number of fallbacks.
    for worker_id, num_fallbacks in (("d", 0), ("p", 2)):
        report = cluster_pb2.HandoffReport(
            request_id="r1",
            attempt=1,
            handoff_id=handoff_id,
            state=kv_transfer_pb2.HANDOFF_STATE_FAILED,
            reason=kv_transfer_pb2.REFUSAL_REASON_CHECKSUM,
            num_fallbacks=num_fallbacks,
        )
        world.handle(ev.WorkerHandoff((worker_id, 1), report))
    assert dict(world.core.stats.handoff_failures) == {"checksum": 1}
    assert world.core.stats.num_handoff_fallbacks == 2


def test_a_committed_handoff_that_could_not_be_loaded_counts_as_failed(world):
    for worker_id, state, reason in (
        ("p", kv_transfer_pb2.HANDOFF_STATE_COMMITTED, 0),
        ("d", kv_transfer_pb2.HANDOFF_STATE_FAILED, kv_transfer_pb2.REFUSAL_REASON_CHECKSUM),
        ("d", kv_transfer_pb2.HANDOFF_STATE_FAILED, kv_transfer_pb2.REFUSAL_REASON_CHECKSUM),
        ("p", kv_transfer_pb2.HANDOFF_STATE_COMMITTED, 0),
    ):
        report = cluster_pb2.HandoffReport(handoff_id=b"1", state=state, reason=reason)
        world.handle(ev.WorkerHandoff((worker_id, 1), report))
    assert dict(world.core.stats.handoff_failures) == {"checksum": 1}
    assert dict(world.core.stats.handoffs) == {"none": 1}


def test_handoffs_are_counted_by_transport_and_unknown_names_as_other(world):
    for number, transport in enumerate(("shm", "shm", "grpc", "", "x" * 1000)):
        report = cluster_pb2.HandoffReport(
            handoff_id=bytes([number]),
            state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
            num_bytes=10,
            exposed_us=300,
            transport=transport,
        )
        world.handle(ev.WorkerHandoff(("p", 1), report))
    stats = world.core.stats
    assert stats.handoffs == {"shm": 2, "grpc": 1, "none": 1, "other": 1}
    assert stats.handoff_bytes == {"shm": 20, "grpc": 10, "none": 10, "other": 10}
    assert dict(stats.handoff_exposed.buckets())["0.0005"] == 5


def test_workers_are_released_in_the_order_in_which_they_started_to_drain(new_world):
    """The release order is deterministic: it must not be the iteration order of a set."""
    world = new_world(max_running_requests=99)
    names = [f"{kind}{number}" for number in range(4) for kind in "pd"]
    for name in names:
        world.attach(name, PREFILL if name[0] == "p" else DECODE)
    while not all(len(worker.ledger) for worker in world.core.workers):
        world.submit()
    for name in names:
        world.handle(ev.WorkerChanged((name, 1), draining()))
    effects = world.handle(ev.SessionLost(1))
    assert names == [
        one.worker[0]
        for one in effects
        if isinstance(one, ev.SendCommand) and isinstance(one.command, cluster_pb2.ReleaseCommand)
    ]
