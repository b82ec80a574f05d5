"""`baton cache drop`: an operator deletes the KV blocks of a tenant, or all, on every worker."""

from __future__ import annotations

import pytest

from baton.client import AdminClient, BatonClient
from baton.client.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import admin_pb2

PROMPT = list(range(10, 110))
TENANTS = ("", "search", "chat")


async def cached(client, tenant):
    """Sends a prompt; returns how many of its tokens were not computed."""
    answer = await client.complete(PROMPT, tenant=tenant, max_tokens=20, ignore_eos=True)
    return answer.usage.cached_prompt_tokens


async def blocks(admin, tenant):
    """Deletes blocks; returns how many by tier."""
    found = await admin.drop_cache(tenant)
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
