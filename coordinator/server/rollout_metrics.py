"""A rollout as Prometheus metrics; the label is "stable" or "canary", so that series stay few."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from baton.coordinator.core.core import Core
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.enum_names import lane_name

_QUANTILES = (0.5, 0.95, 0.99)


def rollout_metrics(core: Core) -> Iterator[Metric]:
    """Yields the metrics of the running rollout, or only the share if none runs.

    The scraping thread calls it.
    """
    share = GaugeMetricFamily(
        "baton_rollout_share", "Share of new sessions that the canary gets, 0 to 1."
    )
    share.add_metric([], core.rollouts.traffic.share)
    yield share
    workers = GaugeMetricFamily(
        "baton_rollout_workers",
        "Serving workers of each revision.",
        labels=["revision"],
    )
    requests = CounterMetricFamily(
        "baton_rollout_requests",
        "Requests that ended or failed, recovered attempts, and requests that moved to the stable "
        "revision, since the comparison began.",
        labels=["revision", "outcome"],
    )
    latencies = {
        name: GaugeMetricFamily(
            f"baton_rollout_{name}_seconds", what, labels=["revision", "lane", "quantile"]
        )
        for name, what in (
            ("ttft", "Time to first token since the comparison began."),
            ("itl", "Inter-token latency since the comparison began."),
        )
    }
    rollout = core.rollouts.rollout
    fleets = {} if rollout is None else {"stable": rollout.stable, "canary": rollout.canary}
    for label, fleet in fleets.items():
        workers.add_metric([label], sum(one.serving for one in fleet.workers))
        stats = rollout.stats.get(fleet) if rollout is not None else None
        if stats is None:
            continue
        for outcome, count in (
            ("ended", stats.num_ended),
            ("failed", sum(tuple(stats.errors.values()))),
            ("recovered", stats.num_recoveries),
            ("given_up", stats.num_moved),
        ):
            requests.add_metric([label, outcome], count)
        for lane, latency in stats.lanes.items():
            for one, family in latencies.items():
                for quantile, value_s in _quantiles(getattr(latency, one)):
                    family.add_metric([label, lane_name(lane), f"{quantile:g}"], value_s)
    yield workers
    yield requests
    yield from latencies.values()


def _quantiles(sketch: Sketch) -> Iterator[tuple[float, float]]:
    """Yields quantiles of a copy: the core may add samples meanwhile."""
    copy = Sketch()
    copy.counts, copy.max_s = dict(sketch.counts), sketch.max_s
    copy.num = sum(copy.counts.values())
    if copy.num:
        yield from zip(_QUANTILES, copy.percentiles_s(100 * one for one in _QUANTILES), strict=True)
