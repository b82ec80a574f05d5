import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.client import BatonClient
from baton.runtime import demo_model

sys.path.append(str(Path(__file__).parent))

from processes import ADAPTERS, Cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("models")
    return demo_model.ensure("demo", weights=False, root=root)


@pytest.fixture(scope="session")
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


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.address) as client:
        yield client


@pytest.fixture
def new_cluster(tmp_path: Path, model: str) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters whose processes a test may kill; workers by name, "p..." or "d..."."""
    with ExitStack() as stack:

        def make(*workers: str, **sections: dict[str, object]) -> Cluster:
            cluster = stack.enter_context(Cluster(tmp_path, model, **sections))
            for name in workers:
                cluster.start_worker("prefill" if name.startswith("p") else "decode", name)
            return cluster

        yield make
