import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from baton.engine.sim_tokens import Vocabulary
from baton.runtime import demo_model
from baton.runtime.config import parse
from baton.v1 import common_pb2
from tests.kvtransfer.forked_services import forked_services
from tests.runtime.otlp_collector import OtlpCollector
from tests.worker.scripted_coordinator import WAIT_S, RunningWorker, ScriptedCoordinator, end_worker

__all__ = ["forked_services"]

StartWorker = Callable[..., RunningWorker]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("models")
    return demo_model.ensure("demo", weights=False, root=root)


@pytest.fixture(scope="session")
def vocabulary(model: str) -> Vocabulary:
    return Vocabulary.load(model)


@pytest.fixture
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    coordinator = ScriptedCoordinator()
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


@pytest.fixture
async def collector() -> AsyncIterator[OtlpCollector]:
    async with OtlpCollector() as collector:
        yield collector


@pytest.fixture
async def start_worker(model: str, coordinator: ScriptedCoordinator) -> AsyncIterator[StartWorker]:
    async with contextlib.AsyncExitStack() as stack:

        def start(role: int = common_pb2.ROLE_DECODE, name: str = "w1", **over) -> RunningWorker:
            address = over.pop("address", coordinator.address)
            # Tests choose an output's length with max_tokens.
            lengths = {"max_model_len": 1024, "kv_tokens": 8192, "mean_output_tokens": 0}
            simulated = {"time_scale": 0} | lengths
            # Small staging memory, because a worker reserves 512 MB by default.
            transfer = {"send_bytes": 2**23, "receive_bytes": 2**23, "open_timeout_s": WAIT_S}
            config = parse(
                {
                    "model": model,
                    "served_model_name": "demo",
                    "engine": "simulated",
                    "log_level": "error",
                    "simulated": simulated | over.pop("simulated", {}),
                    "kv_transfer": transfer | over.pop("kv_transfer", {}),
                    # Long enough that a busy machine does not reach them.
                    "worker": {"attach_timeout_s": WAIT_S, "drain_timeout_s": WAIT_S}
                    | over.pop("worker", {}),
                    **over,
                },
                "test",
            )
            worker = RunningWorker(config, role, address, name)
            stack.push_async_callback(end_worker, worker)
            return worker

        yield start
