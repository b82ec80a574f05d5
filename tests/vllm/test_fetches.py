"""An engine loads what another engine has cached, and computes whatever does not come."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import vllm_cases as cases
from tests.vllm.engine_cases import FETCHED as HELD
from tests.vllm.engine_cases import NUM_FETCH_TOKENS as NUM_TOKENS
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SKIP = 4 * cases.BLOCK_SIZE


@pytest.fixture(scope="module")
def made(engines: Program) -> dict[str, Any]:
    """Results of two engines of two ranks."""
    found: dict[str, Any] = engines.result()["fetches"]
    return found


def test_blocks_on_the_holder_s_device_are_fetched(made: dict[str, Any]) -> None:
    fetched = made["fetched"]
    assert fetched["tokens"] == made["answer"]
    assert (fetched["num_fetched"], fetched["num_cached"], fetched["num_host"]) == (HELD, 0, 0)
    # The holder computes one token, whichever tier has the others.
    assert fetched["sent"] == {"finish": "cut", "num_held": HELD, "num_host": 0}
    assert made["cached"]["num_cached"] == (NUM_TOKENS + 60) // cases.BLOCK_SIZE * cases.BLOCK_SIZE
    assert made["cached"]["tokens"] == made["answer"]


def test_blocks_that_the_reader_has_are_left_out(made: dict[str, Any]) -> None:
    skipped = made["skipped"]
    assert skipped["tokens"] == made["answer, skipped"]
    assert (skipped["num_fetched"], skipped["num_cached"]) == (HELD - SKIP, SKIP)


def test_blocks_in_the_reader_s_host_memory_are_left_out(made: dict[str, Any]) -> None:
    beside = made["beside host"]
    assert beside["tokens"] == made["answer, beside host"]
    assert beside["num_own"] == SKIP
    assert (beside["num_fetched"], beside["num_cached"]) == (HELD - SKIP, SKIP)


def test_left_out_blocks_stay_on_the_device_until_the_fetch_is_there(made: dict[str, Any]) -> None:
    late = made["late"]
    assert late["tokens"] == made["answer, late"]
    assert (late["num_fetched"], late["num_cached"]) == (HELD - SKIP, SKIP)


def test_blocks_in_the_holder_s_host_memory_are_fetched(made: dict[str, Any]) -> None:
    fetched = made["from host"]
    assert fetched["tokens"] == made["answer, from host"]
    assert fetched["num_fetched"] == HELD
    assert fetched["sent"] == {"finish": "cut", "num_held": HELD, "num_host": HELD}


@pytest.mark.parametrize("case", ["spoiled", "lost skip", "killed", "never seen"])
def test_what_does_not_come_is_computed(made: dict[str, Any], case: str) -> None:
    assert made[case]["num_fetched"] == 0
    assert made[case]["tokens"] == made[f"answer, {case}"]


def test_a_holder_without_blocks_computes_nothing(made: dict[str, Any]) -> None:
    nothing = {"finish": "prefix gone", "num_held": 0, "num_host": 0}
    assert made["never seen"]["sent"] == nothing


@pytest.mark.parametrize(
    ("case", "num_skipped"), [("half", 0), ("half from host", cases.BLOCK_SIZE)]
)
def test_a_holder_sends_the_beginning_that_it_has(
    made: dict[str, Any], case: str, num_skipped: int
) -> None:
    num_held = NUM_TOKENS // 2 // cases.BLOCK_SIZE * cases.BLOCK_SIZE
    sent = made[case]["sent"]
    assert (sent["finish"], sent["num_held"]) == ("cut", num_held)
    assert (sent["num_host"] > 0) == (case == "half from host")
    fetched = made[case]["num_fetched"], made[case]["num_cached"]
    assert fetched == (num_held - num_skipped, num_skipped)
    assert made[case]["tokens"] == made[f"answer, {case}"]


def test_a_request_waits_for_another_one_s_fetch(made: dict[str, Any]) -> None:
    waited, fetched, _ = made["twins"]
    assert [waited["tokens"], fetched["tokens"]] == [made["answer, twins"]] * 2
    assert (fetched["num_fetched"], waited["num_fetched"]) == (HELD, 0)
    assert waited["num_cached"] >= HELD


def test_a_fetched_prompt_is_handed_over(made: dict[str, Any]) -> None:
    handed_on = made["handed on"]
    assert handed_on["tokens"] == made["answer, handed on"]
    assert handed_on["num_fetched"] == HELD
    assert handed_on["num_loaded"] == NUM_TOKENS + 60
