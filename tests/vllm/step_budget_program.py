"""Compares Baton's scheduler with vLLM's own one on an engine without a model, by random requests.

The engine is that of scheduling_program.py: it has few blocks, so that requests are preempted.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import vllm
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from baton.engine import vllm_adapter_slots, vllm_scheduler_class
from baton.engine.base import EngineDead
from baton.engine.vllm_scheduler_class import use_scheduler
from baton.kvtransfer.connector import vllm_connector
from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.runtime.steps.latency_fit import LatencyFit
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import kv_transfer_pb2
from tests.vllm.scheduling_program import BLOCK, HANDOFF, LATE, PRIOR, URGENT, Engine, Port

NUM_BLOCKS = 14
MAX_LORAS = 2
# Targets that leave room for prompts, and targets that leave none, so that each step has the least
# number of prompt tokens.
TARGETS = {"normal": StepTargets(0.05, 0.06, 0.2), "floor": StepTargets(1e-6, 1e-6, 1e-6)}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
# More steps than any run needs, and more empty steps in a row than any wait for a block takes.
_MAX_STEPS, _MAX_EMPTY = 5000, 50

Result = dict[str, Any]


def receive(handoff_id: bytes, num_tokens: int) -> dict[str, Any]:
    return encode(receive=ReceiveHandoff(handoff_id, num_tokens, 60.0))


def handoff_id(number: int) -> bytes:
    return number.to_bytes(16)


class ManyHandoffs(Port):
    """A transfer service that commits `coming`, with `num_blocks` each, when the test says so."""

    coming: tuple[bytes, ...] = ()
    num_blocks = 2

    def __init__(self, _: str) -> None:
        super().__init__(_)
        self._states = []

    def poll(self) -> list[kv_transfer_pb2.LocalHandoffState]:
        found, ManyHandoffs.coming = ManyHandoffs.coming, ()
        state = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        return [
            kv_transfer_pb2.LocalHandoffState(
                handoff_id=one, state=state, num_tokens=self.num_blocks * BLOCK
            )
            for one in found
        ]


def requests(seed: int) -> list[tuple[int, str, list[int], int, int, dict[str, Any] | None]]:
    """Returns random requests: first step, name, prompt, priority, output tokens, handoff."""
    rng = random.Random(seed)
    found = []
    for index in range(24):
        length = rng.randint(100, 200) if rng.random() < 0.3 else rng.randint(3, 30)
        transfer = None
        if index == 5:
            length, transfer = 3 * BLOCK + 1, receive(HANDOFF, 3 * BLOCK)
        # Some prompts begin like others, so that the prefix cache finds blocks.
        first = 1000 * (index % 20 + 1)
        prompt = list(range(first, first + length))
        priority, num_outputs = rng.choice([URGENT, URGENT, LATE]), rng.randint(1, 12)
        found.append((rng.randint(0, 40), f"r{index}", prompt, priority, num_outputs, transfer))
    return sorted(found, key=lambda one: one[0])


def random_images(rng: random.Random, num_tokens: int) -> list[range]:
    """Returns images of 5 to 90 tokens in a prompt of this length; none in a short one."""
    found, begin = [], rng.randint(0, 20)
    while num_tokens - begin > 12 and rng.random() < 0.7:
        size = rng.randint(5, min(90, num_tokens - begin - 2))
        found.append(range(begin, begin + size))
        begin += size + rng.randint(0, 30)
    return found


def hold_image_tokens(engine: Engine, num_tokens: int) -> None:
    """Gives an engine an encoder cache of this size."""
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(num_tokens)
    engine.scheduler.max_num_encoder_input_tokens = num_tokens


def random_run(
    seed: int,
    *,
    asynchronous: bool,
    targets: StepTargets | None,
    have_images: bool = False,
    num_adapters: int = 0,
    **more: Any,
) -> Result:
    """Runs the requests of a seed; `steps` is None if they did not end.

    With adapters, a step may have MAX_LORAS of them.
    """
    engine = Engine(NUM_BLOCKS, asynchronous=asynchronous, targets=targets, **more)
    rng = random.Random(seed)
    if have_images:
        hold_image_tokens(engine, 100)
    if num_adapters:
        engine.scheduler.lora_config = SimpleNamespace(max_loras=MAX_LORAS)
    waiting, num_steps, num_empty = requests(seed), 0, 0
    while waiting or engine.scheduler.has_unfinished_requests() or engine.is_busy:
        while waiting and waiting[0][0] <= num_steps:
            _, name, prompt, *rest, transfer = waiting.pop(0)
            has_images = have_images and transfer is None
            images = random_images(rng, len(prompt)) if has_images else []
            adapter = rng.randint(0, num_adapters) if num_adapters else 0
            engine.add(name, prompt, *rest, transfer, images, adapter)
        made = engine.schedule() if engine.scheduler.has_unfinished_requests() else {}
        if engine.is_busy and (not asynchronous or engine.num_under_way > 1 or not made):
            engine.take_output()
        num_steps += 1
        num_empty = 0 if made or engine.is_busy else num_empty + 1
        if num_steps > _MAX_STEPS or (num_empty > _MAX_EMPTY and not waiting):
            return {"steps": None, "left": sorted(engine.scheduler.requests)}
    return {
        "steps": num_steps,
        "tokens": engine.reported,
        # The loaded handoff was not computed here.
        "misled": sorted(engine.misled - {"r5"}),
        "ended": engine.ended,
        "num_preempted": len(engine.preempted),
    }


def compared(num_seeds: int, modes: Sequence[bool] = (False, True), **more: Any) -> dict[str, Any]:
    """Runs each seed with both schedulers; returns what differs, by name of the run.

    Args:
        num_seeds: Number of seeds.
        modes: Whether a step is made while the previous one runs, for each run of a seed.
        more: Arguments of `random_run`.
    """
    differs: dict[str, Any] = {}
    num_preempted = {"vllm": 0, "baton": 0}
    for asynchronous in modes:
        for seed in range(num_seeds):
            own = random_run(seed, asynchronous=asynchronous, targets=None, **more)
            for name, targets in TARGETS.items():
                found = random_run(seed, asynchronous=asynchronous, targets=targets, **more)
                same = all(own.get(key) == found.get(key) for key in ("tokens", "misled", "ended"))
                if not same or found["steps"] is None:
                    how = "asynchronous" if asynchronous else "synchronous"
                    differs[f"{how}, {name}, seed {seed}"] = [own, found]
                    continue
                num_preempted["vllm"] += own["num_preempted"]
                num_preempted["baton"] += found["num_preempted"]
    return {"differs": differs, "num_preempted": num_preempted}


def handoffs_at_the_floor() -> dict[str, Any]:
    """32 handoffs come while a long prompt takes the least number of tokens in each step."""
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(
        200, asynchronous=False, targets=TARGETS["floor"], max_num_batched_tokens=BLOCK * 4
    )
    engine.add("stream", range(5), URGENT, 200)
    engine.add("long", range(10_000, 10_240), URGENT, 1)
    engine.step()
    names = [f"h{number}" for number in range(32)]
    for number, name in enumerate(names):
        prompt = range(1000 * (number + 1), 1000 * (number + 1) + 2 * BLOCK + 1)
        engine.add(name, prompt, URGENT, 2, receive(handoff_id(number), 2 * BLOCK))
    before = [engine.step() for _ in range(2)]
    ManyHandoffs.coming = tuple(map(handoff_id, range(32)))
    first: dict[str, int] = {}
    steps = 0
    while len(first) < len(names) and steps < 50:
        made = engine.step()
        steps += 1
        first |= {name: steps for name in made if name in names and name not in first}
    return {
        "before": before,
        "steps": max(first.values(), default=None),
        "num_started": len(first),
        "long_tokens": engine.scheduler.requests["long"].num_computed_tokens
        if "long" in engine.scheduler.requests
        else 240,
    }


def handoff_under_way() -> dict[str, Any]:
    """A request waits for its handoff beside a stream; then the handoff comes."""
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    manager = engine.scheduler.kv_cache_manager
    engine.add("stream", range(5), URGENT, 200)
    engine.step()
    engine.add("waits", range(1000, 1000 + 2 * BLOCK + 1), URGENT, 2, receive(HANDOFF, 2 * BLOCK))
    with mock.patch.object(
        manager, "get_computed_blocks", wraps=manager.get_computed_blocks
    ) as lookups:
        before = [engine.step() for _ in range(100)]
    num_waiting = engine.scheduler.get_request_counts()[1]
    ManyHandoffs.coming = (HANDOFF,)
    return {
        "before": before,
        "lookups": lookups.call_count,
        "num_waiting": num_waiting,
        "after": [engine.step() for _ in range(5)],
    }


def handoff_beside_a_prompt() -> list[int]:
    """Tokens of a long prompt in each step; a stream's handoff arrives, comes, and is loaded.

    The stream has a tiny ITL target, and there is no other stream.
    """
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    engine.add("long", range(1000, 1240), URGENT, 1)
    found = [engine.step()["long"]]
    order = ReceiveHandoff(HANDOFF, 2 * BLOCK, 60.0)
    transfer = encode(receive=order, itl_s=1e-6)
    engine.add("stream", range(2000, 2000 + 2 * BLOCK + 1), URGENT, 2, transfer)
    found.append(engine.step()["long"])
    ManyHandoffs.coming = (HANDOFF,)
    while "stream" in engine.scheduler.requests:
        found.append(engine.step()["long"])
    found.append(engine.step()["long"])
    return found


def handoff_in_a_full_cache(targets: StepTargets | None) -> int:
    """Steps until a loaded request starts; the streams took the last block before its load ended.

    One of the streams ends soon and leaves enough blocks, the other one much later.
    """
    vllm_connector.EnginePort = Port  # type: ignore[misc,assignment]
    engine = Engine(6, asynchronous=False, targets=targets)
    engine.add("long", range(15), URGENT, 40)
    engine.add("short", range(100, 120), URGENT, 8)
    engine.step()
    prompt = range(1000, 1000 + 2 * BLOCK + 1)
    engine.add("loads", prompt, URGENT, 4, receive(HANDOFF, 2 * BLOCK))
    num_steps = 1
    while "loads" not in engine.step():
        num_steps += 1
    return num_steps


class BigHandoffs(ManyHandoffs):
    num_blocks = 14


def beside_requests_without_blocks(case: str, targets: StepTargets | None) -> dict[str, Any]:
    """A long prompt runs, and the next request finds too few free blocks until that prompt ends.

    Args:
        case: The next request: "handoff"; "cached", a prompt whose beginning is in the prefix
            cache, and no request holds it; "host", the same in host memory, until the long prompt
            has ended. Behind it, a short prompt arrives before each step.
        targets: Targets of Baton's scheduler; None: vLLM's own scheduler.

    Returns:
        Tokens of the long prompt in each step; the later steps, up to the first with the next
        request and a short prompt.
    """
    vllm_connector.EnginePort = BigHandoffs  # type: ignore[misc,assignment]
    engine = Engine(60, asynchronous=False, targets=targets, max_model_len=1024)
    requests, connector = engine.scheduler.requests, engine.scheduler.connector
    if case == "cached":
        engine.add("earlier", range(1000, 1480), URGENT, 1)
        engine.run()
    engine.add("holds blocks", range(9000, 9160), LATE, 100)
    while not engine.reported["holds blocks"]:
        engine.step()
    engine.add("long", range(5000, 5600), URGENT, 1)
    while requests["long"].num_computed_tokens < 240:
        engine.step()
    prompt = range(1000, 1490)
    if case == "handoff":
        prompt = range(1000, 1000 + 14 * BLOCK + 1)
        engine.add("next", prompt, URGENT, 2, receive(HANDOFF, 14 * BLOCK))
        engine.step()
        ManyHandoffs.coming = (HANDOFF,)
    else:
        engine.add("next", prompt, URGENT, 2)
    beside: list[int] = []
    after: list[dict[str, int]] = []
    with contextlib.ExitStack() as stack:
        if case == "host":
            for name, found, none in (
                ("num_stored_tokens", 480, 0),
                ("get_num_new_matched_tokens", (480, True), (0, False)),
            ):
                patched = mock.patch.object(
                    connector,
                    name,
                    lambda request, _, found=found, none=none: (
                        found if request.request_id == "next" else none
                    ),
                )
                stack.enter_context(patched)
        while "long" in requests and len(beside) < 100:
            first = 20_000 + 1000 * len(beside)
            engine.add(f"short {len(beside)}", range(first, first + 15), URGENT, 1)
            beside.append(engine.step().get("long", 0))
    while len(after) < 100 and not {"next", "short 0"} <= {one for step in after for one in step}:
        after.append(engine.step())
    return {"beside": beside, "after": after}


def prompt_beside_a_loaded_one() -> dict[str, Any]:
    """A stream and a prompt take both places before a shorter prompt has loaded its beginning."""
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(60, asynchronous=False, targets=TARGETS["floor"], max_num_seqs=2)
    engine.add("stream", range(5), URGENT, 60)
    engine.step()
    order = ReceiveHandoff(HANDOFF, 2 * BLOCK, 60.0, is_fetch=True)
    prompt = range(1000, 1000 + 2 * BLOCK + 100)
    engine.add("fetched", prompt, URGENT, 1, encode(receive=order))
    engine.step()
    engine.add("long", range(2000, 2240), URGENT, 1)
    ManyHandoffs.coming = (HANDOFF,)
    steps = [engine.step()]
    num_loaded = len(engine.scheduler.finished_recving_kv_req_ids)
    while engine.scheduler.has_unfinished_requests() and len(steps) < 500:
        steps.append(engine.step())
    return {"num_loaded": num_loaded, "steps": steps, "ended": engine.ended}


def beside_a_preemption() -> list[dict[str, int]]:
    """Each step from the one in which a batch stream is preempted; a prompt arrives before it.

    The preempted stream leaves enough free blocks for the prompt.
    """
    engine = Engine(8, asynchronous=False, targets=TARGETS["normal"])
    engine.add("batch", range(1000, 1090), LATE, 50)
    engine.add("stream", range(30), URGENT, 50)
    while len(engine.reported["stream"]) < 2:
        engine.step()
    # The stream fills its two blocks, and the batch stream has the other six.
    while len(engine.tokens["stream"]) <= 2 * BLOCK:
        engine.step()
    engine.add("arrives", range(2000, 2040), URGENT, 1)
    steps = [engine.step()]
    assert engine.preempted == ["batch"]
    return [*steps, engine.step()]


def _fetching(prompt: range, max_tokens: int) -> Engine:
    """Returns an engine with two places, a stream, and a prompt whose beginning is fetched."""
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"], max_num_seqs=2)
    engine.add("stream", range(5), URGENT, 60)
    engine.step()
    order = ReceiveHandoff(HANDOFF, 2 * BLOCK, 60.0, is_fetch=True)
    engine.add("fetched", prompt, URGENT, max_tokens, encode(receive=order))
    engine.step()
    return engine


def loaded_in_the_last_place() -> list[dict[str, int]]:
    """Steps in which a loaded prompt takes the last place, and in which a stream has left its own.

    Another prompt arrives before them.
    """
    engine = _fetching(range(1000, 1052), 60)
    ManyHandoffs.coming = (HANDOFF,)
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
    engine.add("arrives", range(2000, 2040), URGENT, 1)
    steps = [engine.step()]
    engine.abort("stream")
    return [*steps, engine.step()]


def loaded_without_a_place() -> list[dict[str, int]]:
    """Steps beside a loaded prompt that has no place; then a stream ends and leaves its place."""
    engine = _fetching(range(1000, 1072), 1)
    engine.add("other", range(5), URGENT, 60)
    ManyHandoffs.coming = (HANDOFF,)
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
    steps = [engine.step() for _ in range(2)]
    engine.abort("stream")
    return [*steps, engine.step()]


def adapters_read(num_waiting: int) -> int:
    """How often a step beside 20 streams reads which adapter a request uses."""
    vllm_connector.EnginePort = ManyHandoffs  # type: ignore[misc,assignment]
    engine = Engine(200, asynchronous=False, targets=TARGETS["normal"])
    engine.scheduler.lora_config = SimpleNamespace(max_loras=MAX_LORAS)
    for number in range(20):
        engine.add(f"stream{number}", range(number, number + 5), URGENT, 200, adapter=1)
    while not all(engine.reported.values()):
        engine.step()
    for number in range(num_waiting):
        transfer = receive(handoff_id(number), BLOCK)
        engine.add(f"waits{number}", range(BLOCK + 1), URGENT, 2, transfer, adapter=2)
    read = vllm_adapter_slots._adapter
    with mock.patch.object(vllm_adapter_slots, "_adapter", wraps=read) as reads:
        engine.step()
    return reads.call_count


def failed_grammar(**lacks: Any) -> dict[str, str]:
    """How requests have ended one step after a request's grammar failed to compile.

    Args:
        lacks: Engine arguments; without them, the request lacks an adapter slot.
    """
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"], **lacks)
    engine.scheduler.lora_config = None if lacks else SimpleNamespace(max_loras=1)
    engine.add("stream", range(5), URGENT, 100, adapter=1)
    engine.step()
    engine.add("json", range(1000, 1010), URGENT, 1, adapter=2)
    prompt = engine.scheduler.requests["json"]
    prompt.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    prompt.structured_output_request = SimpleNamespace(grammar=ValueError("no grammar"))
    engine.step()
    return engine.ended


def prompts_behind_an_image(num_blocks: int) -> list[dict[str, int]]:
    """Steps until a short prompt starts, for whose image the encoder cache has no room at first.

    A batch prompt of 13 blocks stands inside its own image. Behind the short prompt, which has 6
    blocks, wait one with text only, of 10 blocks, and one whose image would have room.
    """
    engine = engine_with_images(TARGETS["normal"], num_blocks)
    engine.add("batch", range(1000, 1200), LATE, 1, images=[range(70, 150)])
    for _ in range(2):
        engine.step()
    engine.add("image", range(3000, 3090), URGENT, 1, images=[range(80)])
    engine.add("later image", range(5000, 5200), URGENT, 1, images=[range(10)])
    engine.add("text", range(4000, 4150), URGENT, 1)
    steps: list[dict[str, int]] = []
    while not any("image" in step for step in steps) and len(steps) < 100:
        steps.append(engine.step())
    return steps


def engine_with_images(targets: StepTargets, num_blocks: int = 60) -> Engine:
    """An engine that holds the embeddings of 100 image tokens."""
    engine = Engine(num_blocks, asynchronous=False, targets=targets)
    hold_image_tokens(engine, 100)
    return engine


def images_in_two_lanes() -> dict[str, Any]:
    """A batch prompt stands inside its image; the next prompts get to images without room."""
    engine = engine_with_images(TARGETS["normal"])
    engine.add("batch", range(1000, 1200), LATE, 1, images=[range(70, 150)])
    before = [engine.step() for _ in range(2)]
    engine.add("running", range(2000, 2150), URGENT, 1, images=[range(30, 110)])
    engine.add("waiting", range(3000, 3150), URGENT, 1, images=[range(80)])
    steps = []
    while engine.scheduler.has_unfinished_requests() and len(steps) < 200:
        steps.append(engine.step())
    return {"before": before, "steps": steps, "ended": engine.ended}


def image_behind_a_chunk() -> list[dict[str, Any]]:
    """Each step of a prompt beside an older one, which gets a tenth of the step.

    Returns:
        Computed tokens of the prompt, and image tokens in the encoder cache, after each step. The
        first 116 tokens are text, and the next 6 are an image.
    """
    engine = engine_with_images(TARGETS["normal"])
    engine.add("older", range(1000, 1240), URGENT, 1)
    engine.step()
    engine.add("images", range(2000, 2130), URGENT, 1, images=[range(116, 122)])
    prompt = engine.scheduler.requests["images"]
    # Steps without a model take no time, so waiting would count for too much.
    prompt.arrival_time = engine.scheduler.requests["older"].arrival_time + 1e-6
    steps = []
    while not engine.ended.get("images"):
        engine.step()
        num_cached = 100 - engine.scheduler.encoder_cache_manager.num_free_slots
        steps.append({"computed": prompt.num_computed_tokens, "cached": num_cached})
    return steps


def short_beside_long() -> dict[str, Any]:
    """A short prompt comes while a long one is computed beside a stream."""
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    engine.add("stream", range(5), URGENT, 100)
    engine.step()
    engine.add("long", range(1000, 1240), URGENT, 1)
    steps = [engine.step()]
    engine.add("short", range(2000, 2010), URGENT, 1)
    # Steps without a model take no time, so waiting would count for too much.
    requests = engine.scheduler.requests
    requests["short"].arrival_time = requests["long"].arrival_time
    while "long" in requests:
        steps.append(engine.step())
    return {"steps": steps}


def long_prompts(targets: StepTargets | None, **limits: Any) -> list[dict[str, int]]:
    """The steps of eight prompts, of which vLLM computes 16 tokens while there are others."""
    engine = Engine(
        130,
        asynchronous=False,
        targets=targets,
        max_num_batched_tokens=128,
        **limits,
    )
    for number in range(8):
        engine.add(f"p{number}", range(1000 * number, 1000 * number + 240), URGENT, 1)
    steps = []
    while engine.scheduler.has_unfinished_requests():
        steps.append(engine.step())
    return steps


def late_beside_in_time() -> dict[str, Any]:
    """A short prompt that is overdue waits beside a long one that can be in time."""
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    engine.add("stream", range(5), URGENT, 100)
    engine.step()
    now = time.time()
    engine.add("long", range(1000, 1240), URGENT, 1, encode(due_at=now + 600))
    engine.add("overdue", range(2000, 2010), URGENT, 1, encode(due_at=now - 1))
    steps = []
    while "overdue" in engine.scheduler.requests:
        steps.append(engine.step())
    return {"steps": steps}


def prompt_without_an_adapter_slot() -> list[dict[str, int]]:
    """Each step of a prompt whose adapter must wait for a stream with another one to end."""
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    engine.add("stream", range(5), URGENT, 4, adapter=1)
    engine.step()
    engine.add("waits", range(1000, 1040), URGENT, 1, adapter=2)
    engine.add("behind", range(2000, 2050), URGENT, 1, adapter=1)
    engine.add("no adapter", range(3000, 3050), URGENT, 1)
    steps = []
    while engine.scheduler.has_unfinished_requests() and len(steps) < 50:
        steps.append(engine.step())
    return steps


def after_the_warm_up() -> dict[str, Any]:
    """A prompt that would fit into one step follows the warm-up."""
    engine = Engine(
        60, asynchronous=False, targets=TARGETS["normal"], max_num_batched_tokens=BLOCK * 16
    )
    engine.add("warm-up#1", range(100), URGENT, 2)
    warm_up = engine.step()
    engine.run()
    engine.add("first", range(1000, 1240), URGENT, 1)
    return {"warm_up": warm_up, "first": engine.step()}


def compiled_grammar() -> dict[str, Any]:
    """A prompt waits for its grammar, which is compiled after the first step."""
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    engine.add("stream", range(5), URGENT, 100)
    engine.add("json", range(1000, 1010), URGENT, 1)
    prompt = engine.scheduler.requests["json"]
    prompt.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    prompt.structured_output_request = SimpleNamespace(grammar=None)
    steps = [engine.step()]
    prompt.structured_output_request.grammar = "compiled"
    steps.append(engine.schedule())
    # There is no model whose tokens a grammar could take.
    prompt.structured_output_request = None
    engine.take_output()
    return {"steps": steps}


def compiled_grammar_behind_another_prompt() -> dict[str, Any]:
    """A long prompt has its grammar, and gets no token while a shorter one is computed."""
    engine = Engine(
        60, asynchronous=False, targets=TARGETS["floor"], max_num_batched_tokens=BLOCK * 4
    )
    requests = engine.scheduler.requests
    engine.add("stream", range(5), URGENT, 200)
    engine.step()
    engine.add("short", range(1000, 1100), URGENT, 1)
    for name, first in (("json", 2000), ("not compiled", 5000)):
        engine.add(name, range(first, first + 240), URGENT, 1)
        requests[name].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        requests[name].structured_output_request = SimpleNamespace(grammar=None)
    engine.step()
    requests["json"].structured_output_request.grammar = "compiled"
    steps = []
    while "short" in requests:
        steps.append(engine.step())
    return {"steps": steps}


def recurrent_states() -> dict[str, Any]:
    """Chunks of a long prompt beside streams when vLLM keeps states at the ends of blocks.

    With tiny targets, a step has more tokens than a block, and the prompt gets less than a block.
    """
    found = {}
    for name, targets in TARGETS.items():
        engine = Engine(100, asynchronous=False, targets=targets, max_num_batched_tokens=BLOCK * 8)
        scheduler = engine.scheduler
        scheduler.need_mamba_block_aligned_split = True
        for number in range(20):
            engine.add(f"stream{number}", range(number, number + 5), URGENT, 200)
        while not all(engine.reported.values()):
            engine.step()
        engine.add("long", range(1000, 1240), URGENT, 1)
        ends = [0]
        for _ in range(60):
            if ends[-1] < 240:
                ends.append(ends[-1] + engine.step().get("long", 0))
        found[name] = ends
    return found


def wide_block() -> dict[str, int]:
    """Chunks of a prompt of 3,000 tokens, by its computed tokens; a state's block has 544."""
    scheduler = Engine(60, asynchronous=False, targets=TARGETS["normal"]).scheduler
    scheduler.cache_config.block_size = 544
    scheduler.max_num_scheduled_tokens = 600
    prompt = Request("long", list(range(3000)), SamplingParams(max_tokens=1), None)
    found = {}
    for num_computed in (0, 300, 544):
        prompt.num_computed_tokens = num_computed
        found[str(num_computed)] = scheduler._mamba_block_aligned_split(prompt, 280)
    assert scheduler.max_num_scheduled_tokens == 600
    return found


def preempted_stream() -> dict[str, Any]:
    """A stream is preempted long after its first token was due; a long prompt can be in time."""
    engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
    now = time.time()
    engine.add("other", range(5), URGENT, 100)
    engine.add("stream", range(500, 540), URGENT, 100, encode(due_at=now - 1))
    while len(engine.reported["stream"]) < 3:
        engine.step()
    scheduler = engine.scheduler
    stream = scheduler.requests["stream"]
    scheduler.running.remove(stream)
    scheduler._preempt_request(stream, time.monotonic())
    engine.add("long", range(1000, 1240), URGENT, 1, encode(due_at=now + 600))
    num_before, steps = len(engine.reported["stream"]), []
    while len(engine.reported["stream"]) == num_before:
        steps.append(engine.step())
    return {"steps": steps}


def own_itl_target() -> dict[str, Any]:
    """First step of a long prompt beside a stream, without and with an ITL target of its own."""
    found = {}
    for name, transfer in (("none", None), ("tiny", encode(itl_s=1e-6))):
        engine = Engine(60, asynchronous=False, targets=TARGETS["normal"])
        engine.add("stream", range(5), URGENT, 100, transfer)
        engine.step()
        engine.add("long", range(1000, 1240), URGENT, 1)
        found[name] = engine.step()["long"]
    return found


def counted_outputs() -> list[int]:
    """Output tokens of a stream, as counted for each of three steps; each next one has drafts.

    The first step has ended when the third one is made; the second one is still under way.
    """
    engine = Engine(
        60, asynchronous=True, targets=TARGETS["normal"], speculative_config=SPECULATION
    )
    planner = engine.scheduler.planner
    engine.add("stream", range(5), URGENT, 100)
    engine.schedule()
    with mock.patch.object(planner, "pace", wraps=planner.pace) as pace:
        engine.schedule()
        engine.take_output()
        engine.schedule()
    return [call.args[1] for call in pace.call_args_list]


def another_vllm() -> dict[str, Any]:
    """Starts a vLLM that lacks two names."""
    scheduling = SimpleNamespace(
        scheduler_cls=None, enable_chunked_prefill=True, async_scheduling=True
    )
    config = SimpleNamespace(scheduler_config=scheduling)
    lacks = {Scheduler: ("running", "gone"), Request: ("also_gone",)}
    with (
        mock.patch.object(vllm, "__version__", "9.9"),
        mock.patch.object(vllm_scheduler_class, "_ATTRIBUTES", lacks),
    ):
        try:
            use_scheduler(config, PRIOR, "")
        except EngineDead as error:
            message = str(error)
    return {"error": message, "scheduler": scheduling.scheduler_cls}


def whole_prompts() -> dict[str, Any]:
    """Each prompt is computed in a single step, as for latent attention on CPUs."""
    engine = Engine(
        60,
        asynchronous=False,
        targets=TARGETS["floor"],
        enable_chunked_prefill=False,
        max_num_batched_tokens=256,
    )
    engine.add("long", range(1000, 1240), URGENT, 1)
    return {"steps": [engine.step()]}


def main(num_seeds: int) -> dict[str, Any]:
    """Returns the results of all runs."""
    vllm_connector.EnginePort = Port  # type: ignore[misc,assignment]
    init_none_hash(sha256)
    return {
        "compared": compared(num_seeds),
        "compared with drafts": compared(
            max(1, num_seeds // 3),
            # The model of this engine does not know which drafts a step under way assumes.
            (False,),
            speculative_config=SPECULATION,
        ),
        "compared with a threshold": compared(
            max(1, num_seeds // 3), long_prefill_token_threshold=BLOCK
        ),
        "compared with images": compared(max(1, num_seeds // 2), have_images=True),
        "compared with adapters": compared(max(1, num_seeds // 2), num_adapters=4),
        **scenarios(),
    }


def scenarios() -> dict[str, Any]:
    """Returns the results of all other scenarios.

    The engines have no model. The times of their steps depend on the load of the machine alone, so
    they must not change the latency model.
    """
    with mock.patch.object(LatencyFit, "observe"):
        return {
            "another vLLM": another_vllm(),
            "whole prompts": whole_prompts(),
            "short beside long": short_beside_long(),
            "long prompts": {
                how: [
                    long_prompts(targets, **limits)
                    for targets in (None, StepTargets(None, math.inf, 3600.0))
                ]
                for how, limits in (
                    ("fixed", {"long_prefill_token_threshold": 16}),
                    # An eighth of a step.
                    (
                        "adaptive",
                        {
                            "long_prefill_token_threshold": 4,
                            "long_prefill_token_threshold_adaptive": True,
                        },
                    ),
                )
            },
            "late beside in time": late_beside_in_time(),
            "prompt without an adapter slot": prompt_without_an_adapter_slot(),
            "after the warm-up": after_the_warm_up(),
            "compiled grammar": compiled_grammar(),
            "compiled grammar behind another prompt": compiled_grammar_behind_another_prompt(),
            "recurrent states": recurrent_states(),
            "wide block": wide_block(),
            "preempted stream": preempted_stream(),
            "counted outputs": counted_outputs(),
            "own ITL target": own_itl_target(),
            "handoffs at the floor": handoffs_at_the_floor(),
            "handoff under way": handoff_under_way(),
            "handoff beside a prompt": handoff_beside_a_prompt(),
            "handoff in a full cache": [
                handoff_in_a_full_cache(targets) for targets in (None, TARGETS["normal"])
            ],
            "beside requests without blocks": {
                case: [
                    beside_requests_without_blocks(case, targets)
                    for targets in (None, TARGETS["normal"])
                ]
                for case in ("handoff", "cached", "host")
            },
            "prompt beside a loaded one": prompt_beside_a_loaded_one(),
            "images in two lanes": images_in_two_lanes(),
            "image behind a chunk": image_behind_a_chunk(),
            "beside a preemption": beside_a_preemption(),
            "loaded in the last place": loaded_in_the_last_place(),
            "loaded without a place": loaded_without_a_place(),
            "adapters read": {str(number): adapters_read(number) for number in (0, 10, 40)},
            "failed grammar": {
                "no adapter slot": failed_grammar(),
                "no place": failed_grammar(max_num_seqs=1),
            },
            "prompts behind an image": {
                str(num_blocks): prompts_behind_an_image(num_blocks) for num_blocks in (60, 21)
            },
        }


if __name__ == "__main__":
    print(main(int(sys.argv[1])))
