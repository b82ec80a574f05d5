"""Tokens stay right, whatever happens to a handoff's frames on their way."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import pytest

from baton.client.client import BatonClient
from baton.kvtransfer import frames
from baton.v1 import kv_transfer_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import Cluster
from tests.vllm.vllm_relay import Relay, Spoil

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


def with_kind(
    kind: frames.FrameKind, change: Callable[[bytes, frames.Frame], list[bytes]]
) -> Spoil:
    """Spoils the first frame of a kind within its message."""
    done = False

    def spoil(message: bytes) -> list[bytes]:
        nonlocal done
        made: list[bytes] = []
        for frame in frames.decode(message):
            raw = again(frame)
            if frame.kind is kind and not done:
                done = True
                made += change(raw, frame)
            else:
                made.append(raw)
        return made

    return spoil


def again(frame: frames.Frame, **changes: int | bytes) -> bytes:
    fields = {
        "handoff_id": frame.handoff_id,
        "epoch": frame.epoch,
        "shard": frame.shard,
        "layer": frame.layer,
        "first_block": frame.first_block,
        "num_blocks": frame.num_blocks,
        "payload": bytes(frame.payload),
        **changes,
    }
    return frames.encode(frame.kind, **fields)  # type: ignore[arg-type]


def flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]


def corrupted(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [flip(raw, frames.HEADER_BYTES + len(frame.payload) // 2)]


def corrupted_header(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [flip(raw, 9)]


def truncated(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [raw[: frames.HEADER_BYTES + len(frame.payload) // 2]]


def duplicated(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [raw, raw]


def missing(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return []


def of_another_handoff(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [again(frame, handoff_id=secrets.token_bytes(16))]


def of_an_old_epoch(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [again(frame, epoch=frame.epoch - 1)]


def of_another_layer(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [again(frame, layer=frame.layer + 1)]


def beyond_the_end(raw: bytes, frame: frames.Frame) -> list[bytes]:
    return [again(frame, first_block=frame.first_block + 1000)]


def foreign_bytes(raw: bytes, frame: frames.Frame) -> list[bytes]:
    """Replaces the bytes and their checksum; only the commit reveals it."""
    return [again(frame, payload=secrets.token_bytes(len(frame.payload)))]


def other_fingerprint(raw: bytes, frame: frames.Frame) -> list[bytes]:
    opened = kv_transfer_pb2.HandoffOpen.FromString(bytes(frame.payload))
    opened.fingerprint.head_size += 1
    return [again(frame, payload=opened.SerializeToString())]


DATA, COMMIT, OPEN = frames.FrameKind.DATA, frames.FrameKind.COMMIT, frames.FrameKind.OPEN
FAULTS = {
    "corrupted": (DATA, corrupted),
    "corrupted header": (DATA, corrupted_header),
    "truncated": (DATA, truncated),
    "duplicated": (DATA, duplicated),
    "missing": (DATA, missing),
    "of another handoff": (DATA, of_another_handoff),
    "of an old epoch": (DATA, of_an_old_epoch),
    "of another layer": (DATA, of_another_layer),
    "beyond the end": (DATA, beyond_the_end),
    "foreign bytes": (DATA, foreign_bytes),
    "corrupted commit": (COMMIT, corrupted),
    "commit twice": (COMMIT, duplicated),
    "commit of an old epoch": (COMMIT, of_an_old_epoch),
    "other fingerprint": (OPEN, other_fingerprint),
    "truncated open": (OPEN, truncated),
    "opened twice": (OPEN, duplicated),
}


async def spoiled_tokens(
    client: BatonClient, relay: Relay, spoil: Spoil, case: cases.Case
) -> list[int]:
    relay.spoil = spoil
    made = await client.complete(case["prompt"], timeout_s=60, **case["sampling"])
    return list(made.token_ids)


@pytest.mark.parametrize("fault", FAULTS)
async def test_spoiled_frames_never_change_tokens(
    fault: str,
    client: BatonClient,
    cluster: Cluster,
    relay: Relay,
    expected: dict[str, cases.Case],
) -> None:
    kind, change = FAULTS[fault]
    case = expected[f"fault-{list(FAULTS).index(fault)}"]
    tokens = await spoiled_tokens(client, relay, with_kind(kind, change), case)
    assert relay.num_spoiled > 0
    assert tokens == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def test_reordered_frames_are_put_where_they_belong(
    client: BatonClient, cluster: Cluster, relay: Relay, expected: dict[str, cases.Case]
) -> None:
    case = expected["fault-18"]
    held: list[bytes] = []

    def swap(message: bytes) -> list[bytes]:
        made: list[bytes] = []
        for frame in frames.decode(message):
            raw = again(frame)
            if frame.kind is DATA and not held:
                held.append(raw)
            elif frame.kind is DATA and len(held) == 1:
                made += [raw, held[0]]
                held.append(b"")
            else:
                made.append(raw)
        return made

    tokens = await spoiled_tokens(client, relay, swap, case)
    assert relay.num_spoiled > 0
    assert tokens == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def test_late_frames_find_nothing_to_write_to(
    client: BatonClient, cluster: Cluster, relay: Relay, expected: dict[str, cases.Case]
) -> None:
    """Frames of a handoff that has ended arrive in the stream of the next one."""
    kept: list[bytes] = []

    def keep(message: bytes) -> list[bytes]:
        kept.extend(again(f) for f in frames.decode(message) if f.kind is DATA)
        return [message]

    relay.spoil = keep
    await client.complete(cases.prompt(230, 3000), temperature=0, max_tokens=4, timeout_s=60)
    assert kept

    def late(raw: bytes, frame: frames.Frame) -> list[bytes]:
        return [*kept, raw]

    case = expected["fault-19"]
    tokens = await spoiled_tokens(client, relay, with_kind(DATA, late), case)
    assert tokens == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def test_an_altered_reference_to_shared_memory_falls_back_to_the_next_transport(
    client: BatonClient, cluster: Cluster, relay: Relay, expected: dict[str, cases.Case]
) -> None:
    """The receiver interrupts the epoch, and the sender sends everything again by gRPC."""
    case, done = expected["fault-16"], False
    before = cluster.handoff_tokens()
    relay.only_grpc = False

    def alter(message: bytes) -> list[bytes]:
        nonlocal done
        kinds = {frame.kind for frame in frames.decode(message)}
        if done or frames.FrameKind.REFERENCE not in kinds:
            return [message]
        done = True
        return [flip(message, 9)]

    tokens = await spoiled_tokens(client, relay, alter, case)
    assert relay.num_spoiled == 1
    assert tokens == case["expected"]["token_ids"]
    # The handoff was loaded all the same.
    async with asyncio.timeout(120):
        while cluster.handoff_tokens() < before + len(case["prompt"]):
            await asyncio.sleep(0.05)
    await cluster.assert_idle()
