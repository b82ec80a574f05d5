"""Cells that the benchmark of elastic cells draws."""

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
    assert found.attained == {"colocated": 100.0, "1P1D": 100.0, "elastic": 100.0}


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
