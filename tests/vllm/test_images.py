"""Chats with images: the second engine gets the KV cache of the images, and not the images."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# Tokens of an output that another worker continues.
NUM_KNOWN = 5
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = "A long text before the image. " * 13


def case(name: str, *parts: str | int, begun: str = "", **sampling: Any) -> dict[str, Any]:
    return {"name": name, "parts": parts, "begun": begun, "sampling": {**GREEDY, **sampling}}


CASES = [
    case("image", 1, "What is it?"),
    case("other-image", 2, "What is it?"),
    case("image-again", 1, "What is it? And what else?"),
    case("two-images", "Compare", 1, "with", 2, "please."),
    case("turned-round", "Compare", 2, "with", 1, "please."),
    # The image stands at the end of the first chunk.
    case("chunks", LONG, 3, "What is it?"),
    case("begun", 1, "What is it?", begun="It is "),
    case("seeded", 1, "What is it, perhaps?", temperature=1.0, seed=7, frequency_penalty=1.0),
]
CROWD = [case(f"crowd-{n}", n, "Tell me all.", max_tokens=220) for n in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("images")
    with Program(
        "images_program",
        {"cases": CASES, "crowd": CROWD, "num_known": NUM_KNOWN},
        directory=directory,
    ) as program:
        return program.result()


@pytest.fixture(scope="module")
def results(made) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in made["results"]}


@pytest.mark.proves("handoff", "compared", kind="images")
@pytest.mark.proves("seeds", "compared", kind="images")
def test_prompts_and_tokens_equal_those_of_one_vllm(made):
    assert made["takes_images"] == [True, True]
    for one, plain in zip(made["results"], made["plain"], strict=True):
        assert one["prompt"] == plain["prompt"], one["name"]
        assert one["token_ids"] == plain["token_ids"], one["name"]


@pytest.mark.proves("handoff", "compared", kind="images")
def test_the_whole_prompt_is_handed_over(results):
    for one in results.values():
        # A request with forced tokens computes its last prompt token again.
        num_computed = 1 if one["name"] == "seeded" else 0
        num_held = one["num_cached_by_decode"] + one["num_loaded"]
        assert num_held == len(one["prompt"]) - num_computed, one["name"]


@pytest.mark.proves("prefix reuse", "compared", kind="images")
def test_different_images_never_share_blocks(results):
    one, other = results["image"], results["other-image"]
    assert one["prompt"] == other["prompt"]
    assert one["ids"] != other["ids"]
    assert one["token_ids"] != other["token_ids"]
    # The image begins in the first block.
    assert other["num_cached_by_prefill"] == other["said_by_prefill"] == 0
    assert results["turned-round"]["num_cached_by_prefill"] == 0
    assert results["turned-round"]["token_ids"] != results["two-images"]["token_ids"]


@pytest.mark.proves("prefix reuse", "compared", kind="images")
def test_the_same_image_is_found_again_by_its_hash(results):
    again = results["image-again"]
    assert again["num_cached_by_prefill"] == cases.BLOCK_SIZE
    assert again["said_by_prefill"] == again["num_cached_by_prefill"]
    # The second engine names blocks alike, without the image.
    assert again["num_cached_by_decode"] == cases.BLOCK_SIZE
    assert results["other-image"]["num_cached_by_decode"] == 0


def test_a_request_without_its_images_ends_when_its_handoff_is_lost(made, results):
    assert made["lost"]["finish"] == "prefix gone"
    assert made["lost"]["token_ids"] == results["image"]["token_ids"][:1]
    assert made["lost_with_chat"]["token_ids"] == results["image"]["token_ids"]


@pytest.mark.proves("recovery", "compared", kind="images")
def test_a_chat_that_loses_its_decode_worker_continues_with_the_same_tokens(made, results):
    """The known tokens are handed over with the prompt."""
    recovered = made["recovered"]
    assert recovered["token_ids"] == results["two-images"]["token_ids"]
    assert recovered["num_loaded"] == len(results["two-images"]["prompt"]) + NUM_KNOWN - 1


def test_a_preempted_request_without_its_images_ends(made):
    """The cache of the second engine does not hold the whole crowd."""
    ends = [finish for finish, _ in made["crowd"]]
    assert set(ends) <= {"length", made["aborted"]}
    assert made["aborted"] in ends
    assert "length" in ends
    assert not any(any(held.values()) for held in made["left"])


def test_refusals_name_the_part(made):
    served, refused = made["told_by_check"]
    assert served == "served"
    assert "not compared with plain vLLM for Idefics3ForConditionalGeneration" in refused
    pixels, broken = made["refused"]
    assert pixels.startswith("chat.messages[0].parts[1].image is '80 x 60 pixels'")
    assert broken.startswith("chat.messages[0].parts[1].image is '200 bytes'; cannot be read")
