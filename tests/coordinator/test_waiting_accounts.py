"""Property test: after all requests have ended, no waiting or running work is still counted."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape

LANES = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE}
WORKERS = ("p0", "p1", "d0", "d1")
MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
# KV blocks for some outputs; most prompts take two steps.
SHAPE = WorkerShape(MODEL, kv_tokens=8192, max_num_seqs=16, max_num_batched_tokens=256)
VALUES = {
    "model": "simulated",
    "coordinator": {"max_request_s": 60},
    "lanes": {
        "interactive": {"ttft_ms": 600, "itl_ms": 12},
        "batch": {"max_running": 6, "max_queue_s": 20, "ttft_ms": 10_000},
        "long_prompt_tokens": 1500,
    },
    "scaling": {"targets": {"interactive": {"ttft_ms_per_1k_tokens": 500}}},
    "tenants": {
        "narrow": {"max_concurrent": 2},
        "heavy": {"weight": 4},
        "limited": {"tokens_per_s": 2000, "burst_tokens": 4000, "max_concurrent": 8},
    },
}


class WaitingMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.cell = VirtualCell(CoreConfig.of(parse(VALUES, "test")))
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.lost = set(WORKERS)
        for name in WORKERS:
            self.come(name)

    def come(self, name):
        self.lost.discard(name)
        self.incarnations[name] += 1
        self.cell.add_worker(name, ROLES[name[0]], SHAPE, self.incarnations[name])

    @rule(
        number=st.integers(1, 12),
        num_prompt=st.sampled_from([10, 400, 1000, 2000]),
        num_output=st.sampled_from([1, 5, 60]),
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from(["default", "narrow", "heavy", "limited"]),
        timeout_s=st.sampled_from([None, None, 1.0]),
    )
    def submit(self, number, num_prompt, num_output, lane, tenant, timeout_s):
        for _ in range(number):
            self.cell.submit(num_prompt, num_output, lane=lane, tenant=tenant, timeout_s=timeout_s)

    @precondition(lambda self: self.cell.core.num_requests)
    @rule(data=st.data(), number=st.integers(1, 6))
    def cancel(self, data, number):
        for _ in range(number):
            if running := self.cell.core.running():
                to = data.draw(st.sampled_from(running)).submission.to
                self.cell.post(ev.StreamCancelled(to))

    @precondition(lambda self: len(self.lost) < len(WORKERS))
    @rule(data=st.data())
    def lose(self, data):
        name = data.draw(st.sampled_from(sorted(set(WORKERS) - self.lost)))
        self.lost.add(name)
        self.cell.kill(name)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def come_back(self, data):
        self.come(data.draw(st.sampled_from(sorted(self.lost))))

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.1, 0.5, 3.0]))
    def wait(self, seconds):
        self.cell.run(self.cell.now + seconds)

    @invariant()
    def is_whole(self):
        if hasattr(self, "cell"):
            self.cell.core.check_integrity()

    def teardown(self):
        if not hasattr(self, "cell"):
            return
        cell, lanes = self.cell, self.cell.core._parts.lanes
        for name in sorted(self.lost):
            self.come(name)
        cell.run(cell.now + 100)
        cell.core.check_integrity()
        assert all(one.ended_at is not None for one in cell.outcomes)
        assert cell.core.num_requests == len(lanes) == 0
        assert all(lanes.waits.work_s(lane, cell.core.fleets.stable) == 0 for lane in LANES)
        for worker in cell.core.workers:
            entry = cell.core.placers.load(worker)
            assert (entry.num_prefills, entry.num_decodes, entry.queued_tokens) == (0, 0, 0)
            assert entry.free_tokens == SHAPE.kv_tokens
        # A request that comes now does not wait.
        first = cell.submit(10, 1, tenant="narrow", lane=LANES[0])
        cell.run(cell.now + 10)
        assert not first.shed
        assert first.ttft_s < 0.1


def test_no_work_is_counted_after_all_requests_have_ended():
    run_state_machine_as_test(
        WaitingMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
