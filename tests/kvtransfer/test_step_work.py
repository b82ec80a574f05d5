"""The work of each vLLM step, counted from its scheduler's output."""

from __future__ import annotations

from types import SimpleNamespace

from baton.kvtransfer.connector.step_work import StepCounter, StepWork


def output(new=(), cached=(), resumed=(), drafts=None):
    """Returns a partial SchedulerOutput; requests are (name, computed tokens, scheduled tokens)."""
    return SimpleNamespace(
        num_scheduled_tokens={name: scheduled for name, _, scheduled in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            resumed_req_ids=set(resumed),
        ),
        scheduled_spec_decode_tokens=drafts or {},
    )


def work(counter: StepCounter, **what) -> StepWork:
    """Returns the work of a step that is scheduled at 0."""
    return counter.count(output(**what))._replace(scheduled_at=0)


def computes(*counts: int) -> StepWork:
    """Returns work of prefill tokens, the sum of their squares, decodes and KV tokens."""
    return StepWork(0, *counts)


def test_chunks_of_a_prompt_add_up_to_its_square():
    counter = StepCounter()
    steps = [
        work(counter, new=[("a", 0, 64)]),
        work(counter, cached=[("a", 64, 64)]),
        work(counter, cached=[("a", 128, 22)]),
    ]
    assert [step.num_prefill_tokens for step in steps] == [64, 64, 22]
    assert sum(step.prefill_token_squares for step in steps) == 150**2
    assert not any(step.num_decodes or step.num_kv_tokens for step in steps)
    assert work(counter, cached=[("a", 150, 1)]) == computes(0, 0, 1, 151)


def test_a_mixed_step_is_one_sum():
    counter = StepCounter()
    found = work(counter, new=[("a", 0, 10), ("b", 0, 1)], cached=[("c", 99, 1), ("d", 49, 1)])
    assert found == computes(11, 101, 2, 150)


def test_tokens_from_a_cache_are_not_counted():
    counter = StepCounter()
    steps = [work(counter, new=[("a", 32, 16)]), work(counter, cached=[("a", 48, 16)])]
    assert steps == [computes(16, 16**2, 0, 0), computes(16, 32**2 - 16**2, 0, 0)]
    counter.forget("a")
    # With all prompt tokens but the last cached, the first step is a decode.
    assert work(counter, new=[("a", 31, 1)]) == computes(0, 0, 1, 32)


def test_a_resumed_request_is_computed_again():
    counter = StepCounter()
    work(counter, new=[("a", 16, 16)])
    assert work(counter, cached=[("a", 0, 40)], resumed=["a"]) == computes(40, 40**2, 0, 0)


def test_drafts_do_not_make_a_decode_a_chunk():
    drafts = {"a": [1, 2, 3]}
    assert work(StepCounter(), cached=[("a", 10, 4)], drafts=drafts) == computes(0, 0, 1, 11)


def test_a_step_that_computes_nothing_has_no_work():
    assert StepCounter().count(output()) is None
