"""An open-loop load: short and long prompts mixed, with Poisson arrivals."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.bench.streams import Prompt, Timed
from baton.load import stats

# Token IDs of the demo tokenizer without special tokens.
TOKEN_IDS = range(5, 430)
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must meet to count: TTFT, and the mean of its gaps."""

    ttft_s: float = 1.0
    itl_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two kinds of requests."""

    name: str
    prompt_tokens: int
    output_tokens: int


SHORT, LONG = Kind("short", 64, 64), Kind("long", 1500, 8)


@dataclass(frozen=True, slots=True)
class Mix:
    """Which share of the requests is of which kind."""

    short: Kind = SHORT
    long: Kind = LONG
    long_share: float = 0.25


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request; `at_s` is its send time in seconds from the start of the run."""

    at_s: float
    kind: Kind
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request; `timed` is None if the request was refused or timed out."""

    arrival: Arrival
    timed: Timed | None

    def met(self, slo: Slo) -> bool:
        timed = self.timed
        if timed is None or len(timed.times_s) < self.arrival.kind.output_tokens:
            return False
        gaps = timed.gaps_s
        return timed.ttft_s <= slo.ttft_s and sum(gaps) / len(gaps) <= slo.itl_s


# Sends one request. Returns None if the request was refused or timed out; raises errors that make
# the run invalid.
Send: TypeAlias = Callable[[Arrival], Awaitable[Timed | None]]


def arrivals(
    seed: str, rate: float, count: int, mix: Mix = Mix(), *, shift: int = 0
) -> list[Arrival]:
    """Returns Poisson arrivals. Another rate gives the same requests with scaled times.

    Args:
        seed: Seed of times, kinds and prompts.
        rate: Requests/s.
        count: Number of requests.
        mix: Kinds of the requests.
        shift: Another number gives other tokens, and the same times and kinds.
    """
    source, at, made = random.Random(seed), 0.0, []
    tokens = [*TOKEN_IDS[shift:], *TOKEN_IDS[:shift]]
    for _ in range(count):
        at += source.expovariate(1.0)
        kind = mix.long if source.random() < mix.long_share else mix.short
        prompt = source.choices(tokens, k=kind.prompt_tokens)
        made.append(Arrival(at / rate, kind, prompt))
    return made


async def open_loop(send: Send, load: Sequence[Arrival]) -> list[Answer]:
    """Sends every request at its time; returns the answers in the order of the arrivals."""
    began = time.perf_counter()

    async def answer(arrival: Arrival) -> Answer:
        await asyncio.sleep(began + arrival.at_s - time.perf_counter())
        return Answer(arrival, await send(arrival))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(arrival)) for arrival in load]
    return [task.result() for task in tasks]


def share_met(answers: Sequence[Answer], slo: Slo) -> float:
    """Returns the share of all arrivals that met the SLO."""
    return sum(one.met(slo) for one in answers) / len(answers)


def share_shed(answers: Sequence[Answer]) -> float:
    """Returns the share of all arrivals that got no answer: refused, or timed out."""
    return sum(one.timed is None for one in answers) / len(answers)


def summary(answers: Sequence[Answer], slo: Slo) -> dict[str, float]:
    """Returns latencies in ms, shares of all arrivals, and goodput in requests/s.

    A request without an answer counts as an infinite TTFT, because a system that refuses requests
    which would be late must not look faster by it. ITL and E2E are those of the answers.
    """
    timed = [one.timed for one in answers if one.timed is not None]
    gaps = [gap for one in timed for gap in one.gaps_s]
    share = share_met(answers, slo)
    span_s = answers[-1].arrival.at_s
    made = {
        "goodput_per_s": share * len(answers) / span_s,
        "met_share": share,
        "shed_share": share_shed(answers),
        **{f"itl_p{at}_ms": stats.percentile(gaps, at) * 1e3 for at in PERCENTILES},
        **_ttfts("ttft", answers),
    }
    for kind in (SHORT, LONG):
        of_kind = [one for one in answers if one.arrival.kind.name == kind.name]
        made[f"{kind.name}_met_share"] = share_met(of_kind, slo) if of_kind else math.nan
        made[f"{kind.name}_shed_share"] = share_shed(of_kind) if of_kind else math.nan
        made |= _ttfts(f"{kind.name}_ttft", of_kind)
    made |= {
        f"e2e_p{at}_ms": stats.percentile([one.e2e_s for one in timed], at) * 1e3 for at in (50, 99)
    }
    return made


def _ttfts(name: str, answers: Sequence[Answer]) -> dict[str, float]:
    values = [math.inf if one.timed is None else one.timed.ttft_s for one in answers]
    return {f"{name}_p{at}_ms": stats.percentile(values, at) * 1e3 for at in PERCENTILES}


def stages(answers: Sequence[Answer]) -> Iterator[tuple[str, str, list[float]]]:
    """Yields the latency budget of Baton's requests: kind, stage, and ms of each request."""
    for kind in (SHORT, LONG):
        found: dict[str, list[float]] = {}
        for one in answers:
            if one.arrival.kind.name != kind.name or one.timed is None or one.timed.budget is None:
                continue
            for stage in dict.fromkeys(entry.stage for entry in one.timed.budget.stages):
                found.setdefault(stage, []).append(one.timed.stage_s(stage) * 1e3)
        for stage, values in found.items():
            yield kind.name, stage, values
