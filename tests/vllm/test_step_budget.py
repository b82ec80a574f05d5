"""Baton's scheduler inside vLLM: the same tokens as vLLM's own one, and no request stands still.

Schedulers and connector are real, also in the form for GPUs; there is no model.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = pytest.mark.vllm

NUM_SEEDS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("step-budget")
    with Program("step_budget_program", NUM_SEEDS, directory=directory) as program:
        found: dict[str, Any] = program.result()
    return found


def test_random_requests_get_the_same_tokens_as_from_the_scheduler_of_vllm(
    made: dict[str, Any],
) -> None:
    """Few blocks, two lanes, shared prefixes and a handoff; with normal and with tiny targets."""
    assert made["compared"]["differs"] == {}
    assert made["compared"]["num_preempted"]["vllm"] > 0


def test_random_prompts_with_images_end_with_the_same_tokens(made: dict[str, Any]) -> None:
    """The encoder cache is small, so that prompts wait for each other's images."""
    assert made["compared with images"]["differs"] == {}
    assert made["compared with images"]["num_preempted"]["vllm"] > 0


def test_random_requests_with_adapters_end_with_the_same_tokens(made: dict[str, Any]) -> None:
    """More adapters than a step may have; with one too many, vLLM's engine core ends."""
    assert made["compared with adapters"]["differs"] == {}


def test_a_prompt_without_an_adapter_slot_delays_no_other_prompt(made: dict[str, Any]) -> None:
    """It takes no tokens of the steps meanwhile, and starts whole once there is a slot."""
    *meanwhile, last = made["prompt without an adapter slot"]
    assert meanwhile == [
        {"stream": 1, "behind": 50, "no adapter": 13},
        {"stream": 1, "no adapter": 37},
        {"stream": 1},
    ]
    assert last == {"waits": 40}


def test_each_waiting_request_is_compared_with_the_adapters_and_not_with_all_streams(
    made: dict[str, Any],
) -> None:
    """Each of 40 requests more costs a few reads of an adapter, beside 20 streams."""
    reads = made["adapters read"]
    assert reads["40"] - reads["0"] < 10 * 40


def test_a_step_keeps_room_for_the_drafts_of_speculation(made: dict[str, Any]) -> None:
    """vLLM pads the first decode of a request to all its drafts, or does not start it."""
    assert made["compared with drafts"]["differs"] == {}


def test_a_short_prompt_overtakes_a_long_one_beside_a_stream(made: dict[str, Any]) -> None:
    steps = made["short beside long"]["steps"]
    assert all(step["stream"] == 1 for step in steps)
    assert "long" in steps[0]
    assert "short" not in steps[-1]
    assert sum(step.get("short", 0) for step in steps) == 10


def test_random_requests_get_the_same_tokens_with_a_threshold_for_long_prompts(
    made: dict[str, Any],
) -> None:
    assert made["compared with a threshold"]["differs"] == {}


@pytest.mark.parametrize("how", ["fixed", "adaptive"])
def test_tokens_that_a_long_prompt_may_not_have_go_to_other_prompts(
    made: dict[str, Any], how: str
) -> None:
    """Otherwise the plan would withhold the others, and most of each step would stay unused.

    The first step has 64 tokens, because nothing has been measured yet.
    """
    by_vllm, by_baton = made["long prompts"][how]
    for steps in (by_vllm, by_baton):
        assert sum(sum(step.values()) for step in steps) == 8 * 240
    assert len(by_baton) <= len(by_vllm) + 1


def test_a_prompt_that_is_overdue_waits_for_one_that_can_be_in_time(made: dict[str, Any]) -> None:
    steps = made["late beside in time"]["steps"]
    assert sum(step.get("long", 0) for step in steps) == 240
    assert sum(step.get("overdue", 0) for step in steps) == 10
    first = next(number for number, step in enumerate(steps) if "overdue" in step)
    assert sum(step.get("long", 0) for step in steps[:first]) > 120


def test_the_first_step_after_the_warm_up_is_short(made: dict[str, Any]) -> None:
    """Nothing has been measured on the machine yet, and the warm-up itself has no limit."""
    case = made["after the warm-up"]
    assert case["warm_up"] == {"warm-up#1": 100}
    assert 0 < case["first"]["first"] <= 64


def test_a_request_is_not_looked_up_in_each_step_while_its_handoff_is_under_way(
    made: dict[str, Any],
) -> None:
    case = made["handoff under way"]
    assert case["before"] == [{"stream": 1}] * 100
    assert case["lookups"] < 50
    assert case["num_waiting"] == 1
    assert any("waits" in step for step in case["after"])


def test_steps_are_short_from_the_arrival_of_a_stream_whose_handoff_is_not_loaded(
    made: dict[str, Any],
) -> None:
    """Its first token is out, so the steps until its load are part of its first gap."""
    before, *meanwhile, after = made["handoff beside a prompt"]
    assert len(meanwhile) >= 3
    assert max(meanwhile) <= 16 < 2 * 16 < min(before, after)


def test_a_loaded_request_starts_as_soon_as_the_cache_has_room(made: dict[str, Any]) -> None:
    """vLLM tries to start it once before, while the cache is full; another stream runs on."""
    by_vllm, by_baton = made["handoff in a full cache"]
    assert by_baton == by_vllm < 20


@pytest.mark.parametrize("case", ["handoff", "cached", "host"])
def test_a_prompt_progresses_beside_requests_that_get_no_blocks(
    made: dict[str, Any], case: str
) -> None:
    """They would get most tokens of each step; they start in time once there is room."""
    by_vllm, by_baton = made["beside requests without blocks"][case]
    assert len(by_baton["beside"]) <= len(by_vllm["beside"]) + 1
    assert len(by_baton["after"]) <= len(by_vllm["after"]) + 1
    assert by_baton["after"][-1].keys() & {"next", "short 0"}


def test_a_prompt_progresses_beside_a_loaded_one_that_has_no_place(made: dict[str, Any]) -> None:
    """The loaded one is shorter and older, so it would get all prompt tokens of each step."""
    case = made["prompt beside a loaded one"]
    assert case["num_loaded"] == 1
    first = next(number for number, step in enumerate(case["steps"]) if "fetched" in step)
    assert all("long" in step for step in case["steps"][:first])
    assert set(case["ended"]) == {"stream", "long", "fetched"}


def test_a_prompt_that_vllm_did_not_try_to_start_gets_all_its_tokens_in_the_next_step(
    made: dict[str, Any],
) -> None:
    """vLLM starts nothing in a step that preempts a stream, and nothing without a place."""
    assert made["beside a preemption"] == [{"stream": 1}, {"stream": 1, "arrives": 40}]
    assert made["loaded in the last place"] == [
        {"stream": 1, "fetched": 20},
        {"fetched": 1, "arrives": 40},
    ]
    streams = {"stream": 1, "other": 1}
    assert made["loaded without a place"] == [streams, streams, {"other": 1, "fetched": 40}]


def test_prompts_that_wait_for_the_encoder_cache_leave_their_tokens_to_its_holder(
    made: dict[str, Any],
) -> None:
    """The holder is a batch prompt: interactive prompts would get all tokens of each step."""
    case = made["images in two lanes"]
    assert case["before"] == [{"batch": 64}, {"batch": 64}]
    assert case["steps"].count({}) == 1
    assert set(case["ended"]) == {"batch", "running", "waiting"}


def test_a_prompt_that_waits_for_the_encoder_cache_delays_only_others_with_images(
    made: dict[str, Any],
) -> None:
    """The others with images would take the room that it waits for."""
    first, *meanwhile, last = made["prompts behind an image"]["60"]
    # In the first step, vLLM finds that there is no room.
    assert first.keys() == {"batch"}
    assert sum(step.get("text", 0) for step in meanwhile) == 150
    assert not any("later image" in step for step in (*meanwhile, last))
    assert last["image"]


def test_no_prompt_takes_the_blocks_of_one_that_waits_for_the_encoder_cache(
    made: dict[str, Any],
) -> None:
    steps = made["prompts behind an image"]["21"]
    assert steps[-1]["image"]
    assert not any("text" in step for step in steps)


def test_an_image_is_encoded_in_the_step_that_computes_its_first_token(
    made: dict[str, Any],
) -> None:
    assert made["image behind a chunk"] == [
        {"computed": 58, "cached": 0},
        {"computed": 116, "cached": 0},
        {"computed": 130, "cached": 6},
    ]


def test_a_prompt_starts_whole_in_the_step_in_which_it_has_its_grammar(
    made: dict[str, Any],
) -> None:
    assert made["compiled grammar"]["steps"] == [{"stream": 5}, {"stream": 1, "json": 10}]


def test_a_prompt_with_its_grammar_has_its_turn_like_others(made: dict[str, Any]) -> None:
    steps = made["compiled grammar behind another prompt"]["steps"]
    assert len(steps) > 2
    assert not any("json" in step for step in steps[:-1])


def test_a_request_whose_grammar_does_not_compile_fails_at_once(made: dict[str, Any]) -> None:
    """It waits neither for an adapter slot nor for a place beside the running requests."""
    assert made["failed grammar"] == {
        "no adapter slot": {"json": "error"},
        "no place": {"json": "error"},
    }


def test_prompts_with_recurrent_states_progress_beside_streams(made: dict[str, Any]) -> None:
    """vLLM gives them no part of a block if the step's plan exceeds a block."""
    for ends in made["recurrent states"].values():
        assert ends[-1] == 240
        for begin, end in itertools.pairwise(ends):
            assert end > begin
            # vLLM keeps a state at a block's end if the chunk from within the block ends there.
            assert end <= (begin // 16 + 1) * 16 if begin % 16 else True
            assert end % 16 == 0 or end < (begin // 16 + 1) * 16
    # The blocks of Qwen3-Next's states have 544 tokens.
    assert made["wide block"] == {"0": 280, "300": 244, "544": 280}


def test_a_preempted_stream_is_not_late(made: dict[str, Any]) -> None:
    """Its first token is out, so it goes before a longer prompt that can be in time."""
    steps = made["preempted stream"]["steps"]
    assert sum(step.get("long", 0) for step in steps) < 60


def test_a_step_keeps_the_itl_target_that_a_request_named(made: dict[str, Any]) -> None:
    """With a target that cannot be kept, a prompt gets the least number of tokens."""
    assert made["own ITL target"]["tiny"] <= 16 < 2 * 16 < made["own ITL target"]["none"]


def test_drafts_of_a_step_under_way_do_not_count_as_tokens(made: dict[str, Any]) -> None:
    """With them, the stream would seem to be ahead of its ITL target."""
    assert made["counted outputs"] == [1, 2]


def test_handoffs_start_although_prompts_use_up_each_step(made: dict[str, Any]) -> None:
    case = made["handoffs at the floor"]
    assert case["num_started"] == 32
    assert case["steps"] <= 4


def test_a_version_of_vllm_that_lacks_names_is_refused(made: dict[str, Any]) -> None:
    case = made["another vLLM"]
    assert case["error"].startswith("vLLM 9.9 lacks Scheduler.gone, Request.also_gone, which")
    assert "set steps.scheduler to vllm" in case["error"]
    assert case["scheduler"] is None


def test_prompts_that_vllm_cannot_divide_are_computed_in_one_step(made: dict[str, Any]) -> None:
    assert made["whole prompts"]["steps"] == [{"long": 240}]
