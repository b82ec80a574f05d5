"""One reference run and one cluster on real vLLM, which all tests of the session share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from baton.client.client import BatonClient
from baton.runtime import demo_model
from tests.vllm import engine_cases
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_adapters import NAMES, make_adapter
from tests.vllm.vllm_cluster import (
    CONFIG,
    DECODE,
    RELAY_HOST,
    Cluster,
    start_cluster,
    stop_cluster,
)
from tests.vllm.vllm_programs import PlainVllm, Program
from tests.vllm.vllm_relay import Relay, as_it_is


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that use the cluster, before marks are selected: its ranks need the cores."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")


@pytest.fixture(scope="session")
def model() -> str:
    return demo_model.ensure("demo")


@pytest.fixture(scope="session")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of adapters by name.

    None on CUDA: vLLM's LoRA kernels there take no float32, in which these tests compare tokens.
    """
    if torch.cuda.is_available():
        return {}
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, model, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="session")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainVllm]:
    """A plain vLLM that answers every case while the cluster starts."""
    given = {
        "cases": cases.length_cases()
        + cases.concurrent_cases()
        + cases.prefix_cases()
        + cases.sampling_cases()
        + cases.chunked_seed_cases()
        + cases.flip_cases()
        + cases.fault_cases()
        + cases.killed_cases(),
        "stop_candidates": cases.stop_candidates(),
    }
    with PlainVllm(model, given, tmp_path_factory.mktemp("plain")) as program:
        yield program


@pytest.fixture(scope="session")
def reference(plain: PlainVllm) -> list[cases.Case]:
    """Every case with the answer of one plain vLLM, one request at a time."""
    return plain.result()


@pytest.fixture(scope="session")
def expected(reference: list[cases.Case]) -> dict[str, cases.Case]:
    """The reference by case name."""
    return {case["name"]: case for case in reference}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(
    model: str,
    adapters: dict[str, str],
    plain: PlainVllm,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Cluster]:
    config = {"model": model, **CONFIG, "lora_adapters": adapters}
    started = start_cluster(config, tmp_path_factory.mktemp("cluster"))
    try:
        decode = (await started.workers())[DECODE]
        port = decode.kv_address.removeprefix(f"{RELAY_HOST}:")
        started.relay = Relay(decode.kv_address, f"127.0.0.1:{port}")
        yield started
    finally:
        stop_cluster(started)
        if started.relay is not None:
            started.relay.close()


@pytest.fixture
def relay(cluster: Cluster) -> Iterator[Relay]:
    assert cluster.relay is not None
    cluster.relay.num_spoiled = 0
    cluster.relay.only_grpc = True
    yield cluster.relay
    cluster.relay.only_grpc = False
    cluster.relay.spoil = as_it_is


@pytest_asyncio.fixture(loop_scope="session")
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with cluster.client() as made:
        yield made


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Two engines of two ranks each, without a cluster."""
    given = {"one_by_one": engine_cases.one_by_one(), "together": engine_cases.together()}
    model, directory = demo_model.ensure(engine_cases.MODEL), tmp_path_factory.mktemp("engines")
    with Program(
        "engines_program", model, engine_cases.RANKS, given, directory=directory
    ) as program:
        yield program
