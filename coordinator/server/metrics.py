"""The core's counters as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from baton.coordinator.core.core import Core
from baton.coordinator.scaling.launches import STABLE_S
from baton.coordinator.server.rollout_metrics import rollout_metrics
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.runtime.config import BatonConfig
from baton.runtime.enum_names import lane_name
from baton.runtime.telemetry.histogram import Histogram
from baton.v1 import cluster_pb2

# Histograms of LaneStats: attribute, metric name, help text.
_LANE_HISTOGRAMS = (
    ("ttft", "gen_ai_server_time_to_first_token_seconds", "Time to first token, from arrival."),
    (
        "ttft_ratio",
        "baton_ttft_target_ratio",
        "Time to first token divided by the request's own target; requests without a "
        "target are left out.",
    ),
    (
        "tpot",
        "gen_ai_server_time_per_output_token_seconds",
        "Mean gap between a request's tokens (TPOT).",
    ),
    ("e2e", "gen_ai_server_request_duration_seconds", "Whole request, from arrival."),
    ("itl", "baton_inter_token_latency_seconds", "Gaps between consecutive outputs of a stream."),
    (
        "gap_ratio",
        "baton_gap_target_ratio",
        "Gaps between consecutive outputs of a stream divided by the lane's target of a single "
        "gap; gaps of a lane without a target are left out.",
    ),
    ("queue", "baton_request_queue_seconds", "Wait in the lane until dispatched."),
)


class CoreCollector(Collector):
    """Reads the core's counters from the scraping thread, so it must not change anything.

    Args:
        core: The core.
        config: Configuration; its limits are exported as metrics too.
    """

    def __init__(self, core: Core, config: BatonConfig) -> None:
        self._core, self._config = core, config

    def collect(self) -> Iterator[Metric]:
        stats = self._core.stats
        for attribute, name, documentation in _LANE_HISTOGRAMS:
            family = HistogramMetricFamily(name, documentation, labels=["lane"])
            for lane, lane_stats in stats.lanes.items():
                _add(family, [lane_name(lane)], getattr(lane_stats, attribute))
            yield family
        queued = GaugeMetricFamily(
            "baton_queue_depth", "Requests that wait in the lane.", labels=["lane"]
        )
        running = GaugeMetricFamily(
            "baton_requests_running", "Requests that workers have.", labels=["lane"]
        )
        waits = GaugeMetricFamily(
            "baton_wait_ratio",
            "Factor that predicted waits for the stable revision are multiplied by: actual waits / "
            "predicted waits.",
            labels=["lane"],
        )
        for lane in stats.lanes:
            queued.add_metric([lane_name(lane)], self._core.num_queued(lane))
            running.add_metric([lane_name(lane)], self._core.num_running(lane))
            waits.add_metric([lane_name(lane)], self._core.wait_correction(lane))
        yield queued
        yield running
        yield waits
        yield from self._totals()
        yield self._workers()
        yield GaugeMetricFamily(
            "baton_elastic",
            "Whether any worker computes prompts and decodes: 1 in an elastic cell, 0 with strict "
            "roles.",
            value=float(self._core.fleets.elastic),
        )
        yield self._kv_speeds()
        yield from self._scaling()
        yield from self._targets_and_limits()
        yield from rollout_metrics(self._core)

    def _totals(self) -> Iterator[Metric]:
        stats = self._core.stats
        requests = CounterMetricFamily(
            "baton_requests",
            "Admitted requests that ended, by finish reason or error.",
            labels=["lane", "outcome"],
        )
        for (lane, outcome), count in tuple(stats.requests.items()):
            requests.add_metric([lane_name(lane), outcome], count)
        yield requests
        tokens = CounterMetricFamily(
            "baton_tokens",
            "Tokens of prompts that got a first token, and of outputs.",
            labels=["kind"],
        )
        tokens.add_metric(["prompt"], stats.num_prompt_tokens)
        tokens.add_metric(["output"], stats.num_output_tokens)
        yield tokens
        prompts = CounterMetricFamily(
            "baton_prompt_tokens",
            "Tokens of computed prompts, for each attempt of a request. device: from a "
            "prefix cache; host: from host memory; disk: from disk; fetched: from another "
            "worker.",
            labels=["source"],
        )
        for source, count in tuple(stats.prompt_tokens.items()):
            prompts.add_metric([source], count)
        yield prompts
        fetches = CounterMetricFamily(
            "baton_prefix_fetches",
            "Prefixes that were fetched from another worker. failed: the prompt was computed.",
            labels=["outcome"],
        )
        for outcome, count in tuple(stats.fetches.items()):
            fetches.add_metric([outcome], count)
        yield fetches
        for name, documentation, counts in (
            (
                "baton_sheds",
                "Requests refused at once, because of a limit or because they would be late.",
                stats.sheds,
            ),
            (
                "baton_rejections",
                "Requests refused at once as invalid, not allowed or unknown, by gRPC code.",
                stats.rejections,
            ),
            (
                "baton_handoff_failures",
                "Handoffs that failed before they were loaded, by reason.",
                stats.handoff_failures,
            ),
        ):
            family = CounterMetricFamily(name, documentation, labels=["reason"])
            for reason, count in tuple(counts.items()):
                family.add_metric([reason], count)
            yield family
        for name, documentation, counts in (
            ("baton_handoffs", "Handoffs committed.", stats.handoffs),
            (
                "baton_handoff_bytes",
                "Bytes of committed handoffs.",
                stats.handoff_bytes,
            ),
        ):
            family = CounterMetricFamily(name, documentation, labels=["transport"])
            for transport, count in tuple(counts.items()):
                family.add_metric([transport], count)
            yield family
        yield CounterMetricFamily(
            "baton_handoff_fallbacks",
            "Times that a handoff's transport failed and the next one took over.",
            value=stats.num_handoff_fallbacks,
        )
        exposed = HistogramMetricFamily(
            "baton_handoff_exposed_seconds",
            "Time from the last computed layer until the receiver verified the commit.",
            labels=[],
        )
        _add(exposed, [], stats.handoff_exposed)
        yield exposed
        for name, documentation, count in (
            ("baton_workers_lost", "Workers that did not leave cleanly.", stats.num_workers_lost),
            (
                "baton_workers_unresponsive",
                "Times that the requests of a silent or stuck worker were moved to other workers.",
                stats.num_workers_unresponsive,
            ),
            (
                "baton_recoveries",
                "Lost attempts whose requests continued on other workers.",
                stats.num_recoveries,
            ),
            (
                "baton_parked",
                "Times that a batch request was parked for interactive requests.",
                stats.num_parked,
            ),
            (
                "baton_moved",
                "Times that a request was moved because its worker changed its role or left, or "
                "because its revision ended.",
                stats.num_moved,
            ),
            (
                "baton_prefixes_gone",
                "Times that a decode worker lacked blocks that it could not compute.",
                stats.num_prefixes_gone,
            ),
            (
                "baton_failed_starts",
                f"Workers that ended before they had been attached for {STABLE_S:g} s.",
                stats.num_failed_starts,
            ),
            (
                "baton_adopted",
                "Requests of a previous coordinator that continued on their workers.",
                stats.num_adopted,
            ),
        ):
            yield CounterMetricFamily(name, documentation, value=count)

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("baton_workers", "Attached workers.", labels=["pool", "state"])
        for pool, role in ROLE_OF.items():
            workers = [worker for worker in self._core.workers if worker.role == role]
            serving = sum(worker.serving for worker in workers)
            draining = sum(worker.state == cluster_pb2.WORKER_STATE_DRAINING for worker in workers)
            family.add_metric([pool.value, "serving"], serving)
            family.add_metric([pool.value, "draining"], draining)
            family.add_metric([pool.value, "other"], len(workers) - serving - draining)
        return family

    def _kv_speeds(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_kv_speed_bytes_per_second",
            "Measured speed at which a worker gets KV blocks. host, disk: loads from its own host "
            "memory and disk; worker: handoffs and fetches from the worker in the label from.",
            labels=["worker", "source", "from"],
        )
        for one in self._core.placers.kv_speeds():
            family.add_metric([one.worker, one.source, one.sender], one.bytes_per_s)
        return family

    def _scaling(self) -> Iterator[Metric]:
        stats, scaler = self._core.stats, self._core.scaler
        desired = GaugeMetricFamily(
            "baton_workers_desired", "Desired number of workers.", labels=["pool"]
        )
        starting = GaugeMetricFamily(
            "baton_workers_starting", "Workers started and not attached yet.", labels=["pool"]
        )
        starts = CounterMetricFamily(
            "baton_cold_starts", "Workers that attached for the first time.", labels=["pool"]
        )
        for pool in Pool:
            # An alert takes 0 for a pool that its load has shrunk, not for a coordinator that ends.
            if not scaler.has_stopped:
                desired.add_metric([pool.value], scaler.desired(pool))
            starting.add_metric([pool.value], scaler.launches.num_starting(pool))
            starts.add_metric([pool.value], stats.cold_starts[pool.value])
        yield desired
        yield starting
        yield starts
        scalings = CounterMetricFamily(
            "baton_scale_decisions",
            "Decisions that change a pool's size, and workers that flip into it.",
            labels=["pool", "direction"],
        )
        for labels, count in tuple(stats.scalings.items()):
            scalings.add_metric(labels, count)
        yield scalings
        family = HistogramMetricFamily(
            "baton_cold_start_seconds",
            "Duration of worker starts by stage; total: from the start order until attached.",
            labels=["stage"],
        )
        for stage, histogram in stats.cold_start_s.items():
            _add(family, [stage], histogram)
        yield family

    def _targets_and_limits(self) -> Iterator[Metric]:
        """Targets and limits, which alerts and dashboards compare with."""
        scaler, lanes = self._core.scaler, self._config.lanes
        targets = GaugeMetricFamily(
            "baton_target_seconds",
            "Latency targets: ttft for an empty prompt, itl for the mean gap between a request's "
            "tokens, gap for a single gap. A lane without a target has no series.",
            labels=["lane", "signal"],
        )
        percentile = GaugeMetricFamily(
            "baton_target_percentile",
            "Percentage of requests and of gaps that must meet the lane's targets.",
            labels=["lane"],
        )
        for lane, target in self._core.targets.by_lane.items():
            percentile.add_metric([lane], target.percentile)
            for signal, target_s in (("ttft", target.ttft_s), ("itl", target.itl_s)):
                if target_s is not None:
                    targets.add_metric([lane, signal], target_s)
        if (longest_gap_s := self._core.longest_gap_s) is not None:
            targets.add_metric(["interactive", "gap"], longest_gap_s)
        yield targets
        yield percentile
        limit = GaugeMetricFamily(
            "baton_queue_limit", "Maximum number of waiting requests.", labels=["lane"]
        )
        limit.add_metric(["interactive"], lanes.interactive.max_queued)
        limit.add_metric(["batch"], lanes.batch.max_queued)
        yield limit
        ceiling = GaugeMetricFamily(
            "baton_workers_max",
            "Maximum number of workers of a pool that is sized by its load. A pool of a fixed "
            "size, as configured or set by hand, has no series.",
            labels=["pool"],
        )
        lacking = GaugeMetricFamily(
            "baton_workers_lacking_gpus",
            "Workers that the pool should get, and that scaling.max_gpus has no room for.",
            labels=["pool"],
        )
        for pool in Pool:
            least, most = scaler.limits(pool)
            if scaler.sizes_itself(pool) and least < most:
                ceiling.add_metric([pool.value], most)
            lacking.add_metric([pool.value], scaler.lacking_gpus(pool))
        yield ceiling
        yield lacking


def registry(core: Core, config: BatonConfig) -> CollectorRegistry:
    """Creates a registry with all metrics of the coordinator."""
    found = CollectorRegistry()
    found.register(CoreCollector(core, config))
    return found


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, histogram.buckets(), sum_value=histogram.total)
