"""Routing of requests: prefixes against load, KV room, and a real trace."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.routing.choices import DecodeChoice, PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import NO_QUEUE_LIMIT, QueueLimit
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.request_needs import DecodeNeeds
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import SessionKey, WorkerKey
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2
from tests.coordinator.fixed_latency import FixedLatency
from tests.coordinator.trace_replay import load_trace, on_one_worker, replay
from tests.coordinator.worker_choices import pool_choices

BLOCK = 16
# A prompt token takes 1 ms; a decode step takes 10 ms plus 1 ms per request.
MODEL = LatencyModel(0.001, 0.001, 0.0, 0.010, 0.001, 0.0)


def traits(host: str = "h", kv_tokens: int = 65536, kv_bytes_per_token: int = 0) -> WorkerTraits:
    return WorkerTraits(FixedLatency(MODEL), host, kv_tokens, BLOCK, kv_bytes_per_token)


def key(name: str) -> WorkerKey:
    return name, 1


class Cluster:
    """A view and its requests, from the choice to the first token."""

    def __init__(self, *prefill: str, max_requests: int = 256) -> None:
        self.view = FleetView(CoreClock(), max_requests, max_requests)
        for name in prefill:
            self.view.add_worker(key(name), traits(), Pool.PREFILL)
        self.prompts: dict[str, tuple[WorkerKey, list[int]]] = {}

    def send(
        self, request: str, prompt: list[int], session_id: str = "", tenant: str = "a"
    ) -> PrefillChoice:
        session = SessionKey(tenant, session_id) if session_id else None
        hashes = block_hashes(prompt, BLOCK)
        match = self.view.match(hashes)
        choice = pool_choices(self.view).choose_prefill(match, len(prompt), session)
        assert choice is not None
        self.view.assign_prefill(request, choice, hashes, session)
        self.prompts[request] = choice.worker, prompt
        self.view.check_integrity()
        return choice

    def done(self, request: str) -> None:
        """The request's worker reports the blocks, then the first token."""
        worker, prompt = self.prompts.pop(request)
        events = cluster_pb2.CacheEvents(stored=block_hashes(prompt, BLOCK))
        self.view.apply_cache(worker, events)
        self.view.first_token(request, worker, None)
        self.view.release(request, worker, None)
        self.view.check_integrity()


def prompt(seed: int, length: int = 320) -> list[int]:
    return [seed * 1000 + index for index in range(length)]


# ---- Prefill.


def test_a_prompt_goes_where_its_prefix_is() -> None:
    cluster = Cluster("a", "b", "c", "d")
    where = cluster.send("1", prompt(1)).worker
    cluster.done("1")
    for number in range(4):
        choice = cluster.send(f"again{number}", prompt(1) + prompt(number + 2))
        assert choice.worker == where
        assert choice.hits.num_device == 320
        assert choice.work_s == pytest.approx(MODEL.prefill_s(320))
        cluster.done(f"again{number}")


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    cluster = Cluster("a")
    cluster.send("1", prompt(1, 320))
    cluster.done("1")
    assert cluster.send("2", prompt(1, 320)).hits.num_device == 304
    assert cluster.send("3", prompt(1, 321)).hits.num_device == 320


def test_a_burst_of_equal_prompts_stays_together() -> None:
    cluster = Cluster("a", "b", "c", "d")
    workers = {cluster.send(str(number), prompt(1)).worker for number in range(20)}
    assert len(workers) == 1


def test_what_is_expected_gives_way_to_what_the_worker_reports() -> None:
    cluster = Cluster("a", "b")
    worker = cluster.send("1", prompt(1)).worker
    # The worker computed the prompt and evicted it at once.
    cluster.view.first_token("1", worker, None)
    cluster.view.check_integrity()
    assert cluster.send("2", prompt(1)).hits.num_device == 0


def test_a_cleared_cache_counts_for_nothing() -> None:
    cluster = Cluster("a")
    cluster.send("1", prompt(1))
    cluster.done("1")
    kept = block_hashes(prompt(1), BLOCK)[:3]
    cluster.view.apply_cache(key("a"), cluster_pb2.CacheEvents(reset=True, stored=kept))
    assert cluster.send("2", prompt(1)).hits.num_device == 48


def test_a_hot_system_prompt_spreads_under_load() -> None:
    names = [f"w{number}" for number in range(8)]
    cluster = Cluster(*names)
    system = prompt(1, 640)
    cluster.send("first", system)
    cluster.done("first")
    # The requests arrive together; each has 320 tokens that it shares with no other.
    load = Counter(
        cluster.send(str(number), system + prompt(number + 2)).worker for number in range(160)
    )
    assert set(load) == {key(name) for name in names}
    assert max(load.values()) <= 1.3 * 160 / 8


def test_different_prompts_spread_from_the_first() -> None:
    cluster = Cluster("a", "b", "c", "d")
    load = Counter(cluster.send(str(number), prompt(number)).worker for number in range(40))
    assert set(load.values()) == {10}


def test_a_session_stays_where_equals_hold_its_prefix() -> None:
    names = [f"w{number}" for number in range(20)]
    cluster = Cluster(*names)
    hashes = block_hashes(prompt(1), BLOCK)
    for name in names:
        cluster.view.index.stored(key(name), hashes)
    first = cluster.send("0", prompt(1), "chat").worker
    cluster.done("0")
    for number in range(1, 10):
        assert cluster.send(str(number), prompt(1), "chat").worker == first
        cluster.done(str(number))


def test_equal_session_ids_of_two_tenants_are_two_sessions() -> None:
    names = [f"w{number}" for number in range(20)]
    cluster = Cluster(*names)
    hashes = block_hashes(prompt(1), BLOCK)
    for name in names:
        cluster.view.index.stored(key(name), hashes)
    workers = {}
    for tenant in ("a", "b"):
        # While the first session's worker is busy, the second one gets another.
        workers[tenant] = cluster.send(tenant, prompt(1), "chat", tenant).worker
    assert workers["a"] != workers["b"]
    for tenant in workers:
        cluster.done(tenant)
    cluster.view.forget_session(SessionKey("a", "chat"))
    assert cluster.send("again", prompt(1), "chat", "b").worker == workers["b"]


def test_a_session_leaves_a_worker_that_has_too_much_to_do() -> None:
    cluster = Cluster("a", "b")
    first = cluster.send("0", prompt(1), "chat").worker
    cluster.done("0")
    # Saving the prefill of 304 tokens is worth a wait of 0.5 s, but not of a minute.
    for queued_s, stays in ((0.5, True), (60.0, False)):
        queued = PrefillChoice(first, queued_s, queued_s, 1)
        cluster.view.assign_prefill("queued", queued, [])
        second = cluster.send("1", prompt(1), "chat").worker
        assert (second == first) == stays
        cluster.view.release("1", second, None)
        cluster.view.release("queued", first, None)


def test_full_gone_and_paused_workers_get_nothing() -> None:
    cluster = Cluster("a", "b", "c", max_requests=1)
    view = cluster.view
    view.remove_worker(key("a"))
    view.loads.set_pool(key("b"), None)
    assert cluster.send("1", prompt(1)).worker == key("c")
    assert view.loads.idlest_prefill() is None
    hashes = block_hashes(prompt(1), BLOCK)
    assert pool_choices(view).choose_prefill(view.match(hashes), 320) is None
    cluster.done("1")
    assert view.loads.idlest_prefill().queued_s(view.now) == 0.0
    view.loads.set_pool(key("b"), Pool.PREFILL)
    cluster.send("2", prompt(1))
    assert cluster.send("3", prompt(1)).worker == key("b")
    view.remove_worker(key("b"))
    view.release("3", key("b"), None)
    view.check_integrity()


# ---- Decode.


def decode_view(*workers: tuple[str, WorkerTraits], max_requests: int = 256) -> FleetView:
    view = FleetView(CoreClock(), max_requests, max_requests)
    for name, one in workers:
        view.add_worker(key(name), one, Pool.DECODE)
    return view


def decode(
    view: FleetView,
    request: str,
    tokens: list[int],
    output: int = 100,
    prefill: WorkerKey | None = None,
    **more: object,
) -> DecodeChoice | None:
    match, needs = view.match(block_hashes(tokens, BLOCK)), DecodeNeeds(len(tokens), output)
    choice = pool_choices(view).choose_decode(match, needs._replace(**more), prefill=prefill)
    if choice is not None:
        view.assign_decode(request, choice)
        view.check_integrity()
    return choice


def test_decodes_go_where_a_step_takes_least() -> None:
    view = decode_view(*((name, traits()) for name in "abc"))
    load = Counter(decode(view, str(number), prompt(number)).worker for number in range(30))
    assert set(load.values()) == {10}
    choice = decode(view, "more", prompt(99))
    assert choice is not None
    assert choice.step_s == pytest.approx(MODEL.decode_step_s(11, 0))


def interactive(view: FleetView, request: str) -> WorkerKey:
    choice = pool_choices(view).choose_decode(view.match([]), DecodeNeeds(320, 100))
    assert choice is not None
    view.assign_decode(request, choice, is_interactive=True)
    return choice.worker


def batch(view: FleetView, request: str, max_itl_s: float = 0.0145) -> WorkerKey | None:
    needs = DecodeNeeds(320, 100, max_itl_s, is_batch=True)
    choice = pool_choices(view).choose_decode(view.match([]), needs)
    if choice is None:
        return None
    view.assign_decode(request, choice)
    view.check_integrity()
    return choice.worker


def test_outputs_that_yield_leave_workers_idle_for_interactive_ones() -> None:
    """On an idle worker, an interactive request does not wait for the end of a running step."""
    view = decode_view(*((name, traits()) for name in "abcd"))
    taken = {interactive(view, "u1"), interactive(view, "u2")}
    together = batch(view, "0")
    assert together not in taken
    # A step takes 10 ms plus 1 ms per request, and may take at most 14.5 ms.
    assert {batch(view, str(number)) for number in range(1, 4)} == {together}
    idle = {key(name) for name in "abcd"} - taken - {together}
    assert {interactive(view, "u3")} == idle
    # The other batch requests' worker is full, so the request joins the fastest worker.
    assert batch(view, "4") not in {together, None}
    for number in range(4):
        view.release(str(number), None, together)
    assert interactive(view, "u4") == together


def test_outputs_that_yield_spread_where_there_is_nobody_to_yield_to() -> None:
    view = decode_view(*((name, traits()) for name in "abcd"))
    load = Counter(batch(view, str(number)) for number in range(8))
    assert set(load.values()) == {2}


def test_outputs_that_yield_do_not_crowd_interactive_ones_to_stay_together() -> None:
    view = decode_view(("a", traits()))
    interactive(view, "u1")
    first = batch(view, "0")
    view.add_worker(key("b"), traits(), Pool.DECODE)
    # A step of 13 ms would be more than 1.15 times as long as 11 ms on the other worker.
    assert first == key("a")
    assert {batch(view, str(number)) for number in range(1, 4)} == {key("b")}


def test_a_decode_worker_that_holds_the_prefix_is_worth_the_transfer_saved() -> None:
    heavy = traits(kv_bytes_per_token=10**6)
    view = decode_view(*((name, heavy) for name in "abcdef"))
    view.add_worker(key("p"), heavy, Pool.PREFILL)
    view.index.stored(key("d"), block_hashes(prompt(1), BLOCK))
    choice = decode(view, "1", prompt(1), prefill=key("p"))
    assert choice is not None
    assert (choice.worker, choice.hits.num_device) == (key("d"), 320)


def test_of_equals_the_prefill_workers_own_host_decodes() -> None:
    hosts = {f"d{number}": traits(f"h{number}", kv_bytes_per_token=1000) for number in range(8)}
    view = decode_view(*hosts.items())
    view.add_worker(key("p"), hosts["d5"], Pool.PREFILL)
    choice = decode(view, "1", prompt(1), prefill=key("p"))
    assert choice is not None
    assert choice.worker == key("d5")


@pytest.mark.parametrize("slow", ["d1", "d2"])
def test_a_worker_to_which_handoffs_are_slow_is_avoided(slow: str) -> None:
    # The least loaded worker and the one with most room are compared.
    view = decode_view(
        ("d1", traits("d1", kv_bytes_per_token=10**6)),
        ("d2", traits("d2", kv_tokens=131072, kv_bytes_per_token=10**6)),
    )
    view.add_worker(key("p"), traits("p", kv_bytes_per_token=10**6), Pool.PREFILL)
    for name in ("d1", "d2"):
        seconds = 60.0 if name == slow else 0.1
        view.transfers.observe((key("p"), key(name)), 10**9, seconds, near=False)
    needs = DecodeNeeds(320, 100)
    choice = pool_choices(view).choose_decode(view.match([]), needs, prefill=key("p"))
    assert choice is not None
    assert choice.worker != key(slow)


def test_a_move_counts_the_measured_speed_to_its_new_worker() -> None:
    heavy = {name: traits(name, kv_bytes_per_token=10**6) for name in ("d1", "d2", "d3")}
    view = decode_view(*heavy.items())

    def sent_s(to: str) -> float:
        choice = pool_choices(view).by_handoff(key("d1"), key(to), 321)
        return choice.ttft_s - choice.work_s

    # Before the first transfer between hosts, 1 GB/s are assumed.
    assert sent_s("d2") == pytest.approx(0.321)
    view.transfers.observe((key("d1"), key("d2")), 10**9, 10.0, near=False)
    assert sent_s("d2") == pytest.approx(3.21)
    view.transfers.observe((key("d1"), key("d3")), 10**9, 0.1, near=False)
    assert sent_s("d3") == pytest.approx(0.0321)


@pytest.mark.parametrize(("computes_all", "num_tokens"), [(False, 1), (True, 321)])
def test_a_move_computes_the_tokens_that_the_engine_takes_from_no_cache(
    computes_all, num_tokens
) -> None:
    view = decode_view(*((name, traits(name)) for name in ("d1", "d2")))
    choice = pool_choices(view).by_handoff(key("d1"), key("d2"), 321, computes_all=computes_all)
    assert choice.num_work_tokens == num_tokens
    assert choice.hits.num_tokens == 321 - num_tokens


def test_room_is_kept_for_prompt_and_expected_output() -> None:
    view = decode_view(("small", traits(kv_tokens=640)), ("large", traits(kv_tokens=1280)))
    wanted = prompt(1, 500)
    # A request of 500 + 100 tokens needs 38 blocks of 16 tokens.
    placed = [decode(view, str(number), wanted) for number in range(4)]
    assert Counter(one.worker for one in placed if one) == {key("small"): 1, key("large"): 2}
    assert placed[3] is None
    assert placed[0] is not None
    view.release("0", None, placed[0].worker)
    assert decode(view, "4", wanted) is not None
    assert decode(view, "5", wanted) is None
    assert decode(view, "6", prompt(2, 16), output=1) is not None


def test_outputs_that_outgrow_what_was_expected_take_room() -> None:
    view = decode_view(("a", traits(kv_tokens=1600)))
    assert decode(view, "1", prompt(1, 400), output=16) is not None
    assert decode(view, "under way", prompt(2, 400), output=16) is not None
    assert not view.outgrows("1", key("a"), 416)
    assert view.outgrows("1", key("a"), 417)
    for num_tokens, num_free in ((417, 752), (400, 752), (1000, 176)):
        view.grow("1", key("a"), num_tokens)
        view.check_integrity()
        assert view.loads.get(key("a")).free_tokens == num_free
    assert decode(view, "3", prompt(3, 200), output=16) is None
    view.release("1", None, key("a"))
    assert view.loads.get(key("a")).free_tokens == 1184
    assert not view.outgrows("1", key("a"), 1001)


def test_what_a_worker_holds_of_what_is_assigned_to_it_counts_once() -> None:
    """Also before the first token, with a partly loaded handoff or a locally computed prompt."""
    view = decode_view(("a", traits(kv_tokens=1600)))
    assert decode(view, "1", prompt(1, 400), output=16) is not None
    view.first_token("1", None, key("a"))
    assert decode(view, "under way", prompt(2, 400), output=16) is not None
    view.report_kv(key("a"), 400 + 384)
    assert view.loads.get(key("a")).free_tokens == 1600 - 2 * 416
    assert decode(view, "3", prompt(3, 600), output=16) is not None
    # Tokens beyond the reservations belong to requests of an earlier coordinator.
    view.report_kv(key("a"), 1500)
    view.check_integrity()
    assert view.loads.get(key("a")).free_tokens == 100


def test_decodes_per_worker_are_limited() -> None:
    view = decode_view(("a", traits()), ("b", traits()), max_requests=2)
    placed = [decode(view, str(number), prompt(number)) for number in range(5)]
    assert Counter(one.worker for one in placed if one) == {key("a"): 2, key("b"): 2}
    assert placed[4] is None


def test_a_prompt_computed_where_it_is_decoded_goes_to_its_prefix() -> None:
    view = decode_view(*((name, traits()) for name in "abcdef"))
    view.index.stored(key("e"), block_hashes(prompt(1), BLOCK))
    choice = decode(view, "1", prompt(1), output=10)
    assert choice is not None
    assert choice.worker == key("e")


# ---- Random order of events.

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(1, 100)),
        st.tuples(st.sampled_from(["first", "release"]), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("grow"), st.integers(0, 30), st.integers(1, 100)),
        st.tuples(st.sampled_from(["remove", "add", "pause"]), st.integers(0, 3), st.just(0)),
    ),
    max_size=50,
)


@given(_STEPS)
def test_what_is_assigned_is_released_and_never_more_than_there_is_room(steps) -> None:
    view = FleetView(CoreClock(), 3, 4)
    choices = pool_choices(view)
    names = [f"w{number}" for number in range(4)]
    # The workers that each request was assigned to.
    requests: list[tuple[str, WorkerKey, WorkerKey]] = []
    # Outputs that are longer than expected may exceed the KV room.
    grown: set[str] = set()
    for count, (kind, number, length) in enumerate(steps):
        worker = key(names[number % 4])
        if kind == "add" and view.loads.get(worker) is None:
            view.add_worker(worker, traits(kv_tokens=256), list(Pool)[number % 2])
        elif kind == "remove":
            view.remove_worker(worker)
        elif kind == "pause" and view.loads.get(worker) is not None:
            view.loads.set_pool(worker, None)
        elif kind == "send":
            hashes = block_hashes(prompt(number, length), BLOCK)
            match = view.match(hashes)
            first = choices.choose_prefill(match, length, f"s{number}")
            needs = DecodeNeeds(length, 20, session=SessionKey("a", f"s{number}"))
            second = choices.choose_decode(match, needs)
            if first is not None and second is not None:
                view.assign_prefill(str(count), first, hashes, f"s{number}")
                view.assign_decode(str(count), second, f"s{number}")
                requests.append((str(count), first.worker, second.worker))
        elif kind == "grow" and number < len(requests):
            request, _, decoder = requests[number]
            if view.outgrows(request, decoder, length):
                grown.add(request)
                view.grow(request, decoder, length)
                assert not view.outgrows(request, decoder, length)
        elif kind in ("first", "release") and number < len(requests):
            (view.first_token if kind == "first" else view.release)(*requests[number])
        view.check_integrity()
        for name in names:
            entry = view.loads.get(key(name))
            assert entry is None or entry.free_tokens >= 0 or grown
        match = view.match(block_hashes(prompt(number, 64), BLOCK))
        for limit in (
            QueueLimit(0.01, predicts_progress=False),
            QueueLimit(0.04, predicts_progress=True),
            NO_QUEUE_LIMIT,
        ):
            is_placed = choices.choose_prefill(match, 64, "s0", limit) is not None
            assert is_placed == choices.takes_prompt(match, "s0", limit)
    for request in requests:
        view.release(*request)
    for name in names:
        if (entry := view.loads.get(key(name))) is not None:
            assert (entry.num_prefills, entry.num_decodes, entry.queued_s(view.now)) == (
                0,
                0,
                0.0,
            )
            assert entry.free_tokens == entry.traits.kv_tokens
    view.check_integrity()


# ---- A real trace.


@pytest.mark.parametrize("num_blocks", [2000, 8000])
@pytest.mark.parametrize("per_token_s", [0.002, 0.003])
def test_a_real_trace_finds_its_prefixes_on_four_balanced_workers(
    num_blocks: int, per_token_s: float
) -> None:
    """Caches hold 1/12 or 1/3 of all blocks; the load is 1/2 or 3/4 of capacity."""
    trace = load_trace()
    outcome = replay(
        trace,
        num_workers=4,
        num_blocks=num_blocks,
        latency=LatencyModel(0.005, per_token_s, 0.0, 0.010, 0.0, 0.0),
    )
    whole = on_one_worker(trace, 4 * num_blocks)
    assert outcome.num_tokens == whole.num_tokens
    assert outcome.cached_share >= 0.9 * whole.cached_share
    assert outcome.imbalance <= 1.3
