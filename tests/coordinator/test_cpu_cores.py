import pytest

from baton.coordinator.launchers import cpu_cores
from baton.coordinator.launchers.cpu_cores import share
from baton.runtime.config import parse
from baton.runtime.process import affinity


def test_transfer_services_keep_off_the_cores_that_prefill():
    shares = share([0, 1], [1], [1])
    assert shares.engines == (((0,),), ((1,),))
    assert shares.transfer == (1,)


@pytest.mark.parametrize(
    "ranks", [([1], [1]), ([1, 1], [1, 1, 1]), ([], [1]), ([1], []), ([2], [2]), ([4, 2], [1])]
)
def test_every_core_is_used_once_when_there_are_enough(ranks):
    cores = list(range(8))
    shares = share(cores, *ranks)
    assert sorted(core for engine in shares.engines for rank in engine for core in rank) == cores
    assert [len(engine) for engine in shares.engines] == ranks[0] + ranks[1]


def test_each_rank_is_bound_to_its_own_cores():
    shares = share(list(range(4)), [2], [2])
    assert [shares.environment(index, 2)[affinity.VLLM_BIND_THREADS] for index in (0, 1)] == [
        "0|1",
        "2|3",
    ]
    assert shares.transfer == (2, 3)


def test_more_workers_than_cores_share_them():
    shares = share([4], [1, 1], [1, 1])
    assert shares.engines == (((4,),),) * 4
    assert shares.transfer == ()
    assert shares.environment(9, 1) == {}


def test_the_ranks_of_one_engine_share_cores_last():
    shares = share([0, 1], [2], [2])
    assert (
        shares.environment(0, 2) == shares.environment(1, 2) == {affinity.VLLM_BIND_THREADS: "0|1"}
    )


def test_the_number_of_ranks_may_stand_in_the_pools_own_arguments(monkeypatch):
    monkeypatch.delenv(affinity.VLLM_BIND_THREADS, raising=False)
    monkeypatch.setattr(cpu_cores, "_NVIDIA_DRIVER", cpu_cores.Path("/nowhere"))
    pools = {
        "prefill": {"engine_args": {"tensor_parallel_size": 2}},
        "decode": {"engine_args": {"tensor_parallel_size": 2}},
    }
    made = cpu_cores.on_this_host(parse(pools, "test"))
    assert [len(engine) for engine in made.engines] == [2, 2]


def test_a_worker_with_other_ranks_has_the_cores_of_its_place(monkeypatch):
    monkeypatch.delenv(affinity.VLLM_BIND_THREADS, raising=False)
    monkeypatch.setattr(cpu_cores, "_NVIDIA_DRIVER", cpu_cores.Path("/nowhere"))
    monkeypatch.setattr(cpu_cores.os, "sched_getaffinity", lambda pid: set(range(8)))
    places = cpu_cores.CorePlaces(parse({}, "test"))
    bound = [places.take(f"w{number}", 2) for number in range(2)]
    assert bound == [
        {affinity.VLLM_BIND_THREADS: "0,4|2,6"},
        {affinity.VLLM_BIND_THREADS: "1,5|3,7"},
    ]
    places.give_back("w0")
    assert places.take("w2", 1) == {affinity.VLLM_BIND_THREADS: "0,2,4,6"}
    # With invalid numbers of ranks nothing is bound; vLLM reports the error.
    places.give_back("w1")
    assert places.take("w3", 0) == {}


def test_a_replacement_gets_the_cores_of_the_ending_worker(monkeypatch):
    monkeypatch.delenv(affinity.VLLM_BIND_THREADS, raising=False)
    monkeypatch.setattr(cpu_cores, "_NVIDIA_DRIVER", cpu_cores.Path("/nowhere"))
    monkeypatch.setattr(cpu_cores.os, "sched_getaffinity", lambda pid: {0, 1})
    places = cpu_cores.CorePlaces(parse({"engine": "vllm"}, "test"))
    assert [places.take(name, 1)[affinity.VLLM_BIND_THREADS] for name in "ab"] == ["0", "1"]
    places.ends("b")
    assert places.take("c", 1) == {affinity.VLLM_BIND_THREADS: "1"}
    # The host has no cores for a third worker.
    assert places.take("d", 1) == {}
    places.give_back("b")
    assert places.take("e", 1) == {}
    places.ends("a")
    places.give_back("c")
    # A free share comes before the share of a worker that is ending.
    assert places.take("f", 1) == {affinity.VLLM_BIND_THREADS: "1"}
    assert places.take("g", 1) == {affinity.VLLM_BIND_THREADS: "0"}
