"""`baton cache drop`: an operator deletes KV blocks on every worker."""

from __future__ import annotations

import pytest

from baton.client import AdminClient, BatonClient
from baton.client.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from baton.v1 import admin_pb2

PROMPT = list(range(10, 110))
TENANTS = ("", "search", "chat")


async def cached(client, tenant, prompt=PROMPT):
    """Sends a prompt; returns how many of its tokens were not computed."""
    answer = await client.complete(prompt, tenant=tenant, max_tokens=20, ignore_eos=True)
    return answer.usage.cached_prompt_tokens


async def blocks(admin, tenant):
    """Deletes blocks; returns how many by tier."""
    found = (await admin.drop_cache(tenant)).workers
    assert [one.worker_id for one in found] == ["d1", "p1"]
    assert not any(one.error for one in found)
    return [
        sum(getattr(one, field) for one in found)
        for field in ("device_blocks", "host_blocks", "disk_blocks")
    ]


async def test_blocks_of_a_tenant_are_deleted_on_every_worker(new_cluster):
    cluster = new_cluster("p1", "d1", kv_store={"host_bytes": 2**24})
    await cluster.serving()
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        for tenant in TENANTS:
            assert await cached(client, tenant) == 0
            assert await cached(client, tenant) > 0
        device, host, _ = await blocks(admin, "search")
        assert min(device, host) >= len(PROMPT) // 16
        assert await blocks(admin, "search") == [0, 0, 0]
        assert [await cached(client, tenant) > 0 for tenant in TENANTS] == [True, False, True]
        assert await cached(client, "search") > 0
        # Requests that name no tenant belong to this one.
        assert min((await blocks(admin, "default"))[:2]) >= len(PROMPT) // 16
        assert [await cached(client, tenant) > 0 for tenant in TENANTS] == [False, True, True]
        assert min((await blocks(admin, None))[:2]) >= 3 * (len(PROMPT) // 16)
        assert [await cached(client, tenant) for tenant in TENANTS] == [0, 0, 0]
    await cluster.nothing_left()


async def test_shared_blocks_belong_to_no_tenant(new_cluster):
    cluster = new_cluster("p1", "d1", kv_store={"share": "all"})
    await cluster.serving()
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        await cached(client, "search")
        assert await cached(client, "chat") > 0
        with pytest.raises(FailedPreconditionError, match="share"):
            await admin.drop_cache("search")
        with pytest.raises(InvalidArgumentError, match="tenant"):
            await admin._answer(admin._stub.DropCache(admin_pb2.DropCacheRequest()))
        assert (await blocks(admin, None))[0] > 0
        assert await cached(client, "chat") == 0


async def turn(client, prompt, session, tenant=""):
    """Sends a prompt of a session; returns its answer."""
    return await client.complete(
        prompt, tenant=tenant, session_id=session, max_tokens=40, ignore_eos=True
    )


def num_deleted(answer):
    assert not any(one.error for one in answer.workers)
    return sum(one.device_blocks + one.host_blocks for one in answer.workers)


async def test_blocks_of_a_session_are_deleted_with_its_answers(new_cluster):
    cluster = new_cluster("p1", "d1", kv_store={"host_bytes": 2**24})
    await cluster.serving()
    system, mine, others = list(range(10, 90)), list(range(100, 164)), list(range(200, 264))
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        answer = (await turn(client, [*system, *mine], "mine")).token_ids
        await turn(client, [*system, *others], "others")
        conversation = [*system, *mine, *answer]
        found = await admin.drop_cache(session_id="mine")
        # Both tiers of the worker that computed the prompt had its own blocks.
        assert num_deleted(found) >= 2 * len(mine) // 16
        assert found.shared_blocks == len(system) // 16
        # Blocks that the other session has too are still there, and no block behind them.
        assert await cached(client, "", conversation) == len(system)
        assert (
            await cached(client, "", [*system, *others]) == len([*system, *others]) // 16 * 16 - 16
        )
        # The last session that has a block decides; the prompt above belongs to no session.
        found = await admin.drop_cache(session_id="others")
        assert found.shared_blocks == 0
        assert await cached(client, "", [*system, 7]) == 0
        with pytest.raises(NotFoundError, match="others"):
            await admin.drop_cache(session_id="others")
    await cluster.nothing_left()


@pytest.mark.parametrize("share", ["tenant", "all"])
async def test_sessions_of_tenants_are_kept_apart(new_cluster, share):
    cluster = new_cluster("p1", "d1", kv_store={"share": share})
    await cluster.serving()
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        await turn(client, PROMPT, "talk", "search")
        await turn(client, [9, *PROMPT], "talk", "chat")
        with pytest.raises(InvalidArgumentError, match="chat, search"):
            await admin.drop_cache(session_id="talk")
        assert num_deleted(await admin.drop_cache("search", session_id="talk")) > 0
        assert await cached(client, "search") == 0
        assert await cached(client, "chat", [9, *PROMPT]) > 0
        assert num_deleted(await admin.drop_cache(session_id="talk")) > 0
        assert await cached(client, "chat", [9, *PROMPT]) == 0
