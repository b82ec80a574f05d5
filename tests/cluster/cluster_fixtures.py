"""A cluster that many tests share; conftest.py of a folder whose tests use it imports these."""

from collections.abc import AsyncIterator, Iterator

import pytest
from processes import ADAPTERS, Cluster

from baton.runtime import demo_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models")
    return demo_model.ensure("demo", weights=False, root=root)


# Not of the session: its processes would take their share of the cores until that ends.
@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    adapters = {name: f"adapters/{name}" for name in ADAPTERS}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, lora_adapters=adapters) as cluster:
        cluster.start_worker("prefill", "p1")
        cluster.start_worker("decode", "d1")
        yield cluster


@pytest.fixture
async def cluster(shared_cluster: Cluster) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker, which every test leaves as it found them."""
    await shared_cluster.serving()
    yield shared_cluster
    await shared_cluster.nothing_left()
