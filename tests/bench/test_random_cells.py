"""Cells that the benchmark of elastic cells draws."""

from dataclasses import replace

import pytest

from baton.bench.random_cells import Result, measure, summary
from baton.bench.random_draws import DRAWS, FAMILIES, HARDWARE, SHARED, Cell, any_cell


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_seed_always_draws_the_same_cell_and_requests(draw):
    first, second = draw(5, 100), draw(5, 100)
    assert first == second
    assert first.requests() == second.requests()
    assert draw(6, 100) != first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_request_of_a_drawn_cell_can_be_served(draw):
    for seed in range(30):
        cell = draw(seed, 40)
        config, requests = cell.config(), cell.requests()
        longest = max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
        assert longest <= min(config.simulated.kv_tokens, config.simulated.max_model_len)
        assert requests == sorted(requests)
        assert len(requests) >= 40


def test_a_group_shares_its_prefix_with_no_other_group():
    cell = DRAWS["shared-prefixes"](1, 100)
    assert cell.family == SHARED
    groups = {}
    for one in cell.requests():
        groups.setdefault(one.block_ids, []).append(one)
    assert {len(group) for group in groups.values()} == {cell.prefix.num_requests}
    blocks = [block for group in groups for block in group]
    assert len(set(blocks)) == len(blocks) == len(groups) * cell.prefix.num_blocks


def test_seeds_draw_all_hardware_and_traffic():
    cells = [any_cell(seed, 10) for seed in range(200)]
    assert {one.hardware for one in cells} == set(HARDWARE)
    assert {one.family for one in cells} == set(FAMILIES)
    assert all(1 <= one.num_requests <= 40 for one in cells)


def test_an_idle_cell_meets_its_targets_with_each_system():
    cell = Cell(1, "8b", "chat", "poisson", 2, 10_000, 100, 0.01, 0.5, 20)
    found = measure(cell)
    names = ("colocated, 2048/step", "colocated, 8192/step", "1P1D", "elastic")
    assert found.attained == dict.fromkeys(names, 100.0)


def test_colocated_serving_has_the_step_size_of_its_hardware_too():
    """vLLM's default is larger than 2,048 tokens on GPUs with 70 GiB and more."""
    long_prompts = Cell(1, "8b", "summaries", "poisson", 2, 3000, 36, 0.85, 0.5, 40)
    for name, own in HARDWARE.items():
        plain = [one for one in replace(long_prompts, hardware=name).setups() if one.step_tokens]
        assert [one.step_tokens for one in plain] == [2048, own["max_num_batched_tokens"]]
    result = Result(long_prompts, {"colocated, 2048/step": 3.0, "colocated, 8192/step": 5.0}, {})
    assert result.colocated == 5.0


def test_the_summary_names_cells_in_which_the_elastic_one_attains_less():
    cell = any_cell(7, 10)
    shares = [(90.0, 95.0), (95.0, 94.5), (97.0, 90.0)]
    results = [
        Result(cell, {"colocated": other, "elastic": elastic}, {}) for other, elastic in shares
    ]
    first, *worse = summary(results)
    assert first.startswith("2 of 3 elastic cells")
    assert len(worse) == 1
    assert "-7.0" in worse[0]
