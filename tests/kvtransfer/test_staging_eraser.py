"""Erasures of staging beside handoffs that get and free extents."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.kvtransfer import arena as arenas
from baton.kvtransfer.arena import Arena, aligned
from baton.kvtransfer.errors import NoRoom
from baton.kvtransfer.service import staging_eraser
from baton.kvtransfer.service.staging_queue import StagingQueue

# The other half of the segment lies before the arena.
BEGIN, SIZE = 1024, 32 * arenas.ALIGN_BYTES
OLD, NEW = 1, 2


class EraserMachine(RuleBasedStateMachine):
    """Extents that are written before and after the latest erasure began."""

    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.arena = Arena(BEGIN, SIZE)
        self.queue = StagingQueue(self.arena)
        self.memory = memoryview(bytearray([OLD]) * (BEGIN + SIZE))
        self.held = {}
        self.has_begun = False
        self.step_bytes = staging_eraser.STEP_BYTES
        staging_eraser.STEP_BYTES = 700

    @rule(target=extents, size=st.integers(1, SIZE // 3), writes=st.booleans())
    def takes(self, size, writes):
        try:
            extent = self.arena.allocate(size)
        except NoRoom:
            return multiple()
        place = slice(extent.offset, extent.offset + size)
        if writes:
            self.memory[place] = bytes([NEW]) * size
        self.held[extent.offset] = (place, bytes(self.memory[place]))
        return extent

    @rule(extent=consumes(extents))
    def frees(self, extent):
        self.queue.free(extent)
        del self.held[extent.offset]

    @rule()
    def begins(self):
        self.has_begun = True
        for at in range(BEGIN, BEGIN + SIZE):
            self.memory[at] = OLD if self.memory[at] else 0
        self.held = {at: (one[0], bytes(self.memory[one[0]])) for at, one in self.held.items()}
        self.queue.eraser.begin()

    @rule()
    def steps(self):
        self.queue.eraser.step(self.memory)

    @rule()
    def ends(self):
        while self.queue.eraser.has_work:
            self.queue.eraser.step(self.memory)
        if not self.has_begun:
            return
        # No free byte is from before the erasure.
        free, used = self.arena.within(BEGIN, BEGIN + SIZE)
        assert (
            sum(end - begin for begin, end in free) + sum(aligned(one.size_bytes) for one in used)
            == SIZE
        )
        assert all(OLD not in bytes(self.memory[begin:end]) for begin, end in free)

    @invariant()
    def leaves_alone_what_is_in_use(self):
        assert all(bytes(self.memory[place]) == data for place, data in self.held.values())
        assert bytes(self.memory[:BEGIN]) == bytes([OLD]) * BEGIN

    def teardown(self):
        for extent in list(self.arena.within(BEGIN, BEGIN + SIZE)[1]):
            self.frees(extent)
        self.ends()
        staging_eraser.STEP_BYTES = self.step_bytes


EraserMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TestEraser = EraserMachine.TestCase
