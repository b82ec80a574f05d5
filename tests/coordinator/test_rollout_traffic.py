"""Which requests go to a canary, and which stay in the stable fleet."""

from __future__ import annotations

import math

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig, TenantConfig
from baton.v1 import common_pb2
from tests.coordinator.two_fleets import fleet_of_session

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_canary_gets_its_share_and_sessions_stick(two_fleets, share):
    cell = two_fleets(share)
    number = 600
    found = {}
    for session in range(number):
        to = cell.world.submit(session_id=f"s{session}", num_prompt=8)
        found[session] = cell.fleet_name(to)
        cell.world.handle(ev.RequestCancelled(f"r{to.stream}"))
    count = sum(one == "r2" for one in found.values())
    # Five standard deviations.
    assert abs(count - number * share) < 5 * math.sqrt(number * share * (1 - share))
    for session in range(0, number, 7):
        to = cell.world.submit(session_id=f"s{session}", num_prompt=8)
        assert cell.fleet_name(to) == found[session]
        cell.world.handle(ev.RequestCancelled(f"r{to.stream}"))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_first_tokens_of_the_canary_are_no_misses_of_the_stable_pools(two_fleets, share):
    """More stable workers would not make the canary faster."""
    cell = two_fleets(share)
    to = cell.world.submit()
    cell.world.after(5.0)
    cell.first_token(to)
    seen = dict(cell.core.observer().observe(ScalingConfig(), cell.world.now).lanes)["interactive"]
    assert seen.num_arrived == 1
    is_stable = cell.fleet_name(to) == "1"
    assert is_stable == (share == 0.0)
    assert (seen.num_first, seen.num_late) == (is_stable, is_stable)
    assert seen.ttft_s == (5.0 if is_stable else None)


def test_a_growing_share_keeps_the_sessions_that_it_had(two_fleets):
    cell = two_fleets(0.1)
    before = {name for name in range(200) if fleet_of_session(cell.world, name) == "r2"}
    cell.world.handle(ev.ShareRequested(0.4))
    after = {name for name in range(200) if fleet_of_session(cell.world, name) == "r2"}
    assert before < after


def test_a_fleet_without_a_rollout_gets_no_requests(two_fleets):
    cell = two_fleets(None)
    for _ in range(20):
        assert cell.fleet_name(cell.world.submit()) == "1"
    assert not any(len(worker.ledger) for worker in cell.core.workers if worker.fleet.name == "r2")


def test_the_error_names_the_attached_fleets_if_the_stable_one_has_no_worker(new_world):
    world = new_world()
    world.attach("p", PREFILL, revision="v7")
    world.attach("d", DECODE, revision="v7")
    assert not world.core.can_serve
    to = world.submit()
    world.wait(70)
    assert "revision '1' is the stable one, attached are ['v7']" in str(world.last(to).error)


def test_busy_workers_are_not_reported_as_missing(new_world):
    world = new_world(max_prefill_requests=1, max_decode_requests=1).pair()
    world.attach("p7", PREFILL, revision="v7")
    world.submit()
    to = world.submit()
    world.wait(70)
    assert str(world.last(to).error).startswith("every worker is busy: waited")


def test_fleets_that_clients_make_up_are_forgotten(new_world):
    world = new_world()
    for number in range(20):
        to = world.submit(known_token_ids=[1], revision=f"none-{number}")
        world.handle(ev.StreamCancelled(to))
    assert [fleet.name for fleet in world.core.fleets] == ["1"]
    assert len(world.core.placers) <= 1


def test_a_canary_that_serves_in_one_pool_only_gets_no_requests(two_fleets):
    cell = two_fleets(None)
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    refused = cell.core.rollouts.start_error(Revision("r2"), 1.0, {})
    assert isinstance(refused, errors.FailedPrecondition)
    assert "no decode worker of revision 'r2'" in str(refused)
    cell.world.attach("cd", DECODE, incarnation=2, revision="r2")
    cell.start(1.0)
    assert cell.fleet_name(cell.world.submit()) == "r2"
    cell.world.handle(ev.WorkerLost("cd", "was killed"))
    assert cell.fleet_name(cell.world.submit()) == "1"


def test_a_request_too_long_for_the_canary_stays_in_the_stable_fleet(two_fleets, say_hello):
    cell = two_fleets(None)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.max_model_len, model.revision = 64, "other weights"
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        cell.world.attach(name, role, incarnation=2, revision="r2", model=model)
    cell.start(1.0)
    assert cell.fleet_name(cell.world.submit(num_prompt=20)) == "r2"
    assert cell.fleet_name(cell.world.submit(num_prompt=80)) == "1"
    # The canary would end such an output early.
    for sampling, fleet in (
        ({"max_tokens": 44}, "r2"),
        ({"max_tokens": 45}, "1"),
        ({"max_tokens": None, "min_tokens": 44}, "r2"),
        ({"max_tokens": None, "min_tokens": 45}, "1"),
        ({"max_tokens": None}, "r2"),
    ):
        assert cell.fleet_name(cell.world.submit(num_prompt=20, sampling=sampling)) == fleet


def test_the_rate_limit_counts_outputs_by_the_stable_fleets_context_length(new_world, say_hello):
    world = new_world(tenants={"a": TenantConfig(tokens_per_s=1, burst_tokens=200)})
    model = common_pb2.ModelDescription()
    model.CopyFrom(say_hello("cp", PREFILL).model)
    model.max_model_len = 64
    world.attach("cp", PREFILL, revision="r2", model=model)
    world.attach("p", PREFILL)
    # Without max_tokens the output may fill the context, which exceeds the burst.
    world.submit(tenant="a", sampling={"max_tokens": None})
    to = world.submit(tenant="a")
    assert world.last(to).error.reason == "TENANT_RATE"


def test_an_adapter_that_the_canary_lacks_stays_in_the_stable_fleet(two_fleets, say_hello):
    cell = two_fleets(None)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.adapters.add(name="law")
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        cell.world.attach(name, role, incarnation=2, revision="r2", model=model)
    cell.start(1.0)
    assert cell.fleet_name(cell.world.submit(adapter="law")) == "r2"
    assert cell.fleet_name(cell.world.submit(adapter="poetry")) == "1"


@pytest.mark.parametrize(("takes_images", "fleet"), [(False, "1"), (True, "r2")])
def test_a_chat_with_images_stays_in_the_stable_fleet_if_the_canary_takes_none(
    two_fleets, say_hello, takes_images, fleet
):
    cell = two_fleets(None)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.takes_images = takes_images
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        cell.world.attach(name, role, incarnation=2, revision="r2", model=model)
    cell.start(1.0)
    image = common_pb2.PromptImage(id="cat", offset=1, num_tokens=4)
    assert cell.fleet_name(cell.world.submit(images=(image,))) == fleet
    assert cell.fleet_name(cell.world.submit()) == "r2"


def test_workers_of_one_fleet_must_be_alike_workers_of_two_fleets_need_not(world, say_hello):
    fingerprint = say_hello("x", PREFILL).fingerprint
    fingerprint.num_layers = 8
    world.attach("c", PREFILL, revision="r2", fingerprint=fingerprint)
    assert {one.id for one in world.core.workers} == {"p", "d", "c"}
    (refusal,) = world.attach("c2", DECODE, revision="r2")
    assert "fingerprint.num_layers is 4, here 8" in str(refusal.error)
    assert "both have worker.revision 'r2'" in str(refusal.error)
    model = say_hello("x", PREFILL).model
    model.vocab_size = 600
    (refusal,) = world.attach("c3", DECODE, revision="r3", model=model)
    assert "model.vocab_size is 600, here 512" in str(refusal.error)
    # Another revision would not help.
    assert "worker.revision" not in str(refusal.error)
    (refusal,) = world.attach("c4", DECODE, revision="a b")
    assert isinstance(refusal.error, errors.InvalidArgument)


def test_a_request_that_waited_too_long_for_the_canary_goes_to_the_stable_fleet(two_fleets):
    cell = two_fleets(1.0, max_prefill_requests=1, max_decode_requests=1)
    running = [cell.world.submit() for _ in range(2)]
    waiting = [cell.world.submit() for _ in range(4)]
    assert [cell.fleet_name(to) for to in running + waiting] == ["r2"] * 6
    cell.world.wait(59)
    assert all(cell.request(to).state is RequestState.QUEUED for to in waiting)
    cell.world.wait(1)
    # The stable fleet has room for two.
    assert [cell.fleet_name(to) for to in waiting] == ["1"] * 4
    assert [cell.request(to).state for to in waiting] == (
        [RequestState.PREFILLING] * 2 + [RequestState.QUEUED] * 2
    )
    # Its room becomes free in time for one more.
    cell.first_token(waiting[0])
    cell.token(waiting[0], finish=STOP)
    assert cell.request(waiting[2]).state is RequestState.PREFILLING
    cell.world.wait(1)
    error = cell.world.last(waiting[3]).error
    assert (error.reason, str(error)) == ("QUEUE_TIMEOUT", "every worker is busy: waited 60 s")


def test_a_busy_canary_takes_at_most_half_of_the_places_in_a_lane(two_fleets):
    lanes = LanesConfig(interactive=InteractiveLaneConfig(max_queued=5))
    cell = two_fleets(1.0, max_prefill_requests=1, max_decode_requests=1, lanes=lanes)
    fleets = [cell.fleet_name(cell.world.submit()) for _ in range(9)]
    # Two run on the canary and three wait for it; two run on the stable fleet and two wait for it.
    assert fleets == ["r2"] * 5 + ["1"] * 4
    assert cell.world.last(cell.world.submit()).error.reason == "QUEUE_FULL"


def test_an_output_is_resumed_in_a_busy_canary_that_began_it(two_fleets):
    lanes = LanesConfig(interactive=InteractiveLaneConfig(max_queued=2))
    cell = two_fleets(1.0, max_prefill_requests=1, max_decode_requests=1, lanes=lanes)
    cell.begin(session=2, request_id="r1")
    cell.world.handle(ev.SessionLost(2))
    fleets = [cell.fleet_name(cell.world.submit()) for _ in range(4)]
    assert fleets == ["r2", "r2", "r2", "1"]
    cell.world.submit(3, request_id="r1", known_token_ids=[7], known_text_chars=1)
    assert cell.core.running_request("r1").fleet.name == "r2"


def test_a_request_that_only_the_canary_could_compute_now_fails_with_its_name(two_fleets):
    cell = two_fleets(1.0, max_prefill_requests=1, max_decode_requests=1)
    for name in ("p", "p2", "d", "d2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    waiting = [cell.world.submit() for _ in range(3)][2]
    cell.world.wait(60)
    told = "every worker is busy: waited 60 s for revision 'r2'"
    assert str(cell.world.last(waiting).error) == told


def test_a_full_canary_does_not_delay_the_stable_fleet(two_fleets):
    cell = two_fleets(0.5, max_prefill_requests=2, max_decode_requests=2)
    waiting = []
    for number in range(40):
        to = cell.world.submit(session_id=f"s{number}")
        request = cell.request(to)
        if request is None or request.ended:
            continue
        if request.waits:
            waiting.append(request)
        elif request.fleet.name == "1":
            cell.world.handle(ev.RequestCancelled(request.id))
    # The canary's requests wait; no request of the stable fleet waits behind them.
    assert waiting
    assert {one.fleet.name for one in waiting} == {"r2"}
