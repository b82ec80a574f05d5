"""The work of each vLLM step, counted from its scheduler's output."""

from __future__ import annotations

from types import SimpleNamespace

from baton.kvtransfer.connector.step_work import StepCounter


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


def work(counter: StepCounter, **what) -> list[float]:
    """Returns prefill tokens, the sum of their squares, decodes and KV tokens."""
    return counter.count(output(**what))[1:]


def test_chunks_of_a_prompt_add_up_to_its_square():
    counter = StepCounter()
    steps = [
        work(counter, new=[("a", 0, 64)]),
        work(counter, cached=[("a", 64, 64)]),
        work(counter, cached=[("a", 128, 22)]),
    ]
    assert [step[0] for step in steps] == [64, 64, 22]
    assert sum(step[1] for step in steps) == 150**2
    assert [step[2:] for step in steps] == [[0, 0]] * 3
    assert work(counter, cached=[("a", 150, 1)]) == [0, 0, 1, 151]


def test_a_mixed_step_is_one_sum():
    counter = StepCounter()
    found = work(counter, new=[("a", 0, 10), ("b", 0, 1)], cached=[("c", 99, 1), ("d", 49, 1)])
    assert found == [11, 101, 2, 150]


def test_tokens_from_a_cache_are_not_counted():
    counter = StepCounter()
    steps = [work(counter, new=[("a", 32, 16)]), work(counter, cached=[("a", 48, 16)])]
    assert [step[:2] for step in steps] == [[16, 16**2], [16, 32**2 - 16**2]]
    counter.forget("a")
    # With all prompt tokens but the last cached, the first step is a decode.
    assert work(counter, new=[("a", 31, 1)]) == [0, 0, 1, 32]


def test_a_resumed_request_is_computed_again():
    counter = StepCounter()
    work(counter, new=[("a", 16, 16)])
    assert work(counter, cached=[("a", 0, 40)], resumed=["a"]) == [40, 40**2, 0, 0]


def test_drafts_do_not_make_a_decode_a_chunk():
    drafts = {"a": [1, 2, 3]}
    assert work(StepCounter(), cached=[("a", 10, 4)], drafts=drafts) == [0, 0, 1, 11]


def test_a_step_that_computes_nothing_has_no_work():
    assert StepCounter().count(output()) is None
