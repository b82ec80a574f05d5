"""Tenants do not find each other's KV blocks, on the simulated engine."""

from __future__ import annotations


async def test_a_prompt_is_found_again_by_its_own_tenant_only(cluster, client):
    prompt = [5 + (17 * index) % 400 for index in range(600)]
    for tenant, is_cached in (("", False), ("search", False), ("search", True), ("", True)):
        answer = await client.complete(prompt, tenant=tenant, max_tokens=2)
        assert answer.token_ids == cluster.expected(prompt, 2)
        assert (answer.usage.cached_prompt_tokens > 0) == is_cached
    await cluster.nothing_left()
