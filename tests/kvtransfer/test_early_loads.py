"""Early loads, the scheduler's half: blocks go from them to their request, or to nobody."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer.connector.early_loads import EarlyLoads
from baton.kvtransfer.connector.handoff_step import LoadReport
from baton.kvtransfer.layout import KvLayout

NUM_BLOCKS, BLOCK = 40, 4
LAYOUT = KvLayout("m", "r", "float32", 2, 1, 8, BLOCK, 128, "heads,tokens,content", tp_size=2)


@dataclass(eq=False)
class Block:
    block_id: int


@dataclass
class Pool:
    """As much of vLLM's BlockPool as is used; nothing is freed twice or taken while held."""

    num_gpu_blocks: int = NUM_BLOCKS
    free: list[Block] = field(default_factory=lambda: [Block(n) for n in range(NUM_BLOCKS)])
    held: set[int] = field(default_factory=set)
    prefix: dict[str, list[Block]] = field(default_factory=dict)

    def get_num_free_blocks(self):
        return len(self.free)

    def get_new_blocks(self, count):
        assert count <= len(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        self.held |= {block.block_id for block in taken}
        return taken

    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            self.held.remove(block.block_id)
        # They are in no prefix cache.
        self.free = blocks + self.free

    def get_cached_block(self, block_hash, groups):
        assert groups == [0]
        return self.prefix.get(block_hash)

    def touch(self, blocks):
        self.free = [block for block in self.free if block not in blocks]
        self.held |= {block.block_id for block in blocks}


class Request(str):
    """As much of vLLM's Request as is used, beside a name."""

    block_hashes = ()


def id_of(number: int) -> bytes:
    return bytes([number]) * 16


def begun(pool, num_tokens, num_cached_tokens=0):
    """Early loads with one, of which the ranks know, and what they know."""
    early = EarlyLoads(LAYOUT, pool)
    early.begin(id_of(1), Request("r"), num_tokens, 0, num_cached_tokens)
    (told,) = early.take_work().begun
    return early, told


def taken_ids(pool, count):
    return [block.block_id for block in pool.get_new_blocks(count)]


def test_the_request_gets_the_blocks_that_were_filled_for_it():
    pool = Pool()
    early, told = begun(pool, 30, 8)
    # Of 8 blocks 2 are cached; the last is broken.
    assert (told.first_block, len(told.block_ids)) == (2, 6)
    assert pool.held == set(told.block_ids)
    early.offer(id_of(1), 8)
    got = taken_ids(pool, 7)
    assert got[:6] == told.block_ids
    assert early.take(id_of(1), got[:6])
    # They are the request's now, with what is in them.
    work = early.take_work()
    assert (work.over, work.cleared) == ([id_of(1)], [])
    assert pool.held == set(got)


def test_what_the_prefix_cache_has_meanwhile_is_not_loaded():
    pool = Pool()
    early, told = begun(pool, 30)
    early.offer(id_of(1), 3 * BLOCK)
    got = taken_ids(pool, 5)
    assert got == told.block_ids[3:]
    assert early.take(id_of(1), got)
    # What the others of them hold was never committed.
    assert early.take_work().cleared == told.block_ids[:3]


def test_a_request_that_gets_other_blocks_loads_all_of_them():
    pool = Pool()
    early, told = begun(pool, 30)
    early.offer(id_of(1), 0)
    other = taken_ids(pool, 1)
    assert not early.take(id_of(1), taken_ids(pool, 8))
    assert other == told.block_ids[:1]
    work = early.take_work()
    assert (work.over, work.cleared) == ([id_of(1)], told.block_ids)


def test_blocks_that_were_offered_and_not_taken_are_anybodys():
    pool = Pool()
    early, told = begun(pool, 30)
    early.offer(id_of(1), 0)
    work = early.take_work()
    assert (work.over, work.cleared) == ([id_of(1)], told.block_ids)
    assert not pool.held
    # The same ones, but somebody may have used them in between.
    assert not early.take(id_of(1), told.block_ids)


def test_nothing_is_offered_of_what_is_all_cached_or_begins_too_late():
    for num_cached_tokens in (5 * BLOCK, BLOCK):
        pool = Pool()
        early, _ = begun(pool, 5 * BLOCK, 2 * BLOCK)
        early.offer(id_of(1), num_cached_tokens)
        assert early.take_work().over == [id_of(1)]
        assert not pool.held


def test_what_comes_before_stays_in_the_prefix_cache_meanwhile():
    pool = Pool()
    request = SimpleNamespace(block_hashes=["a", "b", "c"])
    pool.prefix = {"a": [pool.free[0]], "b": [pool.free[1]], "c": [pool.free[2]]}
    early = EarlyLoads(LAYOUT, pool)
    # Of 5 blocks the handoff leaves out 2; 3 are cached.
    early.keep(id_of(1), request, 2 * BLOCK)
    assert pool.held == {0, 1}
    early.drop(id_of(1))
    assert not pool.held
    early.begin(id_of(1), request, 5 * BLOCK, 2 * BLOCK, 3 * BLOCK)
    (load,) = early.take_work().begun
    assert (load.num_tokens, load.first_block, len(load.block_ids)) == (3 * BLOCK, 1, 2)
    assert pool.held == {0, 1, 2, *load.block_ids}
    early.offer(id_of(1), 3 * BLOCK)
    assert pool.held == {0, 1, 2}
    assert early.take(id_of(1), taken_ids(pool, 2))
    assert pool.held == set(load.block_ids)


def test_nothing_is_begun_without_room():
    early = EarlyLoads(LAYOUT, Pool(free=[Block(n) for n in range(8)]))
    early.begin(id_of(1), Request("r"), 5 * BLOCK, 0, 0)
    assert not early.take_work()


def test_early_loads_yield_when_blocks_run_short():
    pool = Pool()
    early, _ = begun(pool, 5 * BLOCK)
    pool.num_gpu_blocks, running = 100 * NUM_BLOCKS, pool.get_new_blocks(NUM_BLOCKS - 5)
    assert early.take_work().over == [id_of(1)]
    assert pool.held == {block.block_id for block in running}


def test_what_was_there_before_a_load_is_what_every_rank_had():
    report = LoadReport()
    assert not report
    report.add(LoadReport({id_of(1): 5, id_of(2): 7}))
    report.add(LoadReport({id_of(1): 6, id_of(2): 0}))
    assert report.num_early_blocks == {id_of(1): 5, id_of(2): 0}


class AnyOrder(RuleBasedStateMachine):
    """Handoffs arrive, are offered, run and end in any order."""

    def __init__(self):
        super().__init__()
        self.pool = Pool()
        self.early = EarlyLoads(LAYOUT, self.pool)
        self.num_begun = 0
        # Begun, and neither taken nor given up; those offered since the last step.
        self.loads: set[int] = set()
        # Of which the ranks know.
        self.told: set[int] = set()
        self.offered: set[int] = set()
        # Of requests that run.
        self.running: list[Block] = []

    @rule(tokens=st.integers(1, 60), cached=st.integers(0, 4))
    def begin(self, tokens, cached):
        self.num_begun += 1
        number = self.num_begun % 250 + 1
        if number in self.loads:
            return
        num_held = len(self.pool.held)
        self.early.begin(id_of(number), Request(f"r{number}"), tokens, 0, cached * BLOCK)
        if len(self.pool.held) > num_held:
            self.loads.add(number)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def arrive(self, data):
        self.early.arrived(id_of(data.draw(st.sampled_from(sorted(self.loads)))))

    @precondition(lambda self: self.loads - self.offered)
    @rule(data=st.data(), cached=st.integers(0, 10), outcome=st.sampled_from(["runs", "waits"]))
    def is_asked(self, data, cached, outcome):
        """It may run, and gets blocks or not."""
        number = data.draw(st.sampled_from(sorted(self.loads - self.offered)))
        self.early.offer(id_of(number), cached * BLOCK)
        if outcome == "runs" and self.pool.free:
            blocks = self.pool.get_new_blocks(min(3, len(self.pool.free)))
            self.running += blocks
            self.early.take(id_of(number), [block.block_id for block in blocks])
            self.loads.remove(number)
        else:
            self.offered.add(number)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def ends(self, data):
        number = data.draw(st.sampled_from(sorted(self.loads)))
        self.loads.remove(number)
        self.offered.discard(number)
        self.early.drop(id_of(number))

    @rule()
    def running_ones_end(self):
        blocks, self.running = self.running, []
        self.pool.free_blocks(blocks)

    @rule()
    def step(self):
        work = self.early.take_work()
        assert not self.early.has_work
        assert set(work.over).isdisjoint(load.handoff_id for load in work.begun)
        begun = {load.handoff_id[0] for load in work.begun}
        over = {handoff_id[0] for handoff_id in work.over}
        assert over <= self.told
        # What the ranks load from now on: of what has not ended, and was not offered in vain.
        self.told = (self.told - over) | begun
        assert self.told <= self.loads - self.offered
        arrived = [handoff_id[0] for handoff_id in work.arrived]
        assert len(arrived) == len(set(arrived))
        assert set(arrived) <= self.told
        self.loads, self.offered = set(self.told), set()

    @invariant()
    def blocks_are_held_by_loads_alone(self):
        loading = self.loads - self.offered
        running = {block.block_id for block in self.running}
        assert running <= self.pool.held
        assert bool(loading) == bool(self.pool.held - running)
        assert len(self.pool.held) + len(self.pool.free) == NUM_BLOCKS


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
