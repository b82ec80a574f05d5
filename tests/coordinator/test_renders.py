"""Chats with images that workers render for the coordinator."""

import asyncio
from types import SimpleNamespace

from baton.coordinator.server.renders import Renders
from baton.v1 import cluster_pb2, common_pb2, inference_pb2


async def test_a_worker_knows_how_long_the_coordinator_waits_for_a_chat():
    sent: asyncio.Queue[cluster_pb2.RenderCommand] = asyncio.Queue()
    renders = Renders(lambda worker, command: sent.put_nowait(command))
    worker = SimpleNamespace(key=("p1", 1), role=common_pb2.ROLE_PREFILL, serving=True)
    rendering = asyncio.create_task(renders.render(inference_pb2.ChatPrompt(), [worker], 1))
    command = await sent.get()
    assert command.timeout.ToNanoseconds() > 0
    answer = cluster_pb2.Rendered(render_id=command.render_id, prompt_token_ids=[5, 6])
    renders.on_report(worker.key, answer)
    assert list((await rendering).prompt_token_ids) == [5, 6]
