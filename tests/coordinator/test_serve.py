"""The whole coordinator process: starts, watches and stops workers, and leaves no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1._async import HealthServicer

from baton.coordinator.launchers import launcher
from baton.coordinator.server.server import Coordinator, WorkersFailed, serve
from baton.runtime import errors
from baton.runtime.config import BatonConfig, dump, parse
from baton.runtime.config_error import ConfigError
from baton.runtime.network import rpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.scripted_worker import WAIT_S
from tests.program_command import command_of

WORKER = command_of("tests.coordinator.worker_program")


@pytest.fixture
def config(model_dir):
    def build(coordinator=None, elastic=None, **engine_args) -> BatonConfig:
        listen = {"listen": "127.0.0.1:0", "heartbeat_s": 0.2, "drain_timeout_s": 2.0}
        return parse(
            {
                "model": str(model_dir),
                "engine_args": engine_args,
                "elastic": elastic,
                "coordinator": {**listen, **(coordinator or {})},
                "worker": {"drain_timeout_s": 5.0, "start_timeout_s": 60.0},
            },
            "test",
        )

    return build


def descendants() -> set[int]:
    """Process IDs of live descendants of this process."""
    found = psutil.Process().children(recursive=True)
    return {one.pid for one in found if one.status() != psutil.STATUS_ZOMBIE}


@contextlib.asynccontextmanager
async def up(config: BatonConfig, before: set[int]):
    """Runs a coordinator with workers; asserts that no process is left after the stop."""
    ready: asyncio.Queue[str] = asyncio.Queue()
    stop = asyncio.Event()
    running = asyncio.create_task(
        serve(config, launch=True, ready=ready.put_nowait, stop=stop, command=WORKER)
    )
    try:
        getting = asyncio.create_task(ready.get())
        await asyncio.wait({running, getting}, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
        getting.cancel()
        if not getting.done():
            running.result()
        yield getting.result(), stop, running
    finally:
        stop.set()
        assert await running == 0
        assert descendants() <= before


def generate(**sampling) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="fox", sampling=common_pb2.SamplingParams(**{"max_tokens": 3, **sampling})
    )


async def test_up_serves_then_drains_and_leaves_nothing(config):
    before = descendants()
    async with up(config(), before) as (address, _stop, _running):
        async with rpc.channel(address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            events = [one async for one in inference.Generate(generate(), timeout=WAIT_S)]
            assert events[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert len(descendants() - before) == 2


async def test_stubborn_worker_is_killed(config, monkeypatch):
    monkeypatch.setattr(launcher, "STOP_MARGIN_S", 0.1)
    before = descendants()
    stubborn = config(stubborn=True)
    impatient = stubborn.worker.model_copy(update={"drain_timeout_s": 0.1})
    async with up(stubborn.model_copy(update={"worker": impatient}), before):
        workers = [psutil.Process(pid) for pid in descendants() - before]
        assert len(workers) == 2
        directories = [Path(one.cmdline()[-1]) for one in workers]
        assert all(map(Path.is_dir, directories))
    assert not any(map(Path.exists, directories))


async def test_a_killed_worker_is_known_at_once(config):
    before = descendants()
    async with (
        # The long timeout ensures that the process exit is noticed, not the broken stream. With
        # strict roles the first token cannot come from the stopped worker.
        up(config({"worker_timeout_s": 600.0}, elastic=False), before) as (address, _stop, _),
        rpc.channel(address) as channel,
    ):
        (decode,) = (
            pid for pid in descendants() - before if "decode" in psutil.Process(pid).cmdline()
        )
        os.kill(decode, signal.SIGSTOP)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(), timeout=90.0)
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).HasField("delta")
        os.kill(decode, signal.SIGKILL)
        # A replacement worker continues the request.
        while (event := await call.read()) is not grpc.aio.EOF:
            last = event
        assert last.finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_worker_that_dies_while_loading(config):
    before = descendants()
    with pytest.raises(WorkersFailed) as caught:
        await serve(
            config(die="decode"), launch=True, ready=print, stop=asyncio.Event(), command=WORKER
        )
    assert str(caught.value) == "worker decode-0 exited with code 3: no such weights"
    assert descendants() <= before


async def test_the_reason_is_found_amid_what_its_processes_write(config):
    with pytest.raises(WorkersFailed) as caught:
        await serve(
            config(noisily="decode"), launch=True, ready=print, stop=asyncio.Event(), command=WORKER
        )
    assert str(caught.value) == (
        "worker decode-0 exited with code 1: engine: see above; "
        "first error: RuntimeError: no weights in x"
    )


async def test_everyday_work_is_no_reason(config):
    with pytest.raises(WorkersFailed) as caught:
        await serve(
            config(busily="decode"), launch=True, ready=print, stop=asyncio.Event(), command=WORKER
        )
    assert str(caught.value) == "worker decode-0 exited with code 1"


async def test_workers_that_take_too_long_are_named(config):
    before = descendants()
    late = config(late="decode")
    impatient = late.worker.model_copy(update={"start_timeout_s": 3.0})
    # On a busy machine the other worker may be late as well.
    with pytest.raises(
        WorkersFailed, match=r"not serving after .* \(3 s\): (prefill-0, )?decode-0$"
    ):
        await serve(
            late.model_copy(update={"worker": impatient}),
            launch=True,
            ready=print,
            stop=asyncio.Event(),
            command=WORKER,
        )
    assert descendants() <= before


async def test_whatever_a_worker_leaves_behind_is_killed(config):
    before = descendants()
    async with up(config(child=True), before):
        assert len(descendants() - before) == 4


async def test_port_in_use_and_missing_model(config, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for key in ("listen", "metrics_listen"):
            with pytest.raises(ConfigError, match=f"cannot listen on {listen}"):
                await serve(config({key: listen}), launch=False, ready=print, stop=asyncio.Event())
    missing = config().model_copy(update={"model": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="no such directory"):
        await serve(missing, launch=False, ready=print, stop=asyncio.Event())


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"decode": {"workers": 3}, "scaling": {"max_gpus": 3}},
            "scaling.max_gpus: is 3; must be at least 4, the GPUs of prefill.workers and ",
        ),
        (
            {
                "prefill": {"workers": 3},
                "scaling": {"autoscale": True, "prefill": {"max_workers": 2}},
            },
            "prefill.workers: is 3; must be at most 2, scaling.prefill.max_workers, because",
        ),
    ],
)
async def test_pools_that_would_begin_larger_than_they_may_be_are_refused(config, sizes, said):
    refused = parse({**yaml.safe_load(dump(config())), **sizes}, "test")
    with pytest.raises(ConfigError, match=said):
        async with Coordinator(refused, launched=True):
            pass
    # Limits do not apply to workers that another process starts.
    async with Coordinator(refused):
        pass


async def test_a_start_that_is_given_up_leaves_the_port_free(config, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"

    async def give_up(*arguments):
        raise asyncio.CancelledError

    given_up = Coordinator(config({"listen": listen}))
    with monkeypatch.context() as patch:
        # The start fails after the server has begun to listen.
        patch.setattr(HealthServicer, "set", give_up)
        with pytest.raises(asyncio.CancelledError):
            await given_up.__aenter__()
    async with Coordinator(config({"listen": listen})) as another:
        assert another.address == given_up.address


async def test_an_end_that_is_cut_short_leaves_the_port_free(config):
    interruptible = Coordinator(config())
    await interruptible.__aenter__()
    ending = asyncio.create_task(interruptible.__aexit__(None, None, None))
    await asyncio.sleep(0)
    ending.cancel()
    async with asyncio.timeout(60.0):
        await asyncio.wait([ending])
    async with Coordinator(config({"listen": interruptible.address})) as another:
        assert another.address == interruptible.address


async def test_streams_are_told_that_another_coordinator_follows(config, caplog):
    caplog.set_level("INFO", logger="baton.coordinator.server.server")
    stop, ready = asyncio.Event(), asyncio.Queue()
    running = asyncio.create_task(
        serve(config({"drain_timeout_s": 0.2}), launch=False, ready=ready.put_nowait, stop=stop)
    )
    address = await ready.get()
    async with rpc.channel(address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        stop.set()
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details().endswith("restarting: resume with the tokens received")
        assert errors.from_rpc_error(caught.value).reason == errors.RESTARTING
    assert await running == 0
    waits = "draining: waiting at most 0.2 s for 1 request;"
    assert sum(line.startswith(waits) for line in caplog.messages) == 1


async def test_workers_end_with_a_killed_coordinator(config, model_dir, tmp_path):
    """After SIGKILL of the coordinator, the kernel ends its workers."""
    program = (
        "import asyncio, sys\n"
        "from baton.coordinator.server.server import serve\n"
        "from baton.runtime.config import load\n"
        "ready = lambda address: print(address, flush=True)\n"
        "command = sys.argv[2:]\n"
        "asyncio.run(serve(load(sys.argv[1]), launch=True, ready=ready, command=command))\n"
    )
    path = tmp_path / "baton.yaml"
    path.write_text(dump(config()))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(path), *WORKER, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60.0):
            await process.stdout.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        directories = [Path(worker.cmdline()[-1]) for worker in workers]
        async with asyncio.timeout(60.0):
            # A worker that ends before would leave its directory to the next start.
            while not all((path / "something").exists() for path in directories):
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        await process.wait()
    _gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, 10.0)
    assert not alive
    assert not any(map(Path.exists, directories))
