"""Latency models of real hardware, from what others measured."""

from __future__ import annotations

import csv
from pathlib import Path

from baton.runtime.config import LatencyConfig
from baton.runtime.latency import LatencyModel
from baton.runtime.latency_fit import LatencyFit
from baton.v1 import cluster_pb2


def splitwise(path: Path, model: str, hardware: str, tensor_parallel: int) -> LatencyModel:
    """The production fit over Splitwise's measured prompt and token times.

    A batch of prompts is one step, and every token of their outputs another.

    Raises:
        ValueError: the file has no such measurements.
    """
    fit, found = LatencyFit(LatencyModel.from_config(LatencyConfig())), False
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name = row["model"], row["hardware"], int(float(row["tensor_parallel"]))
        if name != (model, hardware, tensor_parallel):
            continue
        found = True
        prompt, batch, output = (
            int(float(row[key])) for key in ("prompt_size", "batch_size", "token_size")
        )
        fit.observe(
            cluster_pb2.StepSample(
                num_prefill_tokens=batch * prompt,
                prefill_token_squares=batch * prompt * prompt,
                duration_us=round(float(row["prompt_time"]) * 1e3),
            )
        )
        fit.observe(
            cluster_pb2.StepSample(
                num_decodes=batch,
                num_kv_tokens=batch * (prompt + output // 2),
                duration_us=round(float(row["token_time"]) * 1e3),
            )
        )
    if not found:
        raise ValueError(f"{path}: no rows of {model} on {hardware}, {tensor_parallel} ranks")
    return fit.model
