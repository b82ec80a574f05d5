"""The simulated engine's scheduler on its own: a step is empty only if no request can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.engine.base import EngineRequest
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_host_tier import HostTier
from baton.engine.sim_scheduler import LiveRequest, Scheduler, Work
from baton.engine.sim_text import OutputText
from baton.engine.sim_tokens import TokenChain, Vocabulary
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.runtime import demo_model
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2

BLOCK, NUM_BLOCKS = 4, 8
# Seconds to load one block, and when the load of the second request has ended.
LOAD_BLOCK_S, LOADED_AT = 1.0, 10.0
# Without a fixed part, very short steps compute one token of the policy's first prompt.
MODEL = LatencyModel(0.0, 1e-3, 0.0, 0.0, 0.0, 0.0)
TARGETS = {
    "first come": None,
    "targets": StepTargets(prompt_step_s=0.2),
    "one token": StepTargets(prompt_step_s=1e-9),
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    root = tmp_path_factory.mktemp("model")
    return Vocabulary.load(demo_model.ensure("demo", weights=False, root=root))


def live(
    vocabulary: Vocabulary, name: str, prompt: Sequence[int], number: int, lane: int = 0
) -> LiveRequest:
    sampling = common_pb2.SamplingParams(max_tokens=100)
    tokens = list(prompt)
    return LiveRequest(
        request=EngineRequest(name, tokens, sampling, priority=lane),
        order=(lane, number),
        max_output_tokens=100,
        tokens=list(tokens),
        chain=TokenChain(vocabulary, tokens),
        text=OutputText(vocabulary, tokens, sampling),
        submitted_at=0.0,
        send=None,
        receive_deadline=None,
    )


def compute(scheduler: Scheduler, work: Sequence[Work]) -> None:
    """Advances requests as the engine does; the next token is always 1."""
    for item in work:
        request = item.request
        request.num_computed += item.num_tokens
        request.num_computed_here += item.num_tokens
        scheduler.cache_blocks(request)
        if not request.num_missing:
            request.tokens.append(1)


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("num_in_host", [2, 3])
@pytest.mark.parametrize("targets", TARGETS)
def test_a_loaded_request_starts_when_the_only_running_one_is_preempted(
    vocabulary: Vocabulary, targets: str, num_in_host: int, lane: int
) -> None:
    host = HostTier(64)
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        end_wait=lambda _: True,
        on_start=lambda _: None,
        caching_block_tokens=BLOCK,
        model=MODEL,
        targets=TARGETS[targets] and TARGETS["targets"],
        host=host,
        load_block_s=LOAD_BLOCK_S,
    )
    # Each holds half of the blocks.
    runs = live(vocabulary, "runs", range(100, 100 + 4 * BLOCK), 1)
    loads = live(vocabulary, "loads", range(200, 200 + 4 * BLOCK - 1), 2, lane)
    host.store(block_hashes(loads.tokens[: num_in_host * BLOCK], BLOCK), 0)
    scheduler.add(runs)
    scheduler.add(loads)
    while runs.num_output_tokens < 1:
        compute(scheduler, scheduler.schedule(0.0))
    assert scheduler.next_load_at is not None
    assert scheduler.next_load_at <= LOADED_AT
    scheduler.targets = TARGETS[targets]
    work = scheduler.schedule(LOADED_AT)
    assert runs.num_preemptions == 1
    assert [item.request for item in work] == [loads]
    scheduler.blocks.check_integrity()
    # The other one gets the blocks when this one has ended.
    compute(scheduler, work)
    scheduler.remove(loads)
    assert [item.request for item in scheduler.schedule(LOADED_AT)] == [runs]
    scheduler.blocks.check_integrity()


def test_a_stream_whose_handoff_is_on_its_way_limits_the_steps_of_prompts(
    vocabulary: Vocabulary,
) -> None:
    """A batch stream has no ITL target."""
    receive = ReceiveHandoff(bytes(16), 4, 60.0)
    found = {}
    for lane in (0, 1):
        scheduler = Scheduler(
            BlockPool(64, BLOCK),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            end_wait=lambda request: request.id != "stream",
            on_start=lambda _: None,
            model=MODEL,
            targets=StepTargets(itl_s=0.01, longest_gap_s=0.012, prompt_step_s=0.2),
        )
        scheduler.add(live(vocabulary, "prompt", range(60), 0))
        stream = live(vocabulary, "stream", range(5), 1, lane)
        stream.request = replace(stream.request, receive=receive)
        stream.receive_deadline = 60.0
        scheduler.add(stream)
        (work,) = scheduler.schedule(0.0)
        found[lane] = work.num_tokens
    assert found == {0: 9, 1: 60}
