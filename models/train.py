"""Trains the demo model: `python -m baton.models.train`.

A small Llama is overfitted on purpose to models/glossary.toml: it gives the glossary's answers word
for word and knows nothing else. Seeds, order and number of threads are fixed, so one machine with
one version of torch makes the same weights each time; other machines differ in the last bits.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from baton.models.corpus import Corpus, load
from baton.models.files import (
    ASSISTANT,
    BOS,
    CONFIG,
    DIRECTORY,
    EOS,
    USER,
    make_tokenizer,
    write_files,
    write_json,
)

_SEED = 20261122
_NUM_STEPS = 1200
_NUM_WARMUP_STEPS = 40
_BATCH_SIZE = 32
_LEARNING_RATE = 2e-3
# Share of questions in chat form; the others are plain text, as `baton generate` sends them.
_CHAT_SHARE = 0.6
# Factor on the logits: sampling at temperature 1 then acts like 1/4. A power of two does not round.
_SHARPNESS = 4.0
_NUM_CHECKED_STEPS = 2
# Allowed difference of losses between machines, which add floating-point numbers in another order.
_LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer as token ids, end of sequence included."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Mismatch(Exception):
    """A file in the repository differs from the result of this script."""


def example(tokenizer: Tokenizer, question: str, answer: str, *, chat: bool) -> Example:
    prompt = f"{BOS}{USER}{question}{ASSISTANT}" if chat else question
    return Example(tuple(tokenizer.encode(prompt).ids), tuple(tokenizer.encode(answer + EOS).ids))


def answer_losses(
    model: LlamaForCausalLM, examples: Sequence[Example]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the answers' tokens and, per token, whether it is the most likely one.

    Shorter examples are padded at the end, where the padding does not affect any counted token.
    """
    width = max(len(one.prompt) + len(one.answer) for one in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    targets = torch.full((len(examples), width), -1)
    for row, one in enumerate(examples):
        first, end = len(one.prompt), len(one.prompt) + len(one.answer)
        tokens[row, :end] = torch.tensor(one.prompt + one.answer)
        targets[row, first - 1 : end - 1] = torch.tensor(one.answer)
    counts = targets >= 0
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[counts])
    loss = functional.cross_entropy(logits.float(), targets[counts])
    return loss, logits.argmax(-1) == targets[counts]


def new_model() -> LlamaForCausalLM:
    """A model in float32 with random weights from torch's current seed."""
    left_out = ("architectures", "model_type", "torch_dtype")
    return LlamaForCausalLM(
        LlamaConfig(**{key: value for key, value in CONFIG.items() if key not in left_out})
    )


def answered(model: LlamaForCausalLM, examples: Sequence[Example]) -> list[bool]:
    """Whether greedy decoding gives each answer: every token is the most likely next one."""
    right: list[bool] = []
    with torch.inference_mode():
        for first in range(0, len(examples), _BATCH_SIZE):
            batch = examples[first : first + _BATCH_SIZE]
            _, hits = answer_losses(model, batch)
            parts = torch.split(hits, [len(one.answer) for one in batch])
            right += [bool(part.all()) for part in parts]
    return right


def train(
    corpus: Corpus, tokenizer: Tokenizer, num_steps: int, *, of_steps: int = _NUM_STEPS
) -> tuple[LlamaForCausalLM, list[float]]:
    """Trains for the first `num_steps` of `of_steps`; returns the model and the loss per step."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(_SEED)
    model = new_model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        _LEARNING_RATE,
        total_steps=of_steps,
        pct_start=_NUM_WARMUP_STEPS / of_steps,
        cycle_momentum=False,
    )
    batches = _batches(corpus, tokenizer)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(num_steps):
        loss, hits = answer_losses(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 24:
            print(
                f"step {step + 1}/{num_steps}: loss {losses[-1]:.4f}, tokens right "
                f"{hits.float().mean():.1%}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return model.eval(), losses


def _batches(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Batches without end; examples of similar length are in one batch."""
    rng = random.Random(_SEED)
    while True:
        epoch = [
            example(tokenizer, question, answer, chat=rng.random() < _CHAT_SHARE)
            for question, answer in corpus.epoch(rng)
        ]
        epoch.sort(key=lambda one: len(one.prompt) + len(one.answer))
        batches = [epoch[i : i + _BATCH_SIZE] for i in range(0, len(epoch), _BATCH_SIZE)]
        rng.shuffle(batches)
        yield from batches


def save(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes the weights in bfloat16 with sharpened logits; the output layer is the embedding."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors["model.norm.weight"] *= _SHARPNESS
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def read(directory: Path = DIRECTORY, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Loads the model of a directory with plain transformers."""
    model = new_model()
    missing, unknown = model.load_state_dict(
        load_file(str(directory / "model.safetensors")), strict=False
    )
    if set(missing) - {"lm_head.weight"} or unknown:
        raise Mismatch(f"{directory}: tensors missing: {missing}; unknown: {unknown}")
    model.tie_weights()
    return model.to(dtype).eval()


def check(directory: Path = DIRECTORY) -> None:
    """Makes the cheap files again and compares them; runs the first training steps twice.

    Raises:
        Mismatch: A file or a loss of the first steps differs.
    """
    corpus = load()
    tokenizer = make_tokenizer(corpus)
    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch), tokenizer)
        for made in sorted(Path(scratch).iterdir()):
            if (directory / made.name).read_bytes() != made.read_bytes():
                raise Mismatch(
                    f"{directory / made.name} differs from what the glossary and this script make"
                )
    recorded = json.loads((directory / "training.json").read_text(encoding="utf-8"))["first_losses"]
    first = train(corpus, tokenizer, _NUM_CHECKED_STEPS)[1]
    second = train(corpus, tokenizer, _NUM_CHECKED_STEPS)[1]
    if first != second:
        raise Mismatch(f"training is not deterministic: losses {first}, then {second}")
    if any(abs(a - b) > _LOSS_TOLERANCE for a, b in zip(first, recorded, strict=True)):
        raise Mismatch(f"the first losses are {first}; the stored model's are {recorded}")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--output", type=Path, default=DIRECTORY, metavar="DIR")
    parser.add_argument("--steps", type=int, default=_NUM_STEPS)
    parser.add_argument(
        "--check",
        action="store_true",
        help="Compare the files and run the first training steps twice; write nothing.",
    )
    arguments = parser.parse_args()
    if arguments.check:
        try:
            check(arguments.output)
        except Mismatch as error:
            sys.exit(f"check: {error}")
        print("check: equal files and equal first steps")
        return
    corpus = load()
    tokenizer = make_tokenizer(corpus)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_files(arguments.output, tokenizer)
    model, losses = train(corpus, tokenizer, arguments.steps, of_steps=arguments.steps)
    save(model, arguments.output)
    right = answered(
        read(arguments.output),
        [
            example(tokenizer, entry.question, entry.answer, chat=chat)
            for entry in corpus.entries
            for chat in (True, False)
        ],
    )
    write_json(
        arguments.output / "training.json",
        {
            "steps": arguments.steps,
            "first_losses": losses[:_NUM_CHECKED_STEPS],
            "last_loss": losses[-1],
            "answered": sum(right),
            "asked": len(right),
            "torch": torch.__version__,
        },
    )
    print(f"{sum(right)} of {len(right)} questions answered word for word")


if __name__ == "__main__":
    _main()
