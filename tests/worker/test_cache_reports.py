"""A coordinator that applies every CacheEvents knows which blocks the engine has cached."""

from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.block_changes import CacheChange
from baton.runtime.prompts.block_hashes import block_hashes
from baton.v1 import cluster_pb2, common_pb2
from baton.worker.cache_reports import MAX_HASHES_PER_MESSAGE, CacheReports
from baton.worker.outbox import Outbox
from tests.worker.scripted_coordinator import spec

# In the order in which a worker reports them.
TIERS = (cluster_pb2.CACHE_TIER_UNSPECIFIED, cluster_pb2.CACHE_TIER_HOST)


def prefill(name: str, prompt: list[int]) -> cluster_pb2.PrefillCommand:
    return cluster_pb2.PrefillCommand(spec=spec(name, prompt, max_tokens=2))


class Known:
    """The worker's cache as the coordinator knows it."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def apply(self, events: cluster_pb2.CacheEvents) -> None:
        assert len(events.stored) + len(events.removed) <= MAX_HASHES_PER_MESSAGE
        if events.reset:
            self.blocks.clear()
        self.blocks.difference_update(events.removed)
        self.blocks.update(events.stored)

    def hear(self, outbox: Outbox) -> int:
        """Applies all outgoing messages and returns their number."""
        count = 0
        while (message := outbox.next_unsent()) is not None:
            self.apply(message.cache)
            count += 1
        return count


_BLOCKS = st.lists(st.integers(0, 20), max_size=8, unique=True)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), _BLOCKS, _BLOCKS, st.booleans()),
        st.tuples(st.sampled_from(["flush", "new coordinator"])),
    ),
    max_size=40,
)


@given(_STEPS)
def test_the_coordinator_knows_the_cache_after_each_flush(steps: list[tuple]) -> None:
    outbox, cache, known = Outbox(), set[int](), Known()
    reports, num_removed = CacheReports(outbox), 0
    for step in steps:
        if step[0] == "change":
            _, stored, removed, cleared = step
            num_removed += len(cache if cleared else cache & set(removed))
            cache = (set() if cleared else cache) - set(removed) | set(stored)
            reports.take(CacheChange(stored, removed, cleared))
            assert (len(reports), reports.num_removed) == (len(cache), num_removed)
            continue
        if step[0] == "flush":
            reports.flush()
        else:
            known.hear(outbox)
            known = Known()
            reports.report_all()
        known.hear(outbox)
        assert known.blocks == cache
        reports.flush()
        assert known.hear(outbox) == 0


def test_large_reports_take_several_messages_and_small_ones_wait() -> None:
    outbox, known = Outbox(), Known()
    reports = CacheReports(outbox)
    reports.take(CacheChange(stored=range(10)))
    assert known.hear(outbox) == 0
    reports.take(CacheChange(stored=range(10, 40_000)))
    assert known.hear(outbox) == 3
    assert known.blocks == set(range(40_000))
    reports.report_all()
    assert known.hear(outbox) == 3
    assert known.blocks == set(range(40_000))


async def tiers(stream, *, reset: bool) -> dict[int, set[int]]:
    """The blocks of each tier in the next messages, one for each tier."""
    found = {}
    for tier in TIERS:
        events = (await stream.next("cache")).cache
        assert events.tier == tier
        assert (events.reset, len(events.removed)) == (reset, 0)
        found[tier] = set(events.stored)
    return found


async def test_a_prompts_blocks_are_reported_before_its_first_token_and_again_to_a_new_coordinator(
    coordinator, start_worker
):
    start_worker(common_pb2.ROLE_PREFILL)
    stream = await coordinator.stream()
    prompt = list(range(2, 102))
    await stream.send(seq=1, prefill=prefill("a", prompt))
    assert await tiers(stream, reset=False) == {
        tier: set(block_hashes(prompt, 16)) for tier in TIERS
    }
    (output,) = (await stream.next("step")).step.outputs
    assert output.timings.num_cached_tokens == 0

    # The same prompt is found in the cache and does not change the cache.
    await stream.send(seq=2, prefill=prefill("b", prompt))
    (output,) = (await stream.next("step")).step.outputs
    assert output.timings.num_cached_tokens == 96

    coordinator.generation, coordinator.received = 2, 0
    stream.end()
    again = await coordinator.stream()
    assert await tiers(again, reset=True) == {tier: set(block_hashes(prompt, 16)) for tier in TIERS}
