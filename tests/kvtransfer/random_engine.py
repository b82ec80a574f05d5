"""Random rules for the small engine of driven_engine.py."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kvtransfer.driven_engine import ALL_BYTES, BLOCK_BYTES, FAULTS, DrivenEngine
from tests.kvtransfer.small_engine import LAYOUT, NUM_BLOCKS, TOKEN_BYTES

KINDS = st.lists(st.sampled_from(["drop", "deliver", "submit"]), max_size=3)
# Faults are rarer than their absence.
RARE_FAULT = st.sampled_from([None, None, *FAULTS])


def some_come(self):
    return bool(self.engine.coming)


def is_disturbed(self):
    return not self.engine.is_calm


class RandomEngine(RuleBasedStateMachine):
    engine: DrivenEngine | None = None

    @initialize(
        is_calm=st.booleans(),
        verifies_late=st.booleans(),
        first_yields=st.booleans(),
        requests_wait=st.booleans(),
    )
    def starts(self, is_calm, verifies_late, first_yields, requests_wait):
        self.engine = DrivenEngine(
            is_calm,
            verifies_late=verifies_late,
            first_yields=first_yields,
            requests_wait=requests_wait,
        )

    # ---- Handoffs and requests.

    @rule(
        length=st.integers(1, 26),
        family=st.integers(1, 2),
        skip=st.integers(0, 3),
        fault=RARE_FAULT,
    )
    def begins(self, length, family, skip, fault):
        self.engine.begin(length, family, skip, fault=fault)

    @rule(
        num_blocks=st.integers(1, 5),
        num_more=st.integers(2, 9),
        skip=st.integers(0, 3),
        num_following=st.integers(0, 2),
        lacking=st.sampled_from([0, 0, 1, 2]),
        fault=RARE_FAULT,
    )
    def begins_fetch(self, num_blocks, num_more, skip, num_following, lacking, fault):
        self.engine.begin_fetch(num_blocks, num_more, skip, num_following, lacking, fault=fault)

    @precondition(some_come)
    @rule(data=st.data(), count=st.sampled_from([1, 5, 10, 30, 1000]))
    def arrives(self, data, count):
        self.engine.deliver(self.one_of(data), count)

    @precondition(some_come)
    @rule(
        length=st.integers(5, 26),
        family=st.integers(1, 2),
        before=st.integers(4, 20),
        when=st.sampled_from(["with the commit", "later", "a step later"]),
        num_free=st.integers(0, NUM_BLOCKS),
        fault=st.sampled_from([None, *FAULTS]),
    )
    def is_decoded(self, length, family, before, when, num_free, fault):
        """The usual order: the end of the handoff arrives while a step runs."""
        engine = self.engine
        engine.begin(length, family, 0, fault=fault)
        coming = engine.coming[-1]
        engine.deliver(coming, before)
        engine.run_step()
        later = [("deliver", coming)]
        engine.run_step(later=later + ([("submit", coming)] if when == "with the commit" else []))
        if when == "a step later":
            engine.run_step(num_free=num_free)
        if coming in engine.coming:
            engine.submit(coming)
        # The worker cancels the handoff when the ranks are about to load it.
        engine.run_step([("drop", coming)], num_free=num_free)

    @precondition(lambda self: any(not one.is_submitted for one in self.engine.coming))
    @rule(data=st.data())
    def first_token_is_known(self, data):
        others = [one for one in self.engine.coming if not one.is_submitted]
        self.engine.submit(data.draw(st.sampled_from(others)))

    @precondition(some_come)
    @rule(data=st.data())
    def is_cancelled_by_the_worker(self, data):
        """The cancel comes before the engine has loaded the handoff."""
        self.engine.drop(self.one_of(data))

    @precondition(some_come)
    @rule(data=st.data())
    def is_aborted(self, data):
        self.engine.abort(self.one_of(data))

    def one_of(self, data):
        return data.draw(st.sampled_from(self.engine.coming))

    # ---- Disturbances.

    @precondition(is_disturbed)
    @rule(seconds=st.sampled_from([5.0, 40.0]))
    def time_passes(self, seconds):
        self.engine.advance(seconds)

    @precondition(is_disturbed)
    @rule(at=st.integers(0, LAYOUT.handoff_bytes(8) // TOKEN_BYTES - 1))
    def staging_is_altered(self, at):
        self.engine.alter_staging(at)

    @precondition(is_disturbed)
    @rule()
    def the_service_stops_or_goes_on(self):
        self.engine.stop_or_start_service()

    # ---- Steps.

    @rule(
        data=st.data(),
        meanwhile=KINDS,
        later=KINDS,
        num_free=st.integers(0, NUM_BLOCKS),
        num_aborted=st.sampled_from([0, 0, 1, 2]),
        ahead=st.booleans(),
        slow=st.booleans(),
        most_bytes=st.sampled_from([1, 2 * BLOCK_BYTES, 5 * BLOCK_BYTES, ALL_BYTES]),
    )
    def step(self, data, meanwhile, later, num_free, num_aborted, ahead, slow, most_bytes):
        def events(kinds):
            return [(kind, self.one_of(data)) for kind in (kinds if self.engine.coming else ())]

        self.engine.run_step(
            events(meanwhile),
            events(later),
            num_free,
            num_aborted,
            ahead=ahead,
            slow=slow,
            most_bytes=most_bytes,
        )

    @invariant()
    def intact(self):
        if self.engine is not None:
            self.engine.check_integrity()

    def teardown(self):
        if self.engine is not None:
            self.engine.end_all()
