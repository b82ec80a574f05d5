"""The warm-up request fits into a cache of any size."""

from types import SimpleNamespace

import pytest

from baton.engine.base import EngineOutput, EngineStep, Finish
from baton.engine.warm_up import warm_up


class Engine:
    """An engine that takes one request, and never runs a request that does not fit."""

    def __init__(self, room):
        self.room, self.request = room, None

    async def submit(self, request):
        self.request = request

    async def next_step(self):
        request = self.request
        needed = len(request.prompt_token_ids) + request.sampling.max_tokens
        assert needed <= self.room, f"{needed} tokens wait for ever; {self.room} fit"
        return EngineStep([EngineOutput(request.engine_request_id, finish=Finish.LENGTH)])

    def take_load(self):
        return None


@pytest.mark.parametrize("kv_tokens", [16, 32, 48, 128, 1024, 2**20])
@pytest.mark.parametrize("kept_free", [0, 1, 7])
async def test_the_warm_up_fits_a_cache_that_keeps_room_free(kv_tokens, kept_free):
    model = SimpleNamespace(max_model_len=4096, vocab_size=100, adapters=())
    info = SimpleNamespace(model=model, kv_tokens=kv_tokens, max_num_batched_tokens=2048)
    engine = Engine(kv_tokens - kept_free)
    await warm_up(engine, info)
    assert len(engine.request.prompt_token_ids) >= min(512, (kv_tokens - 2) // 2)
