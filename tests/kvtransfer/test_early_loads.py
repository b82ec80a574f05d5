"""Early loads, the scheduler's half: blocks are known to others when all are there, not before."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer.early_loads import DueLoad, EarlyLoads, EarlyReport
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


CLAIMS = [b"of rank 0", b"of rank 1"]


def test_whole_blocks_beyond_the_cached_ones_enter_the_prefix_cache():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 30, 0, 8)
    work = early.take_work()
    # Of 30 tokens 28 are whole blocks, of which 2 are cached; the last block is broken.
    ((load, arrived),) = zip(work.begun, work.arrived, strict=True)
    assert (load.first_block, len(load.block_ids), arrived) == (2, 6, id_of(1))
    assert not pool.cached
    assert early.commit(id_of(1), CLAIMS) == load
    *whole, tail = load.block_ids
    assert pool.cached == [("r", 2, 7, tuple(whole))]
    assert not early.loading(id_of(1))
    # Nobody else gets the blocks before the ranks have been told to fill them.
    assert pool.held == set(load.block_ids)
    assert early.take_work().due == [DueLoad(load, CLAIMS)]
    assert pool.held == {tail}
    # Nor the broken one before they have been told to copy it.
    assert early.take_tail(id_of(1)) == tail
    assert early.take_tail(id_of(1)) is None
    assert pool.held == {tail}
    assert not early.take_work()
    assert not pool.held


def test_what_a_handoff_leaves_out_stays_in_the_prefix_cache_meanwhile():
    pool = Pool()
    request = SimpleNamespace(block_hashes=["a", "b", "c"])
    pool.prefix = {"a": [pool.free[0]], "b": [pool.free[1]], "c": [pool.free[2]]}
    early = EarlyLoads(LAYOUT, pool)
    # Of 5 blocks the handoff leaves out 2; 3 are cached.
    early.begin(id_of(1), request, 5 * BLOCK, 2 * BLOCK, 3 * BLOCK)
    (load,) = early.take_work().begun
    assert (load.num_tokens, load.first_block, len(load.block_ids)) == (3 * BLOCK, 1, 2)
    assert {0, 1} < pool.held
    assert {0, 1}.isdisjoint(load.block_ids)
    early.commit(id_of(1), CLAIMS)
    assert pool.cached == [(request, 3, 5, tuple(load.block_ids))]
    early.take_work()
    assert not pool.held


def test_a_load_that_is_committed_before_the_ranks_know_of_it_is_due_at_once():
    early = EarlyLoads(LAYOUT, Pool())
    early.begin(id_of(1), Request("r"), 8, 0, 0)
    load = early.commit(id_of(1), CLAIMS)
    work = early.take_work()
    assert (work.begun, work.arrived, work.due) == ([], [], [DueLoad(load, CLAIMS)])


def test_what_others_can_find_is_filled_whatever_becomes_of_its_request():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 10, 0, 0)
    load = early.commit(id_of(1), CLAIMS)
    early.drop(id_of(1))
    early.yield_blocks()
    assert pool.held == set(load.block_ids)
    assert early.take_work().due == [DueLoad(load, CLAIMS)]
    assert not pool.held


def test_a_load_that_failed_when_it_was_due_leaves_no_tail():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 10, 0, 0)
    early.commit(id_of(1), CLAIMS)
    early.take_work()
    early.reported(EarlyReport({id_of(1)}))
    assert early.take_tail(id_of(1)) is None
    early.take_work()
    assert not pool.held


def test_nothing_is_begun_without_a_prefix_cache_or_without_room():
    without = EarlyLoads(LAYOUT, Pool(enable_caching=False))
    full = EarlyLoads(LAYOUT, Pool(free=[Block(n) for n in range(8)]))
    for early in (without, full):
        early.begin(id_of(1), Request("r"), 5 * BLOCK, 0, 0)
        assert not early.loading(id_of(1))
        assert not early.take_work()


def test_early_loads_yield_when_blocks_run_short():
    pool = Pool()
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), 5 * BLOCK, 0, 0)
    early.take_work()
    pool.num_gpu_blocks, running = 100 * NUM_BLOCKS, pool.get_new_blocks(NUM_BLOCKS - 5)
    assert early.take_work().over == [id_of(1)]
    assert not early.loading(id_of(1))
    assert pool.held == {block.block_id for block in running}


class AnyOrder(RuleBasedStateMachine):
    """Handoffs arrive, commit, end and run in any order; ranks report at any time."""

    def __init__(self):
        super().__init__()
        self.pool = Pool()
        self.early = EarlyLoads(LAYOUT, self.pool)
        self.num_begun = 0
        # Begun and not dropped, those with a broken last block; and committed ones of these.
        self.loads: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        # Blocks that the ranks are to fill in the next step, in the prefix cache already.
        self.unfilled: set[int] = set()

    @rule(tokens=st.integers(1, 60), cached=st.integers(0, 4))
    def begin(self, tokens, cached):
        self.num_begun += 1
        number = self.num_begun % 250 + 1
        if number in self.loads or number in self.tails:
            return
        self.early.begin(id_of(number), Request(f"r{number}"), tokens, 0, cached * BLOCK)
        if self.early.loading(id_of(number)):
            self.loads[number] = tokens

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def arrive(self, data):
        self.early.arrived(id_of(data.draw(st.sampled_from(sorted(self.loads)))))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def commit(self, data):
        number = data.draw(st.sampled_from(sorted(self.loads)))
        before = len(self.pool.cached)
        load = self.early.commit(id_of(number), CLAIMS)
        assert not self.early.loading(id_of(number))
        self.unfilled |= set(load.block_ids)
        whole = {one for _, _, _, ids in self.pool.cached[before:] for one in ids}
        assert whole <= set(load.block_ids)
        if tail := set(load.block_ids) - whole:
            (self.tails[number],) = tail
        assert bool(tail) == bool(self.loads.pop(number) % BLOCK)

    @precondition(lambda self: self.tails)
    @rule(data=st.data())
    def runs(self, data):
        number = data.draw(st.sampled_from(sorted(self.tails)))
        tail = self.tails.pop(number)
        assert self.early.take_tail(id_of(number)) == tail
        # The step that copies it is not made yet.
        self.unfilled.add(tail)

    @precondition(lambda self: self.loads or self.tails)
    @rule(data=st.data(), reported=st.booleans())
    def ends(self, data, reported):
        number = data.draw(st.sampled_from(sorted(self.loads | self.tails)))
        self.loads.pop(number, None)
        if (tail := self.tails.pop(number, None)) is not None:
            self.unfilled.add(tail)
        if reported:
            self.early.reported(EarlyReport({id_of(number)}))
        else:
            self.early.drop(id_of(number))
        assert not self.early.loading(id_of(number))
        assert self.early.take_tail(id_of(number)) is None

    @rule()
    def step(self):
        had_room = len(self.pool.free) >= 1
        work = self.early.take_work()
        assert not self.early.has_work
        assert set(work.over).isdisjoint(load.handoff_id for load in work.begun)
        assert len(work.arrived) == len(set(work.arrived))
        due = {block for one in work.due for block in one.load.block_ids}
        assert due <= self.unfilled
        self.unfilled.clear()
        if not had_room:
            self.loads.clear()
            self.tails.clear()

    @invariant()
    def blocks_are_held_until_they_are_filled(self):
        assert self.unfilled <= self.pool.held
        assert set(self.tails.values()) <= self.pool.held
        assert bool(self.loads or self.tails or self.unfilled) == bool(self.pool.held)
        assert len(self.pool.held) + len(self.pool.free) == NUM_BLOCKS


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
