import pytest

from baton.coordinator.cpu_cores import share


def test_transfer_services_keep_off_the_cores_that_prefill():
    shares = share([0, 1], 1, 1)
    assert shares.engines == ((0,), (1,))
    assert shares.transfer == (1,)


@pytest.mark.parametrize("workers", [(1, 1), (2, 3), (0, 1), (1, 0)])
def test_every_core_is_used_once_when_there_are_enough(workers):
    cores = list(range(8))
    shares = share(cores, *workers)
    assert sorted(core for engine in shares.engines for core in engine) == cores
    assert len(shares.engines) == sum(workers)


def test_more_workers_than_cores_share_them():
    shares = share([4], 2, 2)
    assert shares.engines == ((4,),) * 4
    assert shares.transfer == ()
    assert shares.environment(9) == {}
