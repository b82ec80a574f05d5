"""Rows and graphs of the Grafana dashboards, with their PromQL; generate.py writes the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        title: Title above the graph.
        unit: Grafana's identifier of the unit, such as "s" or "reqps".
        queries: Legend and PromQL expression of each line. generate.py replaces CELL by the label
            matcher of the selected cell.
        about: Description that Grafana shows when the pointer is on the title.
    """

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of graphs under one heading."""

    title: str
    panels: Sequence[Panel]


def _quantiles(metric: str, labels: str, by: str = "") -> list[tuple[str, str]]:
    return [
        (
            f"p{percent}" + (f" {{{{{by}}}}}" if by else ""),
            f"histogram_quantile({percent / 100:g}, sum by (le{', ' + by if by else ''}) "
            f"(rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
        )
        for percent in (50, 95, 99)
    ]


def _rate(metric: str, by: str, labels: str = "CELL") -> list[tuple[str, str]]:
    legend = " ".join(f"{{{{{one}}}}}" for one in by.split(", "))
    return [(legend, f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))")]


def _target(signal: str, legend: str = "target") -> tuple[str, str]:
    return (
        legend,
        f'max(baton_target_seconds{{CELL, lane="interactive", signal="{signal}"}})',
    )


def _each(metric: str, legend: str = "{{role}} {{instance}}", more: str = "") -> tuple[str, str]:
    return (legend, f"{metric}{{CELL{more}}}")


INTERACTIVE = 'CELL, lane="interactive"'
CELL_ROWS = (
    Row(
        "Interactive latency",
        (
            Panel(
                "Time to first token",
                "s",
                [
                    *_quantiles("gen_ai_server_time_to_first_token_seconds", INTERACTIVE),
                    _target("ttft"),
                ],
                "Time from the arrival of a request at the coordinator to its first token. The "
                "line is the target of an empty prompt.",
            ),
            Panel(
                "Time to first token / target",
                "none",
                _quantiles("baton_ttft_target_ratio", INTERACTIVE),
                "Time to first token divided by the request's own target; above 1 it was missed.",
            ),
            Panel(
                "Gaps between tokens",
                "s",
                [
                    *_quantiles("baton_inter_token_latency_seconds", INTERACTIVE),
                    _target("itl", "target of the mean"),
                    _target("gap", "target of one gap"),
                ],
                "Time between two outputs of a stream (ITL). The lines are the target of a "
                "request's mean, and that of a single gap, which the coordinator of few workers "
                "may choose (`baton targets` says why).",
            ),
            Panel(
                "Gaps between tokens / target",
                "none",
                _quantiles("baton_gap_target_ratio", INTERACTIVE),
                "Gaps divided by the target of a single gap. A line above 1 means that more gaps "
                "than its percentile allows are too long.",
            ),
            Panel(
                "Request duration",
                "s",
                _quantiles("gen_ai_server_request_duration_seconds", INTERACTIVE),
            ),
        ),
    ),
    Row(
        "Queues and requests",
        (
            Panel(
                "Waiting requests",
                "short",
                [
                    ("{{lane}}", "sum by (lane) (baton_queue_depth{CELL})"),
                    ("limit {{lane}}", "max by (lane) (baton_queue_limit{CELL})"),
                ],
                "Requests in the coordinator's lanes. Above the limit, new requests are refused.",
            ),
            Panel(
                "Wait in the lane",
                "s",
                _quantiles("baton_request_queue_seconds", "CELL", "lane"),
                "Time until a request is dispatched to workers.",
            ),
            Panel(
                "Running requests",
                "short",
                [("{{lane}}", "sum by (lane) (baton_requests_running{CELL})")],
            ),
            Panel("Requests that ended", "reqps", _rate("baton_requests_total", "lane, outcome")),
            Panel(
                "Refused for overload",
                "reqps",
                _rate("baton_sheds_total", "reason"),
                "Each refusal tells the client when to retry.",
            ),
            Panel("Tokens", "cps", _rate("baton_tokens_total", "kind"), "Tokens per second."),
            Panel(
                "Prompt tokens by source",
                "cps",
                _rate("baton_prompt_tokens_total", "source"),
                "device: from prefix caches; host: from host memory; fetched: from another worker.",
            ),
        ),
    ),
    Row(
        "Pools",
        (
            *(
                Panel(
                    f"{pool.capitalize()} workers",
                    "short",
                    [
                        ("{{state}}", f'sum by (state) (baton_workers{{CELL, pool="{pool}"}})'),
                        ("desired", f'sum(baton_workers_desired{{CELL, pool="{pool}"}})'),
                        ("ceiling", f'sum(baton_workers_max{{CELL, pool="{pool}"}})'),
                        (
                            "lacking GPUs",
                            f'sum(baton_workers_lacking_gpus{{CELL, pool="{pool}"}})',
                        ),
                    ],
                    "lacking GPUs: workers that scaling.max_gpus has no room for.",
                )
                for pool in ("prefill", "decode")
            ),
            Panel(
                "Cold starts in 15 minutes",
                "short",
                [("{{pool}}", "sum by (pool) (increase(baton_cold_starts_total{CELL}[15m]))")],
            ),
            Panel(
                "Lost workers and recovered requests",
                "cpm",
                [
                    (name, f"60 * sum(rate({metric}{{CELL}}[$__rate_interval]))")
                    for name, metric in (
                        ("workers lost", "baton_workers_lost_total"),
                        ("workers unresponsive", "baton_workers_unresponsive_total"),
                        ("attempts recovered", "baton_recoveries_total"),
                        ("requests adopted", "baton_adopted_total"),
                        ("batch parked", "baton_parked_total"),
                    )
                ],
                "Events per minute.",
            ),
            Panel("Invalid submissions", "reqps", _rate("baton_rejections_total", "reason")),
        ),
    ),
    Row(
        "HTTP",
        (
            Panel("Requests by code", "reqps", _rate("baton_http_requests_total", "route, code")),
            Panel(
                "Time to first token, as HTTP clients see it",
                "s",
                _quantiles("baton_http_time_to_first_token_seconds", INTERACTIVE, "route"),
            ),
            Panel(
                "Connections",
                "short",
                [
                    ("open", "sum(baton_http_connections{CELL})"),
                    ("generations", "sum(baton_http_requests_running{CELL})"),
                    ("batches", "sum(baton_http_batches_open{CELL})"),
                ],
            ),
            Panel("Lines of batches", "reqps", _rate("baton_http_batch_lines_total", "outcome")),
        ),
    ),
)
HANDOFF_ROWS = (
    Row(
        "The whole cell",
        (
            Panel(
                "Handoff time after the prefill",
                "s",
                _quantiles("baton_handoff_exposed_seconds", "CELL"),
                "Time from the last computed layer until the receiver has verified the commit.",
            ),
            Panel("Handoffs committed", "ops", _rate("baton_handoffs_total", "transport")),
            Panel(
                "Bytes of committed handoffs",
                "Bps",
                _rate("baton_handoff_bytes_total", "transport"),
            ),
            Panel(
                "Handoffs that failed before they were loaded",
                "ops",
                _rate("baton_handoff_failures_total", "reason"),
                "The decode worker computes the prompts of these handoffs again.",
            ),
            Panel(
                "Transports that failed",
                "ops",
                _rate("baton_worker_handoff_fallbacks_total", "transport"),
                "The next transport in the list takes over.",
            ),
            Panel(
                "Refused opens, frames and commits",
                "ops",
                _rate("baton_worker_handoff_refusals_total", "reason"),
            ),
            Panel(
                "Measured speed of KV blocks",
                "Bps",
                [
                    (
                        "slowest {{source}}",
                        "min by (source) (baton_kv_speed_bytes_per_second{CELL})",
                    ),
                    (
                        "median {{source}}",
                        "quantile by (source) (0.5, baton_kv_speed_bytes_per_second{CELL})",
                    ),
                ],
                "host, disk: loads from a worker's own host memory and disk; worker: handoffs and "
                "fetches between two workers. Prompts are placed by these speeds.",
            ),
        ),
    ),
    Row(
        "Workers",
        (
            Panel(
                "Bytes transferred",
                "Bps",
                _rate("baton_worker_handoff_bytes_total", "instance, direction, transport"),
            ),
            Panel(
                "Staging in use",
                "percentunit",
                [
                    (
                        "{{instance}} {{direction}}",
                        "baton_worker_staging_used_bytes{CELL} "
                        "/ baton_worker_staging_size_bytes{CELL}",
                    )
                ],
            ),
            Panel(
                "Handoffs waiting for staging memory",
                "short",
                [_each("baton_worker_staging_waiting_handoffs", "{{instance}} {{direction}}")],
            ),
            Panel(
                "Handoffs that ended",
                "ops",
                _rate("baton_worker_handoffs_total", "direction, outcome, transport"),
            ),
            Panel(
                "Prompt tokens loaded",
                "cps",
                _rate("baton_worker_handoff_prompt_tokens_total", "instance"),
            ),
            Panel(
                "Leases that expired",
                "ops",
                _rate("baton_worker_handoff_lease_expiries_total", "instance"),
            ),
        ),
    ),
)
WORKER_ROWS = (
    Row(
        "Engines",
        (
            Panel("Running requests", "short", [_each("baton_worker_requests_running")]),
            Panel(
                "Requests in the engine's queue", "short", [_each("baton_worker_requests_waiting")]
            ),
            Panel(
                "Prompt tokens to compute", "short", [_each("baton_worker_prefill_tokens_waiting")]
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                [_each("baton_worker_kv_cache_usage_ratio")],
                "A full KV cache is normal on prefill workers: it keeps old prefixes.",
            ),
            Panel("Steps", "ops", _rate("baton_worker_engine_steps_total", "role, instance")),
            Panel(
                "Tokens reported",
                "cps",
                _rate("baton_worker_generation_tokens_total", "role, instance"),
            ),
            Panel(
                "Attempts that ended", "ops", _rate("baton_worker_requests_total", "role, outcome")
            ),
        ),
    ),
    Row(
        "GPUs",
        (
            Panel(
                "Utilisation",
                "percentunit",
                [_each("baton_worker_gpu_utilization_ratio", "{{instance}} {{gpu}}")],
                "Share of time in which a kernel ran. A single request can show 100 %.",
            ),
            Panel(
                "Memory in use",
                "bytes",
                [
                    _each("baton_worker_gpu_memory_used_bytes", "{{instance}} {{gpu}}"),
                    ("size", "max(baton_worker_gpu_memory_size_bytes{CELL})"),
                ],
            ),
            Panel("Power", "watt", [_each("baton_worker_gpu_power_watts", "{{instance}} {{gpu}}")]),
        ),
    ),
)
DASHBOARDS = {
    "cell": ("Baton: cell", CELL_ROWS),
    "handoff": ("Baton: handoffs", HANDOFF_ROWS),
    "workers": ("Baton: workers and GPUs", WORKER_ROWS),
}
