"""The logits processors that replay known tokens through vLLM's samplers, one per model runner.

A request continued elsewhere must be in the state an undisturbed run would be in: its seeded
generator has drawn once per token, its penalties and its grammar have seen every token. So the
prompt alone is submitted, and each known token is the only one possible at its position.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import interface as v2

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Key of SamplingParams.extra_args: the output tokens that exist already, from the first.
EXTRA_ARG = "baton_forced_tokens"


class _RewindableGenerator(torch.Generator):
    """A CPU generator that can take back what the present step drew.

    vLLM does that to every seeded request whose prompt it computed only in part, by moving the
    generator's offset (v1/worker/gpu_model_runner.py, "Rewind the generator state"). CPU generators
    have none: without this, a seeded prompt of two chunks ends the engine. It takes the place of
    torch.Generator in ranks on CPUs, and nowhere else; vLLM has no seam for it.
    """

    live: ClassVar[weakref.WeakSet[_RewindableGenerator]] = weakref.WeakSet()
    before_step: torch.Tensor

    def __new__(cls, device: torch.device | str = "cpu") -> _RewindableGenerator:
        made: _RewindableGenerator = super().__new__(cls, device=device)
        made.before_step = made.get_state()
        cls.live.add(made)
        return made

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self.before_step)


def use_forced_tokens(config: VllmConfig) -> None:
    """Has the engine replay known tokens, in the form that its model runner takes.

    Speculation drafts past them, and is not replayed.
    """
    if config.speculative_config is None:
        form = ForcedTokensV2 if config.use_v2_model_runner else ForcedTokens
        model = config.model_config
        own = f"{form.__module__}:{form.__name__}"
        model.logits_processors = [*(model.logits_processors or []), own]


def _known_tokens(sampling_params: SamplingParams) -> Any:
    return (sampling_params.extra_args or {}).get(EXTRA_ARG, [])


def _validate(sampling_params: SamplingParams) -> None:
    forced = _known_tokens(sampling_params)
    if not isinstance(forced, list) or not all(isinstance(token, int) for token in forced):
        raise VLLMValidationError(f"{EXTRA_ARG} must be a list of token ids")


def _force(logits: torch.Tensor, row: int, token: int) -> None:
    logits[row] = float("-inf")
    logits[row, token] = 0.0


class ForcedTokens(LogitsProcessor):
    """Makes the first len(known) tokens of a request the known ones.

    vLLM shares each request's list of output tokens by reference (BatchUpdate), so its length is
    the position of the token that the next step samples.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rewinds = device.type == "cpu"
        if self._rewinds:
            torch.Generator = _RewindableGenerator
        # Batch index -> (known tokens, the request's output tokens so far, vLLM's own list).
        self._requests: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self._rewinds:
            for generator in _RewindableGenerator.live:
                generator.before_step = generator.get_state()
        if batch_update is not None:
            for index in batch_update.removed:
                self._requests.pop(index, None)
            for index, params, _, output in batch_update.added:
                self._requests.pop(index, None)
                if forced := _known_tokens(params):
                    self._requests[index] = (forced, output)
            for source, target, direction in batch_update.moved:
                moved, replaced = (self._requests.pop(i, None) for i in (source, target))
                if moved is not None:
                    self._requests[target] = moved
                if replaced is not None and direction == MoveDirectionality.SWAP:
                    self._requests[source] = replaced
        done = [
            index
            for index, (forced, output) in self._requests.items()
            if len(output) >= len(forced)
        ]
        for index in done:
            del self._requests[index]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (forced, output) in self._requests.items():
            _force(logits, index, forced[len(output)])
        return logits


class ForcedTokensV2(v2.LogitsProcessor):
    """The same for vLLM's second model runner, its default on GPUs.

    That one names requests by slots, and says of each step how many tokens come before the one that
    it samples. Its generators are functions of seed and position, its penalties and grammars read
    the tokens: whatever is replayed leaves them as an undisturbed run would.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def __init__(self, vllm_config: VllmConfig, req_states: v2.LogitsProcRequestState) -> None:
        # On the host: nothing here waits for the GPU.
        self._prompt_len = req_states.prompt_len.np
        # Known tokens by slot.
        self._forced: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._forced.pop(req_idx, None)
        if forced := _known_tokens(sampling_params):
            self._forced[req_idx] = forced
        return bool(forced)

    def apply(self, logits: torch.Tensor, ctx: v2.LogitsContext) -> torch.Tensor:
        if self._forced:
            # Without speculation the n-th row is the n-th request's, and its length exact.
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                forced = self._forced.get(slot, ())
                at = int(ctx.seq_lens_upper_bound_np[row] - self._prompt_len[slot])
                # Less than 0: a chunk in the middle of a prompt, whose sample is thrown away.
                if 0 <= at < len(forced):
                    _force(logits, row, forced[at])
        return logits
