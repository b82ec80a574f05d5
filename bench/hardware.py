"""Latency models of real hardware, from published measurements."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.runtime.config import LatencyConfig
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.latency_fit import LatencyFit
from baton.v1 import cluster_pb2


def splitwise(
    path: Path, model: str, hardware: str, tensor_parallel: int, attention_share: float
) -> LatencyModel:
    """Returns a latency model fitted to Splitwise's measured prompt and token times.

    A batch of prompts is one step, and every token of their outputs is another step. The measured
    prompts have at most 8,192 tokens, which is too short to fit the cost of attention. The cost of
    attention is therefore derived from its share of the floating-point operations.

    Args:
        path: Path of perf_model.csv.
        model, hardware, tensor_parallel: Select the rows.
        attention_share: layers * hidden size / parameters: operations of attention per token
            and token of context, divided by those of the weights per token.

    Raises:
        ValueError: the file has no such measurements.
    """
    fit = LatencyFit(LatencyModel.from_config(LatencyConfig()))
    prompts: list[tuple[float, float]] = []
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name = row["model"], row["hardware"], int(float(row["tensor_parallel"]))
        if name != (model, hardware, tensor_parallel):
            continue
        prompt, batch, output = (
            int(float(row[key])) for key in ("prompt_size", "batch_size", "token_size")
        )
        work = batch * (prompt + attention_share * prompt * prompt)
        prompts.append((work, float(row["prompt_time"]) / 1e3))
        fit.observe(
            cluster_pb2.StepSample(
                num_decodes=batch,
                num_kv_tokens=batch * (prompt + output // 2),
                duration_us=round(float(row["token_time"]) * 1e3),
            )
        )
    if not prompts:
        raise ValueError(f"{path}: no rows of {model} on {hardware}, {tensor_parallel} ranks")
    base_s, per_token_s = _line(prompts)
    return replace(
        fit.model,
        prefill_base_s=base_s,
        prefill_per_token_s=per_token_s,
        prefill_per_token_squared_s=per_token_s * attention_share,
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns intercept and slope of the line with the least squares of relative errors."""
    weights = [1 / (y * y) for _, y in points]
    total = math.fsum(weights)
    x_mean = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    both = math.fsum(
        w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True)
    )
    spread = math.fsum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = both / spread
    return y_mean - slope * x_mean, slope
