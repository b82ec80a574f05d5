"""Runs vLLM's own schedulers with Baton's settings and connector, with few blocks and no model.

Each scenario calls the scheduler in the order of an engine core (EngineCore.step and
step_with_batch_queue of vllm/v1/engine/core.py).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from baton.engine.served_model import ServedModel
from baton.engine.vllm_config import RefusingEngineArgs, checked_args
from baton.engine.vllm_scheduler_class import use_scheduler
from baton.engine.vllm_step_targets import write_targets
from baton.kvtransfer import engine_groups
from baton.kvtransfer.connector import vllm_connector
from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.runtime import demo_model
from baton.runtime.config import LatencyConfig
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import kv_transfer_pb2

BLOCK, CHUNK = 16, 64
LAYOUT = KvLayout("m", "r", "float32", 1, 1, 8, BLOCK, 1024, "heads,tokens,content")
HANDOFF = bytes(16)
PRIOR = LatencyModel.from_config(LatencyConfig())
# Priorities: a smaller one runs first and is preempted last.
URGENT, SOON, LATE = 0, 1, 5


class Port:
    """A connection to a transfer service that has one committed handoff."""

    alive = True

    def __init__(self, _: str) -> None:
        state = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        self._states = [kv_transfer_pb2.LocalHandoffState(handoff_id=HANDOFF, state=state)]

    def poll(self) -> list[kv_transfer_pb2.LocalHandoffState]:
        states, self._states = self._states, []
        return states

    def subscribe(self) -> None:
        pass

    def release(self, handoff_id: bytes, *, all_shards: bool, not_loaded: int) -> None:
        pass

    def abort_send(self, handoff_id: bytes) -> None:
        pass


def engine_config(engine_args: str) -> VllmConfig:
    """Returns an own configuration for engine arguments in JSON."""
    return copy.deepcopy(_configured(engine_args))


@functools.cache
def _configured(engine_args: str) -> VllmConfig:
    # This takes longer than most runs of an engine.
    args = json.loads(engine_args)
    served = ServedModel(demo_model.ensure("demo-2-layers"), "m", args)
    checked = checked_args(served, Path("traces"))
    return RefusingEngineArgs(**checked).create_engine_config()


class Engine:
    """A scheduler, and a model that records from which tokens each KV slot was computed.

    Args:
        num_blocks: Number of blocks that requests can have.
        asynchronous: Whether a step is made while the previous one runs, as on GPUs.
        targets: Targets of Baton's scheduler; None: vLLM's own scheduler.
        engine_args: vLLM's engine arguments, beside Baton's.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        asynchronous: bool,
        targets: StepTargets | None = None,
        **engine_args: Any,
    ) -> None:
        args = {"dtype": "float32", "block_size": BLOCK, "max_model_len": 256, **engine_args}
        args = {"max_num_batched_tokens": CHUNK, "kv_cache_memory_bytes": 2**20, **args}
        config = engine_config(json.dumps(args))
        # vLLM's CPU platform turns asynchronous scheduling off.
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = num_blocks + 1
        socket = str(Path(tempfile.mkdtemp()) / "kv.sock")
        # As the first rank records them.
        engine_groups.record(socket, LAYOUT.groups)
        config.kv_transfer_config.kv_connector_extra_config = {
            "socket": socket, "layout": dataclasses.asdict(LAYOUT), "rank_cpus": [],
        }  # fmt: skip
        if targets is not None:
            use_scheduler(config, PRIOR, socket)
            write_targets(socket, targets)
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        # Prompt and output of each request, as the ranks know them.
        self.tokens: dict[str, list[int]] = {}
        self.reported: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.preempted: list[str] = []
        # Saved runs of blocks (first block, number of blocks, last), and whether the saved blocks
        # held the keys of the request's own tokens.
        self.saved: list[tuple[int, int, bool]] = []
        self.is_saved_right = True
        self.given_up: list[bytes] = []
        # Requests that attended to slots that were not computed from their own tokens.
        self.misled: set[str] = set()
        self._keys: dict[tuple[int, int], tuple[int, ...]] = {}
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        priority: int,
        max_tokens: int,
        transfer: dict[str, Any] | None = None,
        images: Sequence[range] = (),
        adapter: int = 0,
    ) -> None:
        """Adds a request.

        Args:
            name: Its ID.
            prompt: Its prompt's tokens.
            priority: vLLM's priority.
            max_tokens: Number of output tokens.
            transfer: Parameters of its handoff.
            images: The prompt tokens that stand for images.
            adapter: vLLM's ID of its LoRA adapter; 0: none.
        """
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": transfer}
        hasher = get_request_block_hasher(BLOCK, sha256)
        features = [
            MultiModalFeatureSpec(
                None, "image", f"{name} {one.start}", PlaceholderRange(one.start, len(one))
            )
            for one in images
        ]
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            priority=priority,
            block_hasher=hasher,
            lora_request=LoRARequest(f"adapter {adapter}", adapter, "/") if adapter else None,
            mm_features=features,
        )
        self.tokens[name], self.reported[name] = list(prompt), []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> dict[str, int]:
        """Makes a step and begins it; returns the number of tokens of each request."""
        output = self.scheduler.schedule()
        self.preempted += output.preempted_req_ids
        num_scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in num_scheduled.items():
            for at in range(computed[name], computed[name] + count):
                self._keys[self._slot(name, at)] = tuple(self.tokens[name][: at + 1])
        step = output.kv_connector_metadata.handoffs
        self.given_up += step.ended
        for save in step.saves:
            (part,) = save.parts
            self.saved.append((part.first_block, len(part.block_ids), save.last))
            tokens = self.tokens["prompt"]
            for index, block_id in enumerate(part.block_ids, part.first_block):
                for at in range(index * BLOCK, min((index + 1) * BLOCK, len(tokens))):
                    made_of = self._keys.get((block_id, at % BLOCK))
                    self.is_saved_right &= made_of == tuple(tokens[: at + 1])
        sampled = []
        for name, count in num_scheduled.items():
            tokens = self.tokens[name]
            made_of = [self._keys.get(self._slot(name, at)) for at in range(computed[name])]
            if made_of != [tuple(tokens[: at + 1]) for at in range(computed[name])]:
                self.misled.add(name)
            # The model accepts no draft.
            num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            is_prompt_over = computed[name] + count - num_drafts == len(tokens)
            sampled.append([len(tokens)] if is_prompt_over else [])
            tokens += sampled[-1]
        made = ModelRunnerOutput(
            req_ids=list(num_scheduled),
            req_id_to_index={name: index for index, name in enumerate(num_scheduled)},
            sampled_token_ids=sampled,
        )
        self._under_way.append((output, made))
        return dict(num_scheduled)

    def _slot(self, name: str, at: int) -> tuple[int, int]:
        return self.block_ids(name)[at // BLOCK], at % BLOCK

    def block_ids(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def take_output(self, invalid_block_ids: Sequence[int] = ()) -> None:
        """Ends the oldest step under way; the ranks report blocks that they could not load.

        The loads that requests wait for end in the step that begins them.
        """
        output, made = self._under_way.popleft()
        loads = output.kv_connector_metadata.handoffs.loads
        made.kv_connector_output = KVConnectorOutput(
            finished_recving={load.waiting_id for load in loads if load.waiting_id},
            invalid_block_ids=set(invalid_block_ids),
        )
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                self.reported[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)

    def step(self) -> dict[str, int]:
        """Makes a step and ends it."""
        num_scheduled = self.schedule()
        self.take_output()
        return num_scheduled

    def run(self) -> None:
        """Steps until all requests have ended."""
        while self.scheduler.has_unfinished_requests():
            self.schedule()
            self.take_output()
        while self._under_way:
            self.take_output()

    def num_named(self, tokens: Sequence[int]) -> int:
        """Returns how many blocks of these tokens the prefix cache holds."""
        hasher = get_request_block_hasher(BLOCK, sha256)
        prompt = [*tokens, 0]
        probe = Request("probe", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(probe)[1]) // BLOCK


def failed_load(*, is_fenced: bool) -> dict[str, Any]:
    """A load fails while another request needs the blocks of the loading request.

    The step that runs the request loads it, as for caches with states.

    Args:
        is_fenced: Whether vLLM keeps a request whose step is under way, as it does with this
            connector.
    """
    engine = Engine(5, asynchronous=True)
    engine.scheduler.connector.connector_scheduler.handoffs.requests_wait = False
    engine.scheduler.defer_block_free &= is_fenced
    prompt = list(range(1000, 1000 + 3 * BLOCK + 1))
    receive = ReceiveHandoff(HANDOFF, 3 * BLOCK, 60.0)
    engine.add("wants", range(BLOCK - 1), URGENT, 8)
    engine.schedule()
    engine.add("loads", prompt, LATE, 8, encode(receive=receive))
    loading = engine.schedule()
    loaded = engine.block_ids("loads")[:3]
    engine.take_output()
    following = engine.schedule()
    engine.take_output(loaded)
    engine.take_output()
    return {
        "loading": loading["loads"],
        "following": following,
        "preempted": engine.preempted,
        "tokens": engine.reported["loads"],
        "ended": engine.ended.get("loads"),
        "num_named": engine.num_named(prompt),
    }


def taken_back(engine: Engine) -> dict[str, Any]:
    """Returns the results after the last schedule preempted a request that had just got blocks."""
    preempted = list(engine.preempted)
    engine.run()
    return {"preempted": preempted, "misled": sorted(engine.misled), "ended": engine.ended}


def prompt_beside_a_running_step() -> dict[str, Any]:
    """A prompt's second chunk has no room while the first one runs.

    When there is room, another request needs it.
    """
    engine = Engine(10, asynchronous=True)
    engine.add("grows", range(15), URGENT, 6)
    engine.add("ends", range(100, 120), URGENT, 2)
    engine.schedule()
    engine.add("prompt", range(1000, 1112), LATE, 2)
    engine.schedule()
    engine.take_output()
    engine.add("wants", range(200, 216), URGENT, 3)
    engine.schedule()
    engine.take_output()
    engine.schedule()
    return taken_back(engine)


def prompt_in_chunks() -> dict[str, Any]:
    """The chunk size is limited, so that other requests run after the prompt in one step."""
    engine = Engine(8, asynchronous=False, long_prefill_token_threshold=2 * BLOCK)
    engine.add("runs", range(5), URGENT, 8)
    engine.add("prompt", range(1000, 1096), LATE, 2)
    engine.step()
    engine.add("wants", range(200, 216), URGENT, 3)
    engine.step()
    engine.step()
    return taken_back(engine)


def output_beside_a_prompt() -> dict[str, Any]:
    """An output fills a block when a prompt needs more blocks than there are, and is preempted.

    The next request begins with that output.
    """
    engine = Engine(11, asynchronous=False)
    engine.add("grows", range(100, 115), URGENT, 4)
    engine.add("grows too", range(200, 215), URGENT, 4)
    engine.add("prompt", range(1000, 1014), LATE, 4)
    engine.step()
    engine.add("wants", range(2000, 2122), SOON, 2)
    engine.step()
    engine.step()
    engine.abort("wants")
    engine.add("follows", [*engine.tokens["prompt"], *range(3000, 3005)], LATE, 1)
    return taken_back(engine)


def preempted_send() -> dict[str, Any]:
    """A prompt that is handed over is preempted between its chunks, and computed again."""
    engine = Engine(8, asynchronous=False, long_prefill_token_threshold=2 * BLOCK)
    send = SendHandoff(HANDOFF, 0, 90)
    engine.add("runs", range(5), URGENT, 8)
    engine.add("prompt", range(1000, 1090), LATE, 1, encode(send=send))
    engine.step()
    saved_before = list(engine.saved)
    engine.add("wants", range(200, 216), URGENT, 3)
    engine.run()
    return {
        "preempted": engine.preempted,
        "saved_before": saved_before,
        "saved": engine.saved,
        "is_right": engine.is_saved_right,
        "given_up": len(engine.given_up),
        "ended": engine.ended,
    }


def main() -> dict[str, Any]:
    """Returns the results of all scenarios."""
    vllm_connector.EnginePort = Port  # type: ignore[misc,assignment]
    init_none_hash(sha256)
    return {
        "failed load": failed_load(is_fenced=True),
        "failed load, unfenced": failed_load(is_fenced=False),
        "prompt beside a running step": prompt_beside_a_running_step(),
        "prompt in chunks": prompt_in_chunks(),
        "output beside a prompt": output_beside_a_prompt(),
        "preempted send": preempted_send(),
    }
