"""Early loads, the scheduler's half: blocks are known to others when all are there, not before."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer.early_loads import EarlyLoads, EarlyReport
from baton.kvtransfer.layout import KvLayout

NUM_BLOCKS, BLOCK = 40, 4
LAYOUT = KvLayout("m", "r", "float32", 2, 1, 8, BLOCK, 128, "heads,tokens,content", tp_size=2)


@dataclass(eq=False)
class Block:
    block_id: int


@dataclass
class Pool:
    """As much of vLLM's BlockPool as is used; nothing is freed twice or taken while held."""

    enable_caching: bool = True
    num_gpu_blocks: int = NUM_BLOCKS
    free: list[Block] = field(default_factory=lambda: [Block(n) for n in range(NUM_BLOCKS)])
    held: set[int] = field(default_factory=set)
    cached: list[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=list)
    prefix: dict[str, list[Block]] = field(default_factory=dict)

    def get_num_free_blocks(self):
        return len(self.free)

    def get_new_blocks(self, count):
        assert count <= len(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        self.held |= {block.block_id for block in taken}
        return taken

    def free_blocks(self, blocks):
        for block in blocks:
            self.held.remove(block.block_id)
            self.free.append(block)

    def get_cached_block(self, block_hash, groups):
        assert groups == [0]
        return self.prefix.get(block_hash)

    def touch(self, blocks):
        self.free = [block for block in self.free if block not in blocks]
        self.held |= {block.block_id for block in blocks}

    def cache_full_blocks(self, request, blocks, num_cached, num_full, block_size, group):
        assert (block_size, group, len(blocks)) == (BLOCK, 0, num_full)
        ids = tuple(block.block_id for block in blocks[num_cached:num_full])
        assert self.held.issuperset(ids), "blocks are cached while they are held"
        self.cached.append((request, num_cached, num_full, ids))


class Request(str):
    """As much of vLLM's Request as is used, beside a name."""

    block_hashes = ()


def id_of(number: int) -> bytes:
    return bytes([number]) * 16


def test_whole_blocks_beyond_the_cached_ones_enter_the_prefix_cache():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 30, 0, 8, 1, committed=False)
    work = early.take_work()
    # Of 30 tokens 28 are whole blocks, of which 2 are cached.
    ((load, arrived),) = zip(work.begun, work.arrived, strict=True)
    assert (load.first_block, len(load.block_ids), arrived) == (2, 5, id_of(1))
    early.arrived(id_of(1), 1, committed=True)
    both = EarlyReport(Counter({(id_of(1), 1): 1}))
    early.reported(both)
    assert early.take_complete() == []
    early.reported(both)
    assert early.take_complete() == [("r", 20)]
    assert pool.cached == [("r", 2, 7, tuple(load.block_ids))]
    assert not pool.held
    assert early.take_work().over == [id_of(1)]


def test_what_a_handoff_leaves_out_stays_in_the_prefix_cache_meanwhile():
    pool = Pool()
    request = SimpleNamespace(block_hashes=["a", "b", "c"])
    pool.prefix = {"a": [pool.free[0]], "b": [pool.free[1]], "c": [pool.free[2]]}
    early = EarlyLoads(LAYOUT, pool)
    # Of 5 blocks the handoff leaves out 2; 3 are cached.
    early.begin(id_of(1), request, 5 * BLOCK, 2 * BLOCK, 3 * BLOCK, 1, committed=True)
    (load,) = early.take_work().begun
    assert (load.num_tokens, load.first_block, len(load.block_ids)) == (3 * BLOCK, 1, 2)
    assert {0, 1} < pool.held
    assert {0, 1}.isdisjoint(load.block_ids)
    early.reported(EarlyReport(Counter({(id_of(1), 1): LAYOUT.tp_size})))
    assert early.take_complete() == [(request, 2 * BLOCK)]
    assert pool.cached == [(request, 3, 5, tuple(load.block_ids))]
    assert not pool.held


def test_only_the_committed_epoch_counts():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 8, 0, 0, 1, committed=False)
    early.reported(EarlyReport(Counter({(id_of(1), 1): 2})))
    early.arrived(id_of(1), 2, committed=True)
    assert early.take_complete() == []
    early.reported(EarlyReport(Counter({(id_of(1), 2): 2})))
    assert early.take_complete() == [("r", 8)]


def test_a_commit_may_come_after_the_last_rank():
    early = EarlyLoads(LAYOUT, Pool())
    early.begin(id_of(1), Request("r"), 8, 0, 0, 1, committed=False)
    early.reported(EarlyReport(Counter({(id_of(1), 1): 2})))
    assert early.take_complete() == []
    early.arrived(id_of(1), 1, committed=True)
    assert early.take_complete() == [("r", 8)]


def test_nothing_is_begun_without_a_prefix_cache_or_without_room():
    without = EarlyLoads(LAYOUT, Pool(enable_caching=False))
    full = EarlyLoads(LAYOUT, Pool(free=[Block(n) for n in range(8)]))
    for early in (without, full):
        early.begin(id_of(1), Request("r"), 5 * BLOCK, 0, 0, 1, committed=True)
        assert not early.loading(id_of(1))
        assert not early.take_work()
    short = EarlyLoads(LAYOUT, Pool())
    short.begin(id_of(1), Request("r"), BLOCK - 1, 0, 0, 1, committed=True)
    assert not short.take_work()


def test_early_loads_yield_when_blocks_run_short():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 5 * BLOCK, 0, 0, 1, committed=False)
    early.take_work()
    pool.num_gpu_blocks, running = 100 * NUM_BLOCKS, pool.get_new_blocks(NUM_BLOCKS - 5)
    assert early.take_work().over == [id_of(1)]
    assert not early.loading(id_of(1))
    assert pool.held == {block.block_id for block in running}


class AnyOrder(RuleBasedStateMachine):
    """Handoffs arrive, commit, start over and end in any order; ranks report at any time."""

    def __init__(self):
        super().__init__()
        self.pool = Pool()
        self.early = EarlyLoads(LAYOUT, self.pool)
        self.epochs: dict[int, int] = {}
        self.committed: set[int] = set()
        self.verified: Counter[tuple[int, int]] = Counter()
        self.num_begun = 0
        # Of which the ranks know.
        self.told: set[int] = set()

    @rule(tokens=st.integers(1, 60), cached=st.integers(0, 4), committed=st.booleans())
    def begin(self, tokens, cached, committed):
        self.num_begun += 1
        number = self.num_begun % 250 + 1
        if number in self.epochs:
            return
        self.epochs[number] = 1
        if committed:
            self.committed.add(number)
        self.early.begin(
            id_of(number), Request(f"r{number}"), tokens, 0, cached * BLOCK, 1, committed=committed
        )

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), committed=st.booleans(), again=st.booleans())
    def arrive(self, data, committed, again):
        number = data.draw(st.sampled_from(sorted(self.epochs)))
        self.epochs[number] += again
        (self.committed.add if committed else self.committed.discard)(number)
        self.early.arrived(id_of(number), self.epochs[number], committed=committed)
        for request, _ in self.early.take_complete():
            assert int(request[1:]) in self.committed

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.epochs)))
        self.early.drop(id_of(number))
        assert not self.early.loading(id_of(number))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), spoiled=st.booleans())
    def rank_reports(self, data, spoiled):
        number = data.draw(st.sampled_from(sorted(self.told)))
        epoch = data.draw(st.integers(1, self.epochs[number]))
        if self.verified[number, epoch] == LAYOUT.tp_size:
            return
        if spoiled:
            self.early.reported(EarlyReport(spoiled={id_of(number)}))
            assert not self.early.loading(id_of(number))
            return
        self.verified[number, epoch] += 1
        before = len(self.pool.cached)
        self.early.reported(EarlyReport(Counter({(id_of(number), epoch): 1})))
        done = self.early.take_complete()
        assert len(done) == len(self.pool.cached) - before
        for request, _ in done:
            whole = int(request[1:])
            assert whole in self.committed
            assert self.verified[whole, self.epochs[whole]] == LAYOUT.tp_size

    @rule()
    def step(self):
        work = self.early.take_work()
        assert not self.early.has_work
        assert set(work.over).isdisjoint(load.handoff_id for load in work.begun)
        assert len(work.arrived) == len(set(work.arrived))
        self.told |= {load.handoff_id[0] for load in work.begun}

    @invariant()
    def blocks_are_held_by_loads_alone(self):
        loading = [number for number in self.epochs if self.early.loading(id_of(number))]
        assert bool(loading) == bool(self.pool.held)
        assert len(self.pool.held) + len(self.pool.free) == NUM_BLOCKS


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
