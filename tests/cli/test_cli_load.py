"""`baton bench`, `replay` and `simulate` wait for a cell to serve, and write files."""

import asyncio
import json
import signal
import sys

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.network import rpc
from baton.v1 import common_pb2, inference_pb2_grpc

# Timeout in seconds that only bounds a test that hangs.
TIMEOUT_S = 120


class Starting(inference_pb2_grpc.InferenceServicer, health_pb2_grpc.HealthServicer):
    """A coordinator without workers."""

    def __init__(self) -> None:
        self.awaited = asyncio.Event()

    async def GetModel(self, request, context):
        return common_pb2.ModelDescription(name="m", max_model_len=4096, vocab_size=1000)

    async def Watch(self, request, context):
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        self.awaited.set()
        await asyncio.Event().wait()


@pytest.fixture
async def starting():
    """The coordinator's service, and its address."""
    service, server = Starting(), rpc.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize("command", ["bench", "replay"])
async def test_ctrl_c_ends_the_wait_for_a_cell_that_does_not_serve(starting, command, tmp_path):
    service, address = starting
    trace = tmp_path / "trace.json"
    trace.write_text('[{"start_time": 0, "prompt_len": 9, "output_len": 2}]')
    arguments = ["bench", "--rate", "1"] if command == "bench" else ["replay", str(trace)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", *arguments, "--address", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await service.awaited.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_warm_up_as_long_as_the_run_is_refused_before_it(baton, unused_address):
    load = ("bench", "--rate", "1", "--duration", "20", "--warm-up", "20")
    result = baton(*load, "--address", unused_address)
    assert result.code == 2
    assert "--warm-up: is 20; must be less than --duration (20)" in result.err


def test_a_figure_that_no_request_has_is_a_dash(baton_here, tmp_path):
    """As in the tables of bench: answers of one token have no gap."""
    (trace := tmp_path / "trace.json").write_text(
        '[{"start_time": 0, "prompt_len": 9, "output_len": 1}]'
    )
    done = baton_here("simulate", str(trace))
    assert done.code == 0
    rows = {line.split(",")[0]: line.split() for line in done.out.splitlines()}
    assert rows["ITL"][2:] == ["-"] * 4
    assert "nan" not in done.out


def test_files_are_utf_8_whatever_the_locale(baton, tmp_path):
    trace, picture = tmp_path / "caf\u00e9.json", tmp_path / "picture.svg"
    trace.write_text(
        json.dumps([{"start_time": n, "prompt_len": 9, "output_len": 2} for n in (0, 1)])
    )
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = baton("simulate", str(trace), "--picture", str(picture), env=old)
    assert done.code == 0, done.err
    assert "caf\u00e9.json, baton" in picture.read_text(encoding="utf-8")
