"""The choice of workers in elastic cells, on one view."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from baton.coordinator.routing.choices import DecodeChoice, NoPlacement, PrefillChoice
from baton.coordinator.routing.elastic.candidates import Demand, ElasticCandidates, Urgency
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import PromptHits, RequestState, WorkerKey
from baton.runtime.config import LaneTargetsConfig, TargetsConfig, parse
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.fixed_latency import FixedLatency
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape
from tests.coordinator.worker_choices import elastic_choices

BLOCK = 16
# A prompt token takes 0.1 ms. A decode step takes 30 ms, 1 ms per request and 1 us per KV token.
MODEL = LatencyModel(0.02, 1e-4, 0.0, 0.030, 0.001, 1e-6)
ITL_S = 0.05
FULL, BUSY = NoPlacement.FULL, NoPlacement.BUSY
# Most requests of 1,000 tokens that decode on one worker within 92 % of the ITL target.
MOST = 8
# The same within 85 %, the limit where workers with decodes compute prompts soon enough.
MOST_BESIDE_PROMPTS = 6


def change(world, **changes) -> None:
    targets = replace(world.core.targets.by_lane["interactive"], **changes)
    world.handle(ev.TargetsRequested({"interactive": targets}))


def key(name: str) -> WorkerKey:
    return name, 1


def is_placed(found) -> bool:
    return not isinstance(found, NoPlacement)


class Cell:
    """A view with workers, the choices, and the requests that were placed."""

    def __init__(
        self, *workers: str, kv_tokens: int = 65536, itl_s: float = ITL_S, longest_gap: float = 1.2
    ) -> None:
        self.clock = CoreClock()
        self.view = FleetView(self.clock, 256, 256, StepTargets(itl_s, longest_gap * itl_s, 0.2))
        self.prompts = PromptDemand()
        self.choices = elastic_choices(self.view, prompts=self.prompts)
        for name in workers:
            traits = WorkerTraits(FixedLatency(MODEL), "h", kv_tokens, BLOCK)
            pool = Pool.PREFILL if name.startswith("prefill") else Pool.DECODE
            self.view.add_worker(key(name), traits, pool)
        self._num_placed = 0

    def match(self, prompt=()):
        return self.view.match(block_hashes(list(prompt), BLOCK))

    def place(self, num_tokens: int = 1000, prompt=(), **demand):
        return self.choices.place(self.match(prompt), self.demand(num_tokens, **demand))

    def is_late(self, num_tokens: int, due_in_s: float) -> bool:
        demand = {"due_in_s": due_in_s, "others_go_first_if_late": True}
        return self.place(num_tokens, **demand) is NoPlacement.LATE

    @staticmethod
    def demand(num_tokens: int, **changes) -> Demand:
        values = {
            "num_output_tokens": 100,
            "num_mean_tokens": num_tokens,
            "due_in_s": math.inf,
            "itl_s": ITL_S,
        }
        return Demand(num_tokens=num_tokens, **(values | changes))

    def start(
        self, num_tokens: int = 1000, *, computed: bool = True, due_at: float = math.inf, **demand
    ):
        """Places a request; its prompt is computed unless `computed` is false."""
        found = self.place(num_tokens, **demand)
        assert is_placed(found)
        name = f"r{self._num_placed}"
        self._num_placed += 1
        if found.sample is not None:
            self.choices.begins(found.sample)
        self.view.assign_prefill(name, found.prefill, [], due_at=due_at)
        if found.decode is not None:
            self.view.assign_decode(
                name, found.decode, is_interactive=True, num_mean_tokens=num_tokens
            )
        if computed:
            self.view.first_token(name, found.prefill.worker, found.decode.worker)
        self.view.check_integrity()
        return found

    def num_decodes(self) -> list[int]:
        entries = (self.view.loads.get(key(name)) for name in "abcd")
        return [entry.num_decodes for entry in entries if entry is not None]


def add_decodes(cell: Cell, worker: str, count: int, num_kv_tokens: int = 1000) -> None:
    """Adds interactive outputs with this many KV tokens each to a worker."""
    for number in range(count):
        name, choice = f"{worker}-{number}", DecodeChoice(key(worker), 0.0, num_kv_tokens, 1)
        cell.view.assign_decode(name, choice, is_interactive=True, num_mean_tokens=num_kv_tokens)
        cell.view.first_token(name, None, choice.worker)


def add_prompts(cell: Cell, work_s: float, target_s: float, rate: float = 0.01) -> None:
    """Adds the prompts of the last minutes, which came at this rate per second."""
    num_prompts = max(40, round(120 * rate))
    began_at = cell.view.now - num_prompts / rate
    for number in range(num_prompts):
        cell.prompts.add(work_s, target_s, began_at + number / rate)


@pytest.mark.parametrize(
    ("work_s", "target_s", "rate", "most"),
    [
        pytest.param(0.02, 1.0, 0.01, MOST_BESIDE_PROMPTS, id="short"),
        pytest.param(0.5, 1.0, 0.01, MOST, id="long"),
        pytest.param(0.02, 0.05, 0.01, MOST, id="urgent"),
        pytest.param(0.02, 1.0, 100, MOST, id="many"),
        pytest.param(0.02, math.inf, 0.01, MOST, id="no target"),
    ],
)
def test_decodes_share_more_workers_if_these_compute_prompts_soon_enough(
    work_s, target_s, rate, most
):
    cell = Cell("a", "b")
    add_prompts(cell, work_s, target_s, rate)
    for _ in range(MOST):
        cell.start()
    assert max(cell.num_decodes()) == most


def test_decodes_share_few_workers_for_a_while_after_a_late_prompt():
    cell = Cell("a", "b")
    add_prompts(cell, 0.02, 1.0)
    for _ in range(MOST_BESIDE_PROMPTS):
        cell.start()
    cell.prompts.was_late(cell.view.now)
    cell.start()
    assert sorted(cell.num_decodes()) == [0, MOST_BESIDE_PROMPTS + 1]
    cell.clock.now += 60
    cell.start()
    assert sorted(cell.num_decodes()) == [1, MOST_BESIDE_PROMPTS + 1]


@pytest.mark.parametrize(
    "workers", [("prefill-a", "decode-b"), ("prefill-a", "prefill-b"), ("decode-a", "decode-b")]
)
def test_decodes_share_one_worker_and_the_other_computes_prompts_whatever_the_pools(workers):
    cell = Cell(*workers)
    decoder = cell.start().decode.worker
    for _ in range(MOST - 1):
        found = cell.start()
        assert found.decode.worker == decoder
        assert found.prefill.worker != decoder


def test_a_prompt_beside_decodes_pays_no_base_of_its_own():
    """A step that computes prompts and decodes is one forward pass."""
    cell = Cell("a")
    alone_s = cell.place().prefill.work_s
    cell.start()
    speed = cell.view.loads.get(key("a")).prompt_speed
    assert cell.place().prefill.work_s * speed == pytest.approx(alone_s - MODEL.prefill_base_s)


def test_decodes_are_spread_evenly_over_the_fewest_workers_that_hold_them():
    cell = Cell("a", "b", "c", "d")
    for _ in range(2 * MOST):
        cell.start()
    assert sorted(cell.num_decodes()) == [0, 0, MOST, MOST]
    cell.start()
    assert sorted(cell.num_decodes()) == [0, 1, MOST, MOST]
    for _ in range(MOST - 4):
        cell.start()
    # Three workers are needed now, so the emptiest gets the next ones.
    assert sorted(cell.num_decodes()) == [0, MOST - 3, MOST, MOST]


def test_outputs_that_have_grown_beyond_their_prediction_fill_their_worker():
    cell = Cell("a", "b")
    add_decodes(cell, "a", MOST - 1)
    assert cell.place().decode.worker == key("a")
    cell.view.record_tokens("a-0", key("a"), 3000)
    # The others are shorter than predicted so far.
    assert cell.place().decode.worker == key("a")
    for number in range(1, MOST - 1):
        cell.view.record_tokens(f"a-{number}", key("a"), 1000)
    assert cell.place().decode.worker == key("b")
    cell.view.check_integrity()
    cell.view.release("a-0", None, key("a"))
    assert cell.place().decode.worker == key("a")
    cell.view.check_integrity()


def test_steps_near_the_itl_target_are_predicted_without_the_growth_of_outputs():
    cell = Cell("a", "b", itl_s=0.04, longest_gap=3)
    add_decodes(cell, "a", 1)
    step_s = cell.view.loads.entries[key("a")].mean_step_s()
    cell.view.record_tokens("a-0", key("a"), 3000)
    assert cell.view.loads.entries[key("a")].mean_step_s() == step_s


def test_steps_near_the_itl_target_are_shared_by_all_workers_if_gaps_are_long():
    """A step with one stream takes 31 ms."""
    cell = Cell("a", "b", itl_s=0.04, longest_gap=3)
    for number in range(8):
        found = cell.start(itl_s=0.04)
        assert found.prefill.worker == found.decode.worker
        assert abs(cell.num_decodes()[0] - cell.num_decodes()[1]) <= 1, number
    default = Cell("a", "b", itl_s=0.04)
    decoder = default.start(itl_s=0.04).decode.worker
    found = default.start(itl_s=0.04)
    assert found.decode.worker == decoder
    assert found.prefill.worker != decoder


def test_with_long_gaps_a_short_prompt_behind_a_long_one_is_computed_where_it_is_decoded():
    cell = Cell("a", "b", longest_gap=3)
    decoder = cell.start().decode.worker
    # On the other worker, the first token does not wait for a decode step.
    assert cell.place(64).prefill.worker != decoder
    long = cell.start(8000, computed=False)
    assert long.decode.worker == decoder
    assert long.prefill.worker != decoder
    short = cell.place(64)
    assert short.prefill.worker == short.decode.worker == decoder


def test_a_request_waits_when_one_more_decode_would_break_the_itl_target():
    cell = Cell("a")
    for _ in range(100):
        if cell.place() is FULL:
            break
        cell.start()
    # 30 ms, and 2 ms per request.
    assert cell.num_decodes() == [10]
    # After a long wait it is placed in any case.
    assert is_placed(cell.place(urgency=Urgency.OVERDUE))


def test_a_request_without_a_handoff_goes_where_its_output_keeps_the_itl_target():
    cell = Cell("full", "other")
    add_decodes(cell, "full", 10)
    prompt = list(range(1600))
    events = cluster_pb2.CacheEvents(stored=block_hashes(prompt, BLOCK))
    cell.view.apply_cache(key("full"), events)
    match = cell.match(prompt)
    found = cell.choices.place_on_one(match, cell.demand(len(prompt)))
    assert found.prefill.worker == found.decode.worker == key("other")
    add_decodes(cell, "other", 12)
    # No worker keeps the target: the one with the shortest steps gets the request.
    found = cell.choices.place_on_one(match, cell.demand(len(prompt), urgency=Urgency.OVERDUE))
    assert found.prefill.worker == found.decode.worker == key("full")


def test_an_itl_target_that_no_worker_can_keep_makes_no_request_wait():
    cell = Cell("a", "b")
    for _ in range(20):
        cell.start(itl_s=0.02)
    assert sum(cell.num_decodes()) == 20


def test_a_prompt_goes_where_it_is_computed_soonest():
    cell = Cell("a", "b")
    decoder = cell.start().decode.worker
    reader = cell.start(1500, computed=False).prefill
    assert reader.worker != decoder
    # 150 ms of work lie before it there. Beside a decode it would take three times as long.
    assert cell.start(1600, computed=False).prefill.worker == reader.worker
    # Now 300 ms lie before a long prompt, and it waits. A short one overtakes.
    assert cell.place(1700) is BUSY
    assert is_placed(cell.place(100))


def test_a_prefix_hit_outweighs_an_idle_worker():
    cell = Cell("a", "b")
    prompt = list(range(1600))
    events = cluster_pb2.CacheEvents(stored=block_hashes(prompt, BLOCK))
    cell.view.apply_cache(key("b"), events)
    found = cell.place(len(prompt), prompt)
    assert found.prefill.worker == key("b")
    assert found.prefill.num_work_tokens == BLOCK
    assert found.prefill.hits.num_device == 1600 - BLOCK


def test_a_request_is_late_when_no_worker_can_be_in_time():
    cell = Cell("a", "b")
    assert not cell.is_late(4000, due_in_s=0.5)
    assert cell.is_late(6000, due_in_s=0.5)
    cell.start(4000, computed=False)
    # The other worker decodes nothing and computes nothing.
    assert not cell.is_late(4000, due_in_s=0.5)
    cell.start(4000, computed=False)
    assert cell.is_late(4000, due_in_s=0.5)
    assert not cell.is_late(4000, due_in_s=5.0)


def test_a_late_request_gets_only_a_fast_worker_without_prompts():
    cell = Cell("a", "b")
    for _ in range(MOST):
        decoder = cell.start().decode.worker
    assert cell.place(urgency=Urgency.YIELDS).prefill.worker != decoder
    cell.start(500, computed=False)
    assert cell.place(urgency=Urgency.YIELDS) is BUSY
    assert is_placed(cell.place(urgency=Urgency.OVERDUE))


def test_overdue_prompts_are_behind_a_prompt_that_can_be_in_time():
    cell = Cell("a")
    for name in "xyz":
        cell.view.assign_prefill(name, PrefillChoice(key("a"), 0.0, 0.15, 1500), [], due_at=1)
    assert cell.place(1600) is BUSY
    for name in "xyz":
        cell.view.release(name, key("a"), None)
        cell.view.assign_prefill(name, PrefillChoice(key("a"), 0.0, 0.15, 1500), [], due_at=-1)
    found = cell.place(1600).prefill
    # Up to 100 ms of the step under way are left.
    assert found.work_s < found.ttft_s <= found.work_s + 0.1


def test_half_a_step_without_decodes_may_be_left_before_a_shorter_prompt():
    cell = Cell("a")
    choice = PrefillChoice(key("a"), 0.0, 0.5, 5000)
    cell.view.assign_prefill("long", choice, [])
    for prompt_step_s in (0.2, 0.1):
        cell.view.loads.set_step_targets(StepTargets(ITL_S, ITL_S, prompt_step_s))
        found = cell.place(100).prefill
        assert found.ttft_s - found.work_s == pytest.approx(prompt_step_s / 2)


def test_a_worker_gets_one_late_request_at_a_time_even_after_a_long_wait():
    cell = Cell("a")
    cell.start(1500, computed=False, due_at=-1.0)
    assert cell.place(urgency=Urgency.OVERDUE) is BUSY
    assert is_placed(cell.place(urgency=Urgency.CONTINUES))
    assert is_placed(cell.place())


def test_an_output_whose_first_token_was_late_keeps_other_late_requests_away():
    cell = Cell("a")
    cell.start(1500, due_at=-1.0)
    assert cell.place(urgency=Urgency.OVERDUE) is BUSY
    assert is_placed(cell.place())
    cell.view.release("r0", None, key("a"))
    assert is_placed(cell.place(urgency=Urgency.OVERDUE))


def test_late_prompts_borrow_no_time_from_streams():
    for longest_gap, is_full in ((1.2, False), (3.0, True)):
        cell = Cell("a", longest_gap=longest_gap)
        cell.start(100)
        placed = cell.place(urgency=Urgency.LATE)
        assert (placed is BUSY) == is_full
        assert is_placed(cell.place(urgency=Urgency.YIELDS))


def test_a_late_prompt_joins_another_where_only_this_worker_holds_its_prefix():
    cell = Cell("a", "b")
    prompt = list(range(1600))
    events = cluster_pb2.CacheEvents(
        stored=block_hashes(prompt[:1200], BLOCK), tier=cluster_pb2.CACHE_TIER_HOST
    )
    for name in "ab":
        late = PrefillChoice(key(name), 0.0, 0.1, 1000)
        cell.view.assign_prefill(f"late-{name}", late, [], due_at=-1.0)
    assert cell.place(len(prompt), prompt, urgency=Urgency.OVERDUE) is BUSY
    cell.view.add_worker(
        key("c"),
        WorkerTraits(FixedLatency(MODEL), "h", 65536, BLOCK, host_kv_tokens=4096),
        Pool.PREFILL,
    )
    cell.view.apply_cache(key("c"), events)
    late = PrefillChoice(key("c"), 0.0, 0.1, 1000)
    cell.view.assign_prefill("late-c", late, [], due_at=-1.0)
    assert cell.place(len(prompt), prompt, urgency=Urgency.OVERDUE).prefill.worker == key("c")
    # It holds less than a quarter of this prompt.
    assert cell.place(6400, list(range(6400)), urgency=Urgency.OVERDUE) is BUSY
    # A prefix that many workers hold, such as a system prompt, is no reason to go to any of them.
    for name in "ab":
        cell.view.apply_cache(key(name), cluster_pb2.CacheEvents(stored=events.stored))
    assert cell.place(len(prompt), prompt, urgency=Urgency.OVERDUE) is BUSY


@pytest.mark.parametrize(
    ("num_output_tokens", "due_in_s", "decode"),
    [
        pytest.param(30, 0.7, "a", id="long urgent prompts"),
        pytest.param(300, 0.7, "b", id="short prompts"),
        pytest.param(30, 20.0, "b", id="prompts with time"),
    ],
)
def test_outputs_that_wait_for_long_prompts_take_no_further_worker(
    num_output_tokens, due_in_s, decode
):
    cell = Cell("a", "b")
    add_decodes(cell, "a", MOST // 2)
    for number in range(MOST // 2):
        choice = DecodeChoice(key("a"), 0.0, 1000, 1)
        cell.view.assign_decode(f"waits {number}", choice, num_mean_tokens=1000)
    demand = {"num_mean_tokens": 3000 + num_output_tokens // 2, "due_in_s": due_in_s}
    assert cell.place(3000, **demand).decode.worker == key("b")
    for _ in range(200):
        cell.choices.begins(cell.place(3000, **demand).sample)
    assert cell.place(3000, **demand).decode.worker == key(decode)


def test_questions_change_no_later_answer():
    """The dispatcher asks up to three times for one request, and again in each later round."""
    cell = Cell("a", "b")
    add_prompts(cell, 0.02, 1.0)
    add_decodes(cell, "a", MOST_BESIDE_PROMPTS - 1)
    # The other worker has prompts for more than one step.
    cell.view.assign_prefill("p", PrefillChoice(key("b"), 0.15, 0.15, 1500), [])
    questions = (
        {"num_tokens": 10, "due_in_s": 5.0},
        {"num_tokens": 3000, "num_mean_tokens": 3015, "due_in_s": 0.7, "urgency": Urgency.OVERDUE},
        {"num_tokens": 6000, "due_in_s": 0.5, "others_go_first_if_late": True},
    )
    first = [cell.place(**question) for question in questions]
    assert first[-1] is NoPlacement.LATE
    for _ in range(200):
        assert [cell.place(**question) for question in questions] == first


def test_prompts_take_longer_once_a_worker_decodes():
    """Their work was predicted for a worker that decodes nothing."""
    cell = Cell("a")
    cell.start(3000, computed=False)
    load = cell.view.loads.get(key("a"))
    alone_s = load.queued_s(0.0) * load.prompt_speed
    for _ in range(4):
        cell.start(16, computed=False, urgency=Urgency.CONTINUES)
    assert load.queued_s(0.0) * load.prompt_speed == pytest.approx(
        alone_s + 4 * MODEL.prefill_per_token_s * 16, rel=0.1
    )


def test_the_work_of_prompts_is_that_of_a_worker_without_decodes():
    """The autoscaler counts it: beside decodes, prompts take longer but are no more work."""
    cell = Cell("a")
    for _ in range(MOST):
        cell.start(16, urgency=Urgency.CONTINUES)
    cell.start(3000, computed=False)
    load = cell.view.loads.get(key("a"))
    assert load.work_s(0.0) == pytest.approx(0.3, rel=0.05)
    assert load.queued_s(0.0) > 2 * load.work_s(0.0)


@pytest.mark.parametrize(
    ("num_tokens", "itl_s", "stays"),
    [(4, 0.05, True), (5, 0.05, False), (8, 0.038, True), (9, 0.038, False), (4, 0.03, False)],
)
def test_an_output_of_few_tokens_stays_where_its_prompt_is_read(num_tokens, itl_s, stays):
    """A decode step takes 31 ms: with a target of 30 ms, other workers are no worse."""
    cell = Cell("a", "b", itl_s=itl_s)
    cell.start(500, itl_s=itl_s)
    second = cell.place(500, num_output_tokens=num_tokens, itl_s=itl_s)
    assert (second.prefill.worker == second.decode.worker) == stays


def test_outputs_of_few_tokens_slow_no_other_prompts():
    """Where streams of short outputs never end, a long prompt would be late beside them."""
    cell = Cell("a", "b")
    for _ in range(MOST - 1):
        cell.start(500)
    assert cell.start(30_000, computed=False, num_output_tokens=0).prefill.worker == key("b")
    second = cell.place(2000, num_output_tokens=2)
    assert (second.prefill.worker, second.decode.worker) == (key("b"), key("a"))


@pytest.mark.parametrize(
    ("workers", "itl_s", "stays"),
    [("abcd", 0.038, True), ("abc", 0.038, False), ("abcd", 0.05, False)],
)
def test_an_output_stays_where_its_prompt_is_read_if_a_handoff_might_cost_its_target(
    workers, itl_s, stays
):
    """A decode step takes 31 ms. Enough others must be idle for the next prompts."""
    cell = Cell(*workers, itl_s=itl_s)
    cell.start(500, itl_s=itl_s)
    second = cell.place(500, itl_s=itl_s)
    assert (second.prefill.worker == second.decode.worker) == stays


def two_kinds(
    model: LatencyModel, *, is_measured: bool = True, kv_tokens: int = 65536
) -> tuple[Cell, WorkerKey]:
    """A cell with a worker of the usual kind, and one of another kind, which is idle."""
    cell = Cell("a", kv_tokens=kv_tokens)
    traits = WorkerTraits(FixedLatency(model, is_measured), "h", 65536, BLOCK)
    cell.view.add_worker(key("other"), traits, Pool.PREFILL)
    return cell, key("other")


# Computes prompts twice as fast, and holds fewer streams within the ITL target.
COMPUTE = LatencyModel(0.01, 5e-5, 0.0, 0.040, 0.001, 1e-6)
# Misses the ITL target with one stream.
TOO_SLOW = LatencyModel(0.01, 5e-5, 0.0, 0.060, 0.001, 1e-6)


def test_a_worker_made_for_prompts_decodes_only_after_the_others():
    cell, other = two_kinds(COMPUTE)
    workers = [cell.start().decode.worker for _ in range(MOST + 1)]
    assert workers == [key("a")] * MOST + [other]


def test_without_an_itl_target_a_worker_made_for_prompts_decodes_after_the_others():
    cell, other = two_kinds(COMPUTE)
    for _ in range(12):
        assert cell.start(itl_s=math.inf).decode.worker != other


def test_a_kind_without_measured_steps_gets_outputs_so_that_they_are_measured():
    cell, other = two_kinds(COMPUTE, is_measured=False)
    assert other in [cell.start().decode.worker for _ in range(MOST + 1)][:MOST]


def test_a_worker_whose_steps_miss_the_target_decodes_if_only_it_has_kv_room():
    cell, other = two_kinds(TOO_SLOW)
    assert {cell.start().decode.worker for _ in range(MOST)} == {key("a")}
    cell, other = two_kinds(TOO_SLOW, kv_tokens=2048)
    assert cell.start(1000).decode.worker == key("a")
    assert cell.place(4000).decode.worker == other


def test_a_worker_whose_steps_miss_the_target_decodes_batch_outputs():
    cell, other = two_kinds(TOO_SLOW)
    add_decodes(cell, "a", MOST)
    assert cell.place(is_batch=True).decode.worker == other


def test_a_large_cell_is_divided_into_groups_that_share_the_load():
    cell = Cell(*(f"w{number}" for number in range(80)))
    candidates = ElasticCandidates(cell.view, PrefixFetches(cell.view))
    assert len(candidates.compared(cell.match(), None)) == 27
    decoders = {cell.start().decode.worker for _ in range(3 * MOST_BESIDE_PROMPTS)}
    # Each group packs its outputs on one worker.
    assert len(decoders) == 3
    prompt = list(range(1600))
    events = cluster_pb2.CacheEvents(stored=block_hashes(prompt, BLOCK))
    for worker in (key(f"w{number}") for number in range(80)):
        if worker not in decoders:
            cell.view.apply_cache(worker, events)
            assert cell.place(len(prompt), prompt).prefill.worker == worker
            cell.view.apply_cache(worker, cluster_pb2.CacheEvents(reset=True))


def test_room_is_found_outside_the_group_with_the_fewest_requests():
    names = [f"w{number}" for number in range(40)]
    cell = Cell(*names, kv_tokens=4000)
    loads = cell.view.loads
    full = [entry.key[0] for entry in loads.least_loaded_group()]
    for name in names:
        # One long output on each worker of a group, or two short ones.
        is_full = name in full
        add_decodes(cell, name, 1 if is_full else 2, num_kv_tokens=4000 if is_full else 160)
    assert [entry.key[0] for entry in loads.least_loaded_group()] == full
    found = cell.place(1000)
    assert is_placed(found)
    assert found.decode.worker[0] not in full


def test_a_request_without_room_in_the_kv_caches_waits():
    cell = Cell("a", "b", kv_tokens=4000)
    cell.start(3000)
    cell.start(3000)
    assert sorted(cell.num_decodes()) == [1, 1]
    assert cell.place(3000) is FULL
    assert is_placed(cell.place(500))


@pytest.mark.parametrize(
    ("full_queue_s", "queue_s", "expected"), [(0.0, 0.3, BUSY), (0.0, 3.0, FULL), (2.0, 3.0, BUSY)]
)
def test_a_request_waits_for_room_only_where_it_would_begin_sooner(full_queue_s, queue_s, expected):
    cell = Cell("full", "other", kv_tokens=4000)
    add_decodes(cell, "full", 1, num_kv_tokens=3000)
    for name, work_s in (("full", full_queue_s), ("other", queue_s)):
        if work_s:
            choice = PrefillChoice(key(name), work_s, work_s, 100)
            cell.view.assign_prefill(f"prompt-{name}", choice, [])
    # The prompt takes three times as long beside an output.
    assert cell.place(3000) is expected


def test_a_request_that_ends_with_its_first_token_needs_no_decoder():
    assert Cell("a").place(num_output_tokens=0).decode is None


def test_without_workers_a_request_waits_and_is_not_late():
    cell = Cell()
    assert cell.place() is FULL
    assert not cell.is_late(1000, due_in_s=0.0)


def test_changed_targets_count_for_the_next_request(new_world):
    """`baton targets` changes what the coordinator places by, not only the workers' steps."""
    # A decode step takes 20 ms, and 5 ms per request.
    latency = LatencyModel(1e-4, 1e-5, 0.0, 0.020, 0.005, 0.0)
    world = new_world(elastic=True, latency=latency).pair()
    change(world, itl_s=0.032, ttft_s=1000)

    for _ in range(12):
        world.submit(num_prompt=20)
    assert sum(one.attempt > 0 for one in world.core.running()) == 4
    change(world, itl_s=0.042)
    assert sum(one.attempt > 0 for one in world.core.running()) == 8
    world = new_world(elastic=True, latency=latency).pair()
    change(world, ttft_s=0.001)
    world.submit(num_prompt=900)
    (request,) = world.core.running()
    assert request.due_at == request.submission.arrived_at + 0.001
    assert request.is_late


def test_costs_of_zero_place_requests(new_world):
    """The section `latency` may say so until steps are measured."""
    zero = LatencyModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    world = new_world(elastic=True, latency=zero).pair()
    for _ in range(4):
        world.submit(num_prompt=20)
    assert all(one.attempt > 0 for one in world.core.running())


def test_each_late_request_is_learned_from_once(new_world, monkeypatch):
    times = []
    monkeypatch.setattr(PromptDemand, "was_late", lambda _, now: times.append(now))
    # A prompt of 900 tokens takes 9 s, and its worker takes no other prompt meanwhile.
    latency = LatencyModel(1e-4, 1e-2, 0.0, 0.020, 0.005, 0.0)
    world = new_world(elastic=True, latency=latency).pair()
    change(world, ttft_s=0.001)
    for _ in range(6):
        world.submit(num_prompt=900)
        world.wait(1)
    assert all(one.is_late for one in world.core.running())
    assert len(times) == 6


def test_only_requests_of_the_interactive_lane_go_behind_the_others(new_world):
    targets = LaneTargetsConfig(interactive=TargetsConfig(ttft_ms=1), batch={"ttft_ms": 1})
    world = new_world(elastic=True, targets=targets).pair()
    for _ in range(40):
        world.submit(num_prompt=400)
        world.submit(num_prompt=400, lane=common_pb2.LANE_BATCH)
    waiting = [one for one in world.core.running() if not one.attempt]
    late = {one.submission.lane for one in waiting if one.is_late}
    assert late == {common_pb2.LANE_INTERACTIVE}
    assert {one.submission.lane for one in waiting} > late


def test_a_request_that_lost_its_worker_does_not_go_behind_the_others(new_world):
    """Its first token is late by then, but `max_recovery_s` might end before it had its turn."""
    # A prompt of 400 tokens takes 0.4 s.
    latency = LatencyModel(1e-3, 1e-3, 0.0, 0.020, 0.005, 0.0)
    world = new_world(elastic=True, latency=latency).pair()
    for _ in range(2):
        world.submit(num_prompt=400)
    first, second = world.core.running()
    assert first.attempt == second.attempt == 1
    lost = next(one for one in (first.prefill, first.decode) if one is not None)
    world.wait(1)
    world.handle(ev.WorkerLost(lost[0], "died"))
    recovering = [one for one in world.core.running() if one.state is RequestState.RECOVERING]
    assert recovering
    assert not any(one.is_late for one in recovering)


def two_workers() -> VirtualCell:
    """An elastic cell whose workers keep the ITL target with ten outputs."""
    values = {
        "model": "simulated",
        "elastic": True,
        "latency": {"prefill_per_token_ms": 0.1, "step_base_ms": 10, "step_per_request_ms": 1},
        "scaling": {"targets": {"interactive": {"ttft_ms": 60000, "itl_ms": 20}}},
    }
    made = VirtualCell(CoreConfig.of(parse(values, "test")))
    shape = WorkerShape(LatencyModel(0.005, 1e-4, 0.0, 0.010, 0.001, 0.0))
    made.add_worker("a", common_pb2.ROLE_PREFILL, shape)
    made.add_worker("b", common_pb2.ROLE_DECODE, shape)
    made.run(made.now + 1)
    return made


def test_admission_predicts_a_first_token_at_the_speed_that_decodes_leave():
    made = two_workers()
    idle = made.submit(1000, 2, slo_ttft_s=0.3)
    made.run(made.now + 1)
    assert idle.ttft_s <= 0.3
    # Both workers decode as many requests as the ITL target allows.
    for _ in range(16):
        made.submit(16, 2000)
        made.run(made.now + 0.1)
    busy = made.submit(1000, 2, slo_ttft_s=0.3)
    assert busy.error.reason == "TOO_LATE"


def test_a_prompt_that_is_too_late_only_beside_decodes_gets_a_retry_time():
    made = two_workers()
    streams = [made.submit(16, 60) for _ in range(16)]
    made.run(made.now + 0.3)
    # The prompt takes 0.105 s on an idle worker.
    refused = made.submit(1000, 2, slo_ttft_s=0.15)
    assert refused.error.reason == "TOO_LATE"
    assert refused.error.retry_after_s > 0
    assert "the prompt alone" not in str(refused.error)
    hopeless = made.submit(4000, 2, slo_ttft_s=0.15)
    assert hopeless.error.retry_after_s is None
    assert "the prompt alone takes 0.5" in str(hopeless.error)
    made.run(made.now + 5)
    assert all(one.ended_at is not None for one in streams)
    again = made.submit(1000, 2, slo_ttft_s=0.15)
    made.run(made.now + 1)
    assert again.ttft_s <= 0.15


def test_a_short_prompt_goes_where_it_delays_fewer_long_ones():
    cell = Cell("prefill-0", "prefill-1")
    # Two long prompts wait on the first worker, and one on the second.
    cell.start(8000, computed=False, num_output_tokens=0)
    cell.start(9000, computed=False, num_output_tokens=0)
    busiest = cell.view.loads.get(key("prefill-0"))
    cell.view.assign_prefill("other", PrefillChoice(busiest.key, 0.6, 0.6, 6000, PromptHits()), [])
    found = cell.place(1000, num_output_tokens=0)
    assert found.prefill.worker == key("prefill-1")


def test_prompts_that_share_a_step_add_its_base_once():
    cell = Cell("prefill-0")
    for _ in range(10):
        cell.start(20, computed=False, num_output_tokens=0)
    load = cell.view.loads.get(key("prefill-0"))
    # Each prompt alone takes 22 ms, of which the step's base is 20 ms.
    assert load.queued_s(cell.view.now) < 10 * 0.022 / 2


def test_a_short_prompt_does_not_wait_for_the_steps_of_streams():
    cell = Cell("a", "b")
    decoder = cell.start(16).decode.worker
    other = next(worker for worker in (key("a"), key("b")) if worker != decoder)
    # The decoder has no prompts, and needs less time for the prompt itself than for a step.
    cell.view.assign_prefill("ahead", PrefillChoice(other, 0.02, 0.02, 16, PromptHits()), [])
    assert cell.place(16).prefill.worker == other


def test_the_first_prompts_already_show_the_rate_of_their_work():
    prompts = PromptDemand()
    for begin in (100, 3700):
        for number in range(64):
            prompts.add(0.01, 1.0, now=begin + number / 64)
        # 0.64 seconds of work in one second, for one worker that may be busy a third of the time.
        assert prompts.needed_speed(1, begin + 1) == pytest.approx(3 * 0.64, rel=0.05)


def test_outputs_leave_a_margin_below_the_itl_target_while_workers_are_idle():
    """Outputs of unknown length grow after their placement."""
    cell = Cell("a", "b", "c", "d", "e")
    decoders = [cell.start().decode.worker for _ in range(2 * MOST_BESIDE_PROMPTS)]
    assert sorted(Counter(decoders).values()) == [MOST_BESIDE_PROMPTS, MOST_BESIDE_PROMPTS]


def test_overdue_prompts_share_no_steps_with_a_new_one():
    cell = Cell("prefill-0")
    for number in range(3):
        overdue = PrefillChoice(key("prefill-0"), 0.0, 0.0, 100, PromptHits())
        cell.view.assign_prefill(f"r{number}", overdue, [])
    found = cell.place(200, num_output_tokens=0)
    assert found.prefill.work_s == pytest.approx(MODEL.prefill_s(200))


def test_a_batch_request_without_a_handoff_does_not_count_on_parked_outputs():
    cell = Cell("a", "b")
    add_decodes(cell, "a", 8, 500)
    add_decodes(cell, "b", 3, 500)
    for number in range(9):
        choice = DecodeChoice(key("b"), 0.0, 500, 1)
        cell.view.assign_decode(
            f"batch{number}", choice, is_interactive=False, can_be_parked=True, num_mean_tokens=500
        )
    demand = cell.demand(500, is_batch=True, urgency=Urgency.OVERDUE)
    assert cell.choices.place_on_one(cell.match(), demand).decode.worker == key("a")
