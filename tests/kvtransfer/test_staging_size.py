"""Sizes of staging, and the speed of transports, with real transfer services."""

import pytest

from baton.kvtransfer import staging_size, transport_speed
from baton.kvtransfer.errors import TransferError, TransferRefused
from baton.kvtransfer.layout import KvLayout

MIB = 2**20
# Llama 3 8B in bfloat16 has 128 KiB per token.
LLAMA_8B = KvLayout("m", "r", "bfloat16", 32, 8, 128, 16, 8 * 16 * 256 * 2, "heads,tokens,content")


async def test_staging_holds_the_longest_prompt_that_it_is_said_to_hold(start, handoff, layout):
    size = 3 * layout.handoff_bytes(1) + 1
    sender = await start(send_bytes=size)
    num_tokens = staging_size.num_tokens(layout, size)
    assert num_tokens == 3 * layout.block_size_tokens
    with pytest.raises(TransferRefused, match="sender's staging has"):
        await handoff(layout.num_blocks(num_tokens + 1)).open(sender, sender.client.address)
    longest = handoff(layout.num_blocks(num_tokens))
    await longest.open(sender, sender.client.address)
    sender.client.abort_send(longest.handoff_id)


def test_a_shortage_names_what_to_set():
    assert staging_size.num_tokens(LLAMA_8B, 256 * MIB) == 2048
    assert staging_size.shortage(LLAMA_8B, 2048, 256 * MIB, 256 * MIB) is None
    # The smaller side decides.
    problem = staging_size.shortage(LLAMA_8B, 16_384, 4096 * MIB, 256 * MIB)
    assert problem is not None
    assert "prompts of up to 2,048 tokens, and max_model_len is 16,384" in problem
    wanted = staging_size.suggested_bytes(LLAMA_8B, 16_384)
    assert f"kv_transfer.send_bytes and kv_transfer.receive_bytes to {wanted}" in problem
    assert staging_size.shortage(LLAMA_8B, 16_384, wanted, wanted) is None


@pytest.mark.parametrize("num_tokens", [1, 2048, 16_384, 131_072])
def test_the_suggested_staging_has_room_beside_the_longest_prompt(num_tokens):
    wanted = staging_size.suggested_bytes(LLAMA_8B, num_tokens)
    assert wanted % (256 * MIB) == 0
    assert wanted > 1.2 * LLAMA_8B.handoff_bytes(LLAMA_8B.num_blocks(num_tokens))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_measurement_moves_whole_handoffs(transport, layout, tmp_path):
    """The receiving service verifies every byte of both ranks, or the handoff would fail."""
    speed = await transport_speed.measure(transport, layout, 7, tmp_path, seconds=0.05)
    assert speed.num_bytes == layout.handoff_bytes(7)
    assert speed.bytes_per_s > 0


async def test_a_measurement_whose_handoffs_take_too_long_says_so(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(transport_speed, "_HANDOFF_TIMEOUT_S", 1e-6)
    with pytest.raises(TransferError, match=r"more than 1e-06 s"):
        await transport_speed.measure("grpc", layout, 7, tmp_path)


def test_a_measurement_takes_no_more_memory_than_there_is(layout, monkeypatch):
    monkeypatch.setattr("baton.kvtransfer.arena.free_shared_bytes", lambda: 40 * MIB)
    assert transport_speed.measured_blocks(layout, 3) == 3
    most = transport_speed.measured_blocks(layout, 10**6)
    assert 19 * MIB < 2 * layout.handoff_bytes(most) <= 20 * MIB
