"""Render commands of a worker that falls behind."""

import asyncio

import pytest
from google.rpc import code_pb2

from baton.client.request import build
from baton.v1 import cluster_pb2
from baton.worker import renders
from tests.worker.scripted_coordinator import WAIT_S

pytestmark = pytest.mark.usefixtures("forked_services")

# The simulated engine reads no pixels.
PNG = b"\x89PNG\r\n\x1a\n"


def render(render_id: int, timeout_us: int) -> cluster_pb2.RenderCommand:
    content = [{"type": "image", "image": PNG}, {"type": "text", "text": f"{render_id}?"}]
    chat = build([{"role": "user", "content": content}], {}).chat
    command = cluster_pb2.RenderCommand(render_id=render_id, chat=chat, max_pixels=10**9)
    command.timeout.FromMicroseconds(timeout_us)
    return command


async def test_an_answer_that_fits_no_message_is_a_refusal(coordinator, start_worker, monkeypatch):
    monkeypatch.setattr(renders, "_MAX_BYTES", 20)
    start_worker(simulated={"image_tokens": 40})
    stream = await coordinator.stream()
    await coordinator.command(stream, render=render(1, round(2 * WAIT_S * 1e6)))
    answer = (await stream.next_of("rendered")).rendered
    assert answer.failed.code == code_pb2.INVALID_ARGUMENT
    assert not answer.prompt_token_ids


async def test_a_chat_that_waited_too_long_is_not_rendered(coordinator, start_worker):
    """The coordinator asks another worker for it at once."""
    worker = start_worker(simulated={"image_tokens": 40})
    stream = await coordinator.stream()
    engine = worker.engine
    asked, may_render, own_render = [], asyncio.Event(), engine.render

    async def held_render(chat, max_pixels):
        asked.append(chat.messages[0].parts[1].text)
        await may_render.wait()
        return await own_render(chat, max_pixels)

    engine.render = held_render
    long_us = round(2 * WAIT_S * 1e6)
    for command in (render(1, long_us), render(2, 2), render(3, long_us)):
        await coordinator.command(stream, render=command)
    # The second one is answered while the first one still renders.
    expired = (await stream.next_of("rendered")).rendered
    assert (expired.render_id, expired.expired) == (2, True)
    may_render.set()
    answers = [(await stream.next_of("rendered")).rendered for _ in range(2)]
    assert [answer.render_id for answer in answers] == [1, 3]
    assert not any(answer.HasField("failed") or answer.expired for answer in answers)
    assert asked == ["1?", "3?"]
