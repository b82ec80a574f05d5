"""The figures of a `baton bench` or `replay` run, as JSON and as table rows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.load.duration_histogram import DurationHistogram
from baton.load.generator import Outcome
from baton.load.measured import Measured, Slo
from baton.load.results import PERCENTS, limits, number, plain, targets

# A warning is printed if the p99 delay of the generator itself exceeds both limits: milliseconds,
# and a share of the median TTFT. Above them the measured latency includes the generator's delay.
_LATE_MS, _LATE_SHARE = 10.0, 0.1


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one lane or of all lanes.

    Times are in milliseconds, by percentile, exact to 0.5 %.

    Attributes:
        num_failed: Requests that were refused, failed later, or were not sent.
        num_shed: Failed requests that the cluster refused because of overload.
        num_unfinished: Requests in flight when the run was interrupted. They count neither as
            ended nor as failed.
        ttft_ms, e2e_ms: Time from the planned send time. A late generator or a stalled cluster
            therefore cannot hide a wait (coordinated omission).
        ttft_from_send_ms, e2e_from_send_ms: Time from the actual send time.
        lateness_ms: Actual minus planned send time.
        attained: Share of all requests that ended well, with TTFT within its target and the mean
            gap between tokens (TPOT) within the ITL target.
        itl_within: Share of all gaps that are within the ITL target.
        cached_share: Share of the prompt tokens that came from prefix caches.
        num_resumed: How often a request was resumed on another session.
    """

    num_requests: int
    num_ended: int
    num_failed: int
    num_shed: int
    num_unfinished: int
    ttft_ms: dict[int, float]
    itl_ms: dict[int, float]
    tpot_ms: dict[int, float]
    e2e_ms: dict[int, float]
    ttft_from_send_ms: dict[int, float]
    e2e_from_send_ms: dict[int, float]
    lateness_ms: dict[int, float]
    attained: float
    ttft_within: float
    tpot_within: float
    itl_within: float
    goodput_per_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float
    num_resumed: int
    sheds: dict[str, int]
    failures: dict[str, int]
    messages: dict[str, str]

    @classmethod
    def of(cls, seen: Measured, lasted_s: float) -> Figures:
        """Computes the figures of a run that lasted `lasted_s` seconds."""
        total = max(1, seen.num_requests - seen.num_unfinished)
        per_s = 1 / lasted_s if lasted_s > 0 else 0.0
        most_itl_s = math.inf if seen.slo.itl_s is None else seen.slo.itl_s
        return cls(
            num_requests=seen.num_requests,
            num_ended=seen.num_ended,
            num_failed=sum(seen.sheds.values()) + sum(seen.failures.values()),
            num_shed=sum(seen.sheds.values()),
            num_unfinished=seen.num_unfinished,
            ttft_ms=_ms(seen.ttft),
            itl_ms=_ms(seen.itl),
            tpot_ms=_ms(seen.tpot),
            e2e_ms=_ms(seen.e2e),
            ttft_from_send_ms=_ms(seen.ttft_from_send),
            e2e_from_send_ms=_ms(seen.e2e_from_send),
            lateness_ms=_ms(seen.lateness),
            attained=seen.num_attained / total,
            ttft_within=seen.num_ttft_within / total,
            tpot_within=seen.num_tpot_within / total,
            itl_within=seen.itl.share_within(most_itl_s) if math.isfinite(most_itl_s) else 1.0,
            goodput_per_s=seen.num_attained * per_s,
            requests_per_s=seen.num_ended * per_s,
            prompt_tokens_per_s=seen.num_prompt_tokens * per_s,
            output_tokens_per_s=seen.num_output_tokens * per_s,
            cached_share=seen.num_cached_tokens / max(1, seen.num_prompt_tokens),
            num_resumed=seen.num_resumed,
            sheds=dict(seen.sheds.most_common()),
            failures=dict(seen.failures.most_common()),
            messages=seen.messages,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a whole run.

    Attributes:
        kind: "bench" or "replay".
        load: Values of the command's options, by option name.
        lanes: Figures by lane; empty if all requests were in the same lane.
        is_open: Whether requests had planned send times (open loop).
    """

    kind: str
    load: dict[str, Any]
    slo: Slo
    lasted_s: float
    interrupted: bool
    total: Figures
    is_open: bool
    lanes: dict[str, Figures] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kind: str, load: dict[str, Any], slo: Slo, outcome: Outcome, *, is_open: bool
    ) -> Result:
        lanes = outcome.lanes
        each: dict[str, Figures] = {
            name: Figures.of(one, outcome.lasted_s) for name, one in sorted(lanes.items())
        }
        return cls(
            kind=kind,
            load=load,
            slo=slo,
            lasted_s=outcome.lasted_s,
            interrupted=outcome.interrupted,
            total=Figures.of(Measured.merged(lanes.values(), slo), outcome.lasted_s),
            is_open=is_open,
            lanes=each if len(each) > 1 else {},
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the result as JSON; figures shared with `baton simulate` have the same keys."""
        return {
            "kind": self.kind,
            "load": plain(self.load),
            "targets": targets(self.slo.ttft, self.slo.itl_s),
            "lasted_s": round(self.lasted_s, 3),
            "interrupted": self.interrupted,
            **plain(asdict(self.total)),
            "lanes": {name: plain(asdict(one)) for name, one in self.lanes.items()},
        }

    def latency_rows(self) -> list[list[str]]:
        """Returns table rows with one column per percentile."""
        rows = [
            ("TTFT", self.total.ttft_ms),
            ("ITL", self.total.itl_ms),
            ("TPOT", self.total.tpot_ms),
            ("E2E", self.total.e2e_ms),
        ]
        for name, one in self.lanes.items():
            rows += [(f"TTFT, {name}", one.ttft_ms), (f"ITL, {name}", one.itl_ms)]
        if self.is_open:
            rows += [
                ("TTFT from send", self.total.ttft_from_send_ms),
                ("E2E from send", self.total.e2e_from_send_ms),
                ("sent late by", self.total.lateness_ms),
            ]
        return [
            [f"{name}, ms", *(number(values[percent], 1) for percent in PERCENTS)]
            for name, values in rows
        ]

    def figure_rows(self) -> list[list[str]]:
        one = self.total
        requests = f"{one.num_requests}, {one.num_failed} failed"
        if one.num_unfinished:
            requests += f", {one.num_unfinished} in flight at the end"
        rows = [
            ["requests", requests],
            ["lasted", f"{self.lasted_s:.1f} s{' (interrupted)' if self.interrupted else ''}"],
            ["throughput", f"{one.requests_per_s:.2f} requests/s"],
            ["prompt tokens", f"{one.prompt_tokens_per_s:.0f}/s, {one.cached_share:.0%} cached"],
            ["output tokens", f"{one.output_tokens_per_s:.0f}/s"],
        ]
        of = limits(self.slo.ttft, self.slo.itl_s)
        limit = ", ".join(f"{name} {limit}" for name, limit in of.items())
        within = f" within {limit}" if limit else "; no target is set (--ttft-ms, --itl-ms)"
        goodput = f"{one.goodput_per_s:.2f} requests/s, {one.attained:.1%}"
        rows.append(["goodput", f"{goodput}{within}"])
        rows += [
            [f"goodput, {name}", f"{lane.goodput_per_s:.2f} requests/s, {lane.attained:.1%}"]
            for name, lane in self.lanes.items()
        ]
        if one.num_resumed:
            rows.append(["resumed", f"{one.num_resumed} times"])
        return rows

    def failure_rows(self) -> list[list[str]]:
        """Returns one row per failure reason: kind, reason, count, first error message."""
        one = self.total
        return [
            [kind, reason, str(count), one.messages.get(reason, "")]
            for kind, counts in (("shed", one.sheds), ("error", one.failures))
            for reason, count in counts.items()
        ]

    @property
    def warning(self) -> str | None:
        """A warning if the generator could not keep its schedule, else None."""
        late_ms, ttft_ms = self.total.lateness_ms[99], self.total.ttft_ms[50]
        if not self.is_open or not late_ms > _LATE_MS or late_ms < _LATE_SHARE * ttft_ms:
            return None
        return (
            f"the load generator was {late_ms:.0f} ms late at p99: "
            "the latencies include its own delay"
        )


def _ms(durations: DurationHistogram) -> dict[int, float]:
    return {percent: durations.percentile(percent) * 1e3 for percent in PERCENTS}
