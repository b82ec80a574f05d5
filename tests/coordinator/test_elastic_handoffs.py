"""Requests of elastic cells that cannot be handed over, or whose handoff leaves out blocks."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# A prompt token takes 1 ms, a decode step 20 ms and 1 ms per request.
MODEL = LatencyModel(0.001, 1e-3, 0.0, 0.020, 0.001, 0.0)
# Handoffs of at most 256 tokens.
FEW_BYTES = 2**16


def cell(new_world, say_hello, **changes):
    """An elastic cell of the workers "a" and "b", which hand over only short prompts."""
    world = new_world(elastic=True, latency=MODEL, max_decode_requests=8, **changes)
    capacity = cluster_pb2.Capacity()
    capacity.CopyFrom(say_hello("a", PREFILL).capacity)
    capacity.max_send_bytes = capacity.max_receive_bytes = FEW_BYTES
    world.attach("a", PREFILL, capacity=capacity)
    world.attach("b", DECODE, capacity=capacity)
    return world


def stored(tokens) -> cluster_pb2.CacheEvents:
    """The report of a worker that it holds the whole blocks of these tokens."""
    return cluster_pb2.CacheEvents(stored=block_hashes(list(tokens), 16, root_of("", "")))


def submit(world, first: int, num_prompt: int):
    """Submits a prompt that begins with the token `first`; returns the request."""
    to = world.submit(prompt_token_ids=[first] + [1] * (num_prompt - 1))
    return world.core.request(f"r{to.stream}")


def stream(world, out, first: int):
    """Submits a short prompt and brings its output to its decode worker; returns the worker."""
    request = submit(world, first, 100)
    if request.prefill is not None:
        world.step(request.prefill[0], out(request.id, [1], 0, finish=0))
    world.step(request.decode[0], out(request.id, [2], len(request.token_ids)))
    return request.decode


def test_a_prompt_too_long_for_a_handoff_is_not_computed_beside_the_streams(
    new_world, say_hello, out
):
    world = cell(new_world, say_hello)
    decoders = {stream(world, out, first) for first in range(3)}
    assert len(decoders) == 1
    long = submit(world, 9, 900)
    assert long.prefill is None
    assert long.decode not in decoders
    predicted = long.placement_prediction
    assert predicted.prompt_worker == predicted.decode_worker == long.decode[0]
    assert predicted.queue_s == 0.0
    # Without other streams, the worker computes the prompt at full speed.
    assert predicted.computation_s == MODEL.prefill_s(900)


def test_a_prompt_too_long_for_a_handoff_goes_to_no_worker_at_its_limit_of_prompts(
    new_world, say_hello, out
):
    world = cell(new_world, say_hello, max_prefill_requests=1)
    for first in range(3):
        stream(world, out, first)
    longs = [submit(world, first, 900) for first in range(10, 13)]
    workers = [one.decode for one in longs if one.attempt]
    assert workers
    assert len(set(workers)) == len(workers)


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_handoff_leaves_out_only_blocks_that_the_decode_worker_has_reported(
    new_world, is_reported
):
    """A worker may compute an expected prefix later than the handoff arrives, or never."""
    world = new_world(elastic=True, latency=MODEL).pair()
    prefix = list(range(256))
    world.submit(prompt_token_ids=prefix + [300] * 400)
    first = world.core.request("r1")
    if is_reported:
        world.handle(ev.WorkerCache(first.decode, stored(prefix)))
    world.submit(prompt_token_ids=prefix + [301] * 600)
    second = world.core.request("r2")
    assert second.prefill not in (None, second.decode)
    assert second.decode == first.decode
    assert second.skip_tokens == (len(prefix) if is_reported else 0)
