"""Cells that the benchmark of elastic cells draws."""

from dataclasses import replace

from baton.bench.random_cells import FAMILIES, HARDWARE, Cell, Result, measure, random_cell, summary


def test_a_seed_always_draws_the_same_cell_and_requests():
    first, second = random_cell(5, 100), random_cell(5, 100)
    assert first == second
    assert first.requests() == second.requests()
    assert random_cell(6, 100) != first


def test_seeds_draw_all_hardware_and_traffic():
    cells = [random_cell(seed, 10) for seed in range(200)]
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
    cell = random_cell(7, 10)
    shares = [(90.0, 95.0), (95.0, 94.5), (97.0, 90.0)]
    results = [
        Result(cell, {"colocated": other, "elastic": elastic}, {}) for other, elastic in shares
    ]
    first, *worse = summary(results)
    assert first.startswith("2 of 3 elastic cells")
    assert len(worse) == 1
    assert "-7.0" in worse[0]
