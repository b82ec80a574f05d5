import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.client import BatonClient

sys.path.append(str(Path(__file__).parent))

from cluster_fixtures import cluster, model, shared_cluster
from processes import Cluster, UpCluster

__all__ = ["cluster", "model", "shared_cluster"]


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


@pytest.fixture
def up(tmp_path: Path, model: str) -> Iterator[Callable[..., UpCluster]]:
    """Makes a running `baton up`; nothing of it is left afterwards."""
    with ExitStack() as stack:

        def make(**sections: dict[str, object]) -> UpCluster:
            return stack.enter_context(UpCluster(tmp_path, model, **sections))

        yield make
