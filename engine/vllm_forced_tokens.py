"""Logits processors that replay known tokens through vLLM's samplers, one per model runner.

A continued request must be in the state of an undisturbed run: its seeded generator has drawn once
per token, and its penalties and grammar have seen every token. So Baton submits the prompt alone
and makes each known token the only possible one at its position.
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

# Key of SamplingParams.extra_args: the known output tokens, from the first.
EXTRA_ARG = "baton_forced_tokens"


class _RewindableGenerator(torch.Generator):
    """A CPU generator that can undo the current step's draws.

    vLLM rewinds the generator of a seeded request whose prompt was computed only in part, by moving
    the generator's offset (v1/worker/gpu_model_runner.py, "Rewind the generator state"). CPU
    generators have no offset: without this class, a seeded prompt of two chunks ends the engine. It
    replaces torch.Generator only in ranks on CPUs; vLLM has no hook for it.
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
    """Configures the engine to replay known tokens, in the form that its model runner needs.

    Speculative decoding drafts past known tokens, so it gets no replay.
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
    """Makes the first len(known) output tokens of a request the known ones.

    vLLM shares each request's list of output tokens by reference (BatchUpdate), so the list's
    length is the position of the next sampled token.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rewinds = device.type == "cpu"
        if self._rewinds:
            torch.Generator = _RewindableGenerator
        # Batch index -> (known tokens, the request's output tokens so far, which is vLLM's own
        # list).
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
    """ForcedTokens for vLLM's second model runner, the default on GPUs.

    This runner addresses requests by slots, and tells for each step how many tokens precede the
    sampled one. Its generators are functions of seed and position, and its penalties and grammars
    read the tokens, so a replay leaves them as an undisturbed run would.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate(sampling_params)

    def __init__(self, vllm_config: VllmConfig, req_states: v2.LogitsProcRequestState) -> None:
        # The tensors are on the host, so this class never waits for the GPU.
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
            # Without speculation row n belongs to request n, and its length is exact.
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                forced = self._forced.get(slot, ())
                at = int(ctx.seq_lens_upper_bound_np[row] - self._prompt_len[slot])
                # A negative position means a chunk in the middle of a prompt, whose sample is
                # discarded.
                if 0 <= at < len(forced):
                    _force(logits, row, forced[at])
        return logits
