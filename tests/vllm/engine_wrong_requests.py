"""Requests that vLLM refuses."""

from __future__ import annotations

from baton.engine.base import EngineRequest, RequestRejected
from baton.v1 import common_pb2
from tests.vllm.engine_handoffs import Side

# A client can send all of these, and the coordinator does not detect that they are wrong.
WRONG = {
    "regex": common_pb2.StructuredOutput(regex="("),
    "grammar": common_pb2.StructuredOutput(grammar="nope ::"),
    "json_schema": common_pb2.StructuredOutput(json_schema='{"type": "nonsense"}'),
}


async def wrong_requests(one: Side) -> dict[str, str]:
    """Returns the engine's error for each request."""
    messages = {}
    for name, constraint in WRONG.items():
        sampling = common_pb2.SamplingParams(max_tokens=4, structured_output=constraint)
        try:
            await one.engine.submit(EngineRequest(name, (5, 6, 7), sampling))
        except RequestRejected as error:
            messages[name] = str(error)
    return messages
