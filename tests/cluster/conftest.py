from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.client import BatonClient
from tests.cluster.cluster_fixtures import cluster, model, shared_cluster
from tests.cluster.processes import Cluster, UpCluster

__all__ = ["cluster", "model", "shared_cluster"]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.address) as client:
        yield client


@pytest.fixture
def new_cluster(tmp_path: Path, model: str) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters whose processes a test may kill.

    A worker whose name begins with "p" is a prefill worker; the others are decode workers.
    """
    with ExitStack() as stack:

        def make(*workers: str, **sections: dict[str, object]) -> Cluster:
            cluster = stack.enter_context(Cluster(tmp_path, model, **sections))
            for name in workers:
                cluster.start_worker("prefill" if name.startswith("p") else "decode", name)
            return cluster

        yield make


@pytest.fixture
def up(tmp_path: Path, model: str) -> Iterator[Callable[..., UpCluster]]:
    """Starts `baton up`, and stops it and its workers after the test."""
    with ExitStack() as stack:

        def make(**sections: dict[str, object]) -> UpCluster:
            return stack.enter_context(UpCluster(tmp_path, model, **sections))

        yield make
