"""A run's figures: for programs, and for people."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.load.gap_histogram import GapHistogram
from baton.load.generator import Outcome
from baton.load.measured import Measured, Slo
from baton.load.results import PERCENTS, plain, targets

# A generator that was later than this, and than so much of TTFT, has measured itself too.
_LATE_MS, _LATE_SHARE = 10.0, 0.1


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one lane or all; times in milliseconds, percentiles within 0.5 %.

    Attributes:
        num_failed: refused, failed later, or not sent.
        num_shed: of these, refused for overload.
        num_unfinished: when the run was interrupted; they count neither as ended nor as failed.
        ttft_ms, e2e_ms: from when requests were to be sent, so that a late generator or a stalled
            cluster hides nothing; `_from_send` from when they were.
        lateness_ms: between the two.
        attained: share of all requests that ended well, with a TTFT within its target and a mean
            gap between tokens (TPOT) within that of ITL.
        itl_within: share of all gaps within the target of ITL.
        cached_share: of prompt tokens, that came from prefix caches.
        num_resumed: times that requests went on at another session.
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
    """A whole run.

    Attributes:
        kind: "bench" or "replay".
        load: what was asked for, by option.
        lanes: by name, where there was more than one.
        is_open: whether requests had times at which they were due.
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
            total=Figures.of(Measured.of_all(lanes.values(), slo), outcome.lasted_s),
            is_open=is_open,
            lanes=each if len(each) > 1 else {},
        )

    def as_json(self) -> dict[str, Any]:
        """The fields that `baton simulate` has too are of the same names there."""
        return {
            "kind": self.kind,
            "load": self.load,
            "targets": targets(self.slo.ttft_s, self.slo.itl_s),
            "lasted_s": round(self.lasted_s, 3),
            "interrupted": self.interrupted,
            **plain(asdict(self.total)),
            "lanes": {name: plain(asdict(one)) for name, one in self.lanes.items()},
        }

    def latency_rows(self) -> list[list[str]]:
        """Rows of a table with a column per percentile."""
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
            [f"{name}, ms", *(_shown(values[percent]) for percent in PERCENTS)]
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
        limits = targets(self.slo.ttft_s, self.slo.itl_s)
        within = ", ".join(
            f"{name} {limit:g} ms"
            for name, limit in (("TTFT", limits["ttft_ms"]), ("mean ITL", limits["itl_ms"]))
            if limit is not None
        )
        goodput = f"{one.goodput_per_s:.2f} requests/s, {one.attained:.1%}"
        rows.append(["goodput", f"{goodput}{f' within {within}' if within else ''}"])
        rows += [
            [f"goodput, {name}", f"{lane.goodput_per_s:.2f} requests/s, {lane.attained:.1%}"]
            for name, lane in self.lanes.items()
        ]
        if one.num_resumed:
            rows.append(["resumed", f"{one.num_resumed} times"])
        return rows

    def failure_rows(self) -> list[list[str]]:
        """What failed, why, how often, and the first message of each reason."""
        one = self.total
        return [
            [kind, reason, str(count), one.messages.get(reason, "")]
            for kind, counts in (("shed", one.sheds), ("error", one.failures))
            for reason, count in counts.items()
        ]

    @property
    def warning(self) -> str | None:
        """That the generator could not keep its schedule, if so."""
        late_ms, ttft_ms = self.total.lateness_ms[99], self.total.ttft_ms[50]
        if not self.is_open or not late_ms > _LATE_MS or late_ms < _LATE_SHARE * ttft_ms:
            return None
        return (
            f"this generator was {late_ms:.0f} ms late at p99: what it shows is its own delay too"
        )


def _ms(tally: GapHistogram) -> dict[int, float]:
    return {percent: tally.percentile(percent) * 1e3 for percent in PERCENTS}


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
