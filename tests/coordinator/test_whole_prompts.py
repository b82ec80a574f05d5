"""Requests with prompt logprobs: engines use no cached blocks for them."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# A prompt token takes 1 ms.
MODEL = LatencyModel(0.001, 1e-3, 0.0, 0.020, 0.001, 0.0)
PREFIX = list(range(800))
WHOLE = {"max_tokens": 1, "prompt_logprobs": 1}


@pytest.fixture(params=[False, True], ids=["strict", "elastic"])
def world(request, new_world):
    """A cell in which only the prefill worker "a" of two holds PREFIX."""
    made = new_world(elastic=request.param, latency=MODEL)
    for name, role in (("a", PREFILL), ("b", PREFILL), ("d", DECODE)):
        made.attach(name, role)
    stored = block_hashes(PREFIX, 16, root_of("", ""))
    made.handle(ev.WorkerCache(("a", 1), cluster_pb2.CacheEvents(stored=stored)))
    return made


def submit(world, number: int, **sampling):
    to = world.submit(prompt_token_ids=[*PREFIX, *[500 + number] * 32], sampling=sampling)
    return world.core.request(f"r{to.stream}")


def test_prompts_that_are_computed_whole_are_not_sent_after_their_prefix(world):
    first, second = (submit(world, number, **WHOLE) for number in range(2))
    assert first.prefill != second.prefill
    for request in (first, second):
        predicted = request.placement_prediction
        assert predicted.computation_s == MODEL.prefill_s(832)
        assert predicted.hits.num_tokens == 0
    cached = submit(world, 2, max_tokens=1)
    assert cached.prefill == ("a", 1)
    assert cached.placement_prediction.hits.num_device == len(PREFIX)


def test_admission_predicts_the_whole_computation_of_a_prompt_with_logprobs(world, out):
    target = TtftTarget(0.4)
    prompt = [*PREFIX, *[500] * 32]
    cached = world.submit(prompt_token_ids=prompt, sampling={"max_tokens": 1}, slo_ttft=target)
    assert world.kinds(cached) == ["Accepted"]
    # Before the first token, a hopeless request is admitted to measure prompts.
    world.step("a", out("r1", [1], finish=common_pb2.FINISH_REASON_LENGTH))
    assert world.kinds(cached)[-1] == "Finished"
    whole = world.submit(prompt_token_ids=prompt, sampling=WHOLE, slo_ttft=target)
    assert world.last(whole).error.reason == "TOO_LATE"
    assert "the prompt alone takes 0.8" in str(world.last(whole).error)


def test_the_handoff_of_a_prompt_that_is_computed_whole_leaves_out_known_blocks(world):
    """Only the worker that returns the logprobs computes the whole prompt."""
    stored = block_hashes(PREFIX, 16, root_of("", ""))
    for name in "bd":
        world.handle(ev.WorkerCache((name, 1), cluster_pb2.CacheEvents(stored=stored)))
    for number in range(3):
        request = submit(world, number, max_tokens=8, prompt_logprobs=1)
        if request.prefill is not None:
            assert request.skip_tokens == len(PREFIX)
            return
    pytest.fail("no request has a handoff")
