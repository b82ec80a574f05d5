"""Fixtures of a cluster that many tests share; import them in the conftest.py of a test folder."""

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.runtime import demo_model
from tests.cluster.processes import ADAPTERS, Cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models")
    return demo_model.ensure("demo", weights=False, root=root)


# The scope is the module: in a session scope the processes would use CPU until all tests end.
@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    adapters = {name: f"adapters/{name}" for name in ADAPTERS}
    sections = {"elastic": False, "lora_adapters": adapters}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, **sections) as cluster:
        cluster.start_worker("prefill", "p1")
        cluster.start_worker("decode", "d1")
        yield cluster


@pytest.fixture
async def cluster(shared_cluster: Cluster) -> AsyncIterator[Cluster]:
    """Provides one prefill and one decode worker; fails when a test leaves anything in use."""
    await shared_cluster.serving()
    yield shared_cluster
    await shared_cluster.nothing_left()
