"""Extends vLLM's schedulers to failed loads of caches with several block tables.

vLLM itself ends a request whose load has failed only if the model has one block table. The
connector handles the other consequences of a failed load (connector/handoffs/handoff_scheduler.py).
engine/vllm_scheduler_class.py checks the method that the mixin overrides.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class TableLoadFailures:
    """Mixin of vLLM's schedulers that finds the requests whose load has failed."""

    def _handle_invalid_blocks(
        self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Returns the requests to end. The connector evicts their wrong blocks afterwards.

        All tables take their blocks from one pool, so a block ID belongs to one table at a time.
        """
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            failed: set[str] = super()._handle_invalid_blocks(  # type: ignore[misc]
                invalid_block_ids, num_scheduled_tokens
            )
            return failed
        return {
            request.request_id
            for request in self.running
            if any(
                not invalid_block_ids.isdisjoint(block_ids)
                for block_ids in self.kv_cache_manager.get_block_ids(request.request_id)
            )
        }


class PlainScheduler(TableLoadFailures, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with the mixin."""


class PlainAsyncScheduler(TableLoadFailures, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler for steps that overlap, with the mixin."""
