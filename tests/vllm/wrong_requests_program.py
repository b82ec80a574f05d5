"""Submits requests that vLLM refuses."""

from __future__ import annotations

import asyncio
import tempfile
from unittest import mock

from baton.engine import vllm_engine
from baton.engine.base import EngineRequest, RequestRejected
from baton.runtime import demo_model
from baton.v1 import common_pb2

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
# A client can send all of these, and the coordinator does not detect that they are wrong.
WRONG = {
    "regex": common_pb2.StructuredOutput(regex="("),
    "grammar": common_pb2.StructuredOutput(grammar="nope ::"),
    "json_schema": common_pb2.StructuredOutput(json_schema='{"type": "nonsense"}'),
}


async def said() -> dict[str, str]:
    messages = {}
    with (
        tempfile.TemporaryDirectory() as own,
        # There are no engine processes.
        mock.patch.object(
            vllm_engine.EngineCoreClient, "make_async_mp_client", return_value=mock.AsyncMock()
        ),
    ):
        model = demo_model.ensure("demo")
        engine = vllm_engine.VllmEngine(model, "m", ARGUMENTS, f"{own}/kv.sock")
        await engine.start()
        for name, constraint in WRONG.items():
            sampling = common_pb2.SamplingParams(max_tokens=4, structured_output=constraint)
            try:
                await engine.submit(EngineRequest(name, (5, 6, 7), sampling))
            except RequestRejected as error:
                messages[name] = str(error)
    return messages


def main() -> dict[str, str]:
    """Returns the engine's error for each request."""
    return asyncio.run(said())
