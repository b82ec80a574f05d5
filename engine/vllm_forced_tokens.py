"""The logits processor that replays known tokens through vLLM's sampler.

A request continued elsewhere must be in the state an undisturbed run would be in: its seeded
generator has drawn once per token, its penalties and its grammar have seen every token. So the
prompt alone is submitted, and each known token is the only one possible at its position.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

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


class ForcedTokens(LogitsProcessor):
    """Makes the first len(known) tokens of a request the known ones.

    vLLM shares each request's list of output tokens by reference (BatchUpdate), so its length is
    the position of the token that the next step samples.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(EXTRA_ARG, [])
        if not isinstance(forced, list) or not all(isinstance(token, int) for token in forced):
            raise VLLMValidationError(f"{EXTRA_ARG} must be a list of token ids")

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
                if forced := (params.extra_args or {}).get(EXTRA_ARG):
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
            logits[index] = float("-inf")
            logits[index, forced[len(output)]] = 0.0
        return logits
