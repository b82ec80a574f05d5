"""Assignment of a host's GPUs to workers."""

import pytest

from baton.coordinator.launchers.gpu_places import VISIBLE, GpuPlaces, gpus_here


def test_each_worker_has_gpus_of_its_own_while_there_are_enough():
    places = GpuPlaces([str(index) for index in range(8)])
    taken = [places.take(f"w{number}", 2)[VISIBLE] for number in range(4)]
    assert taken == ["0,1", "2,3", "4,5", "6,7"]
    places.give_back("w1")
    assert places.take("w4", 2) == {VISIBLE: "2,3"}


def test_with_too_few_the_least_used_are_shared():
    places = GpuPlaces(["0", "1"])
    assert [places.take(name, 1)[VISIBLE] for name in "abcd"] == ["0", "1", "0", "1"]
    places.give_back("b")
    places.give_back("unknown")
    assert places.take("e", 1) == {VISIBLE: "1"}


@pytest.mark.parametrize(("gpus", "number"), [([], 1), (["0"], 2), (["0"], 0)])
def test_an_impossible_number_of_gpus_is_left_to_the_engine(gpus, number):
    assert GpuPlaces(gpus).take("a", number) == {}


def test_gpus_that_a_process_may_use_are_found(tmp_path):
    """A container with the third and the eleventh GPU of a host calls them 0 and 1."""
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == ["0", "1"]
    assert gpus_here({VISIBLE: "GPU-a, 3"}, tmp_path) == ["GPU-a", "3"]
    assert gpus_here({VISIBLE: ""}, tmp_path) == []
