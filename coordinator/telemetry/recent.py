"""Statistics of the last minute: latencies by stage, lane and tenant, and counts of failures.

Time is cut into slices, and the oldest slice is dropped when a new slice begins. Gaps between
tokens are counted per step instead of per token: requests of one lane whose last token came at the
same moment share one observation. Everything else is counted once per request, report or decision.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from baton.coordinator.state.lanes import LANES, Lane
from baton.coordinator.telemetry.sketch import Sketch
from baton.v1 import cluster_pb2, common_pb2

Stage: TypeAlias = "common_pb2.Stage.ValueType"

STAGES: tuple[Stage, ...] = tuple(
    number for number in common_pb2.Stage.values() if number != common_pb2.STAGE_UNSPECIFIED
)
WINDOW_S, NUM_SLICES = 60.0, 12
# Maximum number of tenants per lane and slice; further tenants are counted under the name OTHERS.
MAX_TENANTS, OTHERS = 32, "(others)"
# Longest prompt, in tokens, whose prefill time is negligible.
TINY_PROMPT_TOKENS = 64
# Maximum number of steps counted per load report. In a longer report, evenly chosen steps are
# counted several times each, so that their weights sum to about the number of steps.
_MAX_STEPS = 32
# Sketches of LaneWindow.
_SKETCHES = ("ttft", "itl", "e2e", "served", "tiny", "late", "after_start", "ttft_ratio")
# Stages before the first token in which a request waits for a worker.
_QUEUES = (
    common_pb2.STAGE_QUEUE,
    common_pb2.STAGE_PREFILL_QUEUE,
    common_pb2.STAGE_DECODE_QUEUE,
    common_pb2.STAGE_PARKED,
)


class TenantWindow:
    """Statistics of one tenant in one lane.

    Attributes:
        wait: seconds between submission and dispatch.
        ttft: times to first token.
        num_tokens: prompt and output tokens of the requests that ended.
    """

    __slots__ = ("num_tokens", "ttft", "wait")

    def __init__(self) -> None:
        self.wait, self.ttft, self.num_tokens = Sketch(), Sketch(), 0

    def add(self, other: TenantWindow) -> None:
        self.wait.add(other.wait)
        self.ttft.add(other.ttft)
        self.num_tokens += other.num_tokens


class LaneWindow:
    """Statistics of one lane.

    Attributes:
        served: times to first token minus the waits for workers, as without other load.
        tiny: times to first token of prompts with at most TINY_PROMPT_TOKENS tokens.
        late: times to first token over the request's target.
        ttft_ratio: times to first token divided by the request's own target (not seconds), of the
            requests that have a target.
        late_s: sum of the seconds per stage for the requests in `late`.
        tiny_s: sum of the seconds per stage for the requests in `tiny`.
        stages: durations per stage of ended requests; a request that skipped a stage is not
            counted in it.
        after_start: waits of requests that arrived before their worker had started.
        num_output_tokens: output tokens that workers sent, also of requests that still run.
    """

    __slots__ = (
        "after_start",
        "e2e",
        "itl",
        "late",
        "late_s",
        "num_admitted",
        "num_ended",
        "num_failed",
        "num_output_tokens",
        "served",
        "sheds",
        "stages",
        "tenants",
        "tiny",
        "tiny_s",
        "ttft",
        "ttft_ratio",
    )

    def __init__(self) -> None:
        self.ttft, self.itl, self.e2e = Sketch(), Sketch(), Sketch()
        self.served, self.tiny, self.late = Sketch(), Sketch(), Sketch()
        self.after_start, self.ttft_ratio = Sketch(), Sketch()
        self.late_s: defaultdict[Stage, float] = defaultdict(float)
        self.tiny_s: defaultdict[Stage, float] = defaultdict(float)
        self.stages: dict[Stage, Sketch] = {}
        self.tenants: dict[str, TenantWindow] = {}
        self.sheds: Counter[str] = Counter()
        self.num_admitted = self.num_ended = self.num_failed = self.num_output_tokens = 0

    def tenant(self, name: str) -> TenantWindow:
        found = self.tenants.get(name)
        if found is None:
            name = name if len(self.tenants) < MAX_TENANTS else OTHERS
            found = self.tenants.setdefault(name, TenantWindow())
        return found

    def first_token(
        self,
        tenant: str,
        num_prompt_tokens: int,
        ttft_s: float,
        target_s: float | None,
        stages: Iterable[tuple[Stage, float]],
    ) -> None:
        """Records the first token of a request.

        Args:
            tenant: tenant of the request.
            num_prompt_tokens: tokens of the prompt.
            ttft_s: seconds from the request's arrival to the first token.
            target_s: the request's target; None: no target.
            stages: seconds per stage; they sum to ttft_s.
        """
        self.ttft.observe(ttft_s)
        self.tenant(tenant).ttft.observe(ttft_s)
        late = tiny = False
        if target_s is not None:
            late = ttft_s > target_s
            self.ttft_ratio.observe(ttft_s / target_s)
        if num_prompt_tokens <= TINY_PROMPT_TOKENS:
            self.tiny.observe(ttft_s)
            tiny = True
        if late:
            self.late.observe(ttft_s)
        queued_s = 0.0
        for stage, lasted_s in stages:
            if stage in _QUEUES:
                queued_s += lasted_s
            if late:
                self.late_s[stage] += lasted_s
            if tiny:
                self.tiny_s[stage] += lasted_s
        self.served.observe(ttft_s - queued_s)

    def all_stages(self) -> dict[Stage, Sketch]:
        """Durations per stage over all ended requests; a skipped stage counts as 0 seconds."""
        found = dict[Stage, Sketch]()
        for stage in sorted({*STAGES, *self.stages}) if self.num_ended else ():
            sketch = found[stage] = Sketch()
            if stage in self.stages:
                sketch.add(self.stages[stage])
            if sketch.num < self.num_ended:
                sketch.observe(0.0, self.num_ended - sketch.num)
        return found

    def add(self, other: LaneWindow) -> None:
        for name in _SKETCHES:
            getattr(self, name).add(getattr(other, name))
        self.sheds.update(other.sheds)
        for ours, theirs in ((self.late_s, other.late_s), (self.tiny_s, other.tiny_s)):
            for stage, lasted_s in theirs.items():
                ours[stage] += lasted_s
        for stage, sketch in other.stages.items():
            self.stages.setdefault(stage, Sketch()).add(sketch)
        for name, tenant in other.tenants.items():
            self.tenant(name).add(tenant)
        self.num_admitted += other.num_admitted
        self.num_ended += other.num_ended
        self.num_failed += other.num_failed
        self.num_output_tokens += other.num_output_tokens


class Window:
    """Statistics of the whole cell.

    Attributes:
        steps: durations of steps without prompts on workers that decode; a step counts once per
            decoding request.
        mixed_steps: the same for steps that also computed prompts.
        batch: number of decoding requests per decode step (a count, not seconds).
        exposed: seconds that committed handoffs delayed their requests.
        counts: "handoff_fallbacks", "handoff_failures", "recoveries", "parked", "workers_lost",
            "workers_unresponsive".
        prompt_tokens: tokens of computed prompts by source, as in CoreStats.
    """

    __slots__ = ("batch", "counts", "exposed", "lanes", "mixed_steps", "prompt_tokens", "steps")

    def __init__(self) -> None:
        self.lanes = {lane: LaneWindow() for lane in LANES}
        self.steps, self.mixed_steps, self.batch = Sketch(), Sketch(), Sketch()
        self.exposed = Sketch()
        self.counts: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()

    def add(self, other: Window) -> None:
        for lane, window in other.lanes.items():
            self.lanes[lane].add(window)
        for name in ("steps", "mixed_steps", "batch", "exposed"):
            getattr(self, name).add(getattr(other, name))
        self.counts.update(other.counts)
        self.prompt_tokens.update(other.prompt_tokens)

    def decode_steps(self, steps: Sequence[cluster_pb2.StepSample]) -> None:
        """Records the steps of one load report of a worker that decodes."""
        stride = -(-len(steps) // _MAX_STEPS) or 1
        for step in steps[::stride]:
            num_decodes = step.num_decodes
            if num_decodes:
                sketch = self.mixed_steps if step.num_prefill_tokens else self.steps
                sketch.observe(step.duration_us / 1e6, num_decodes * stride)
                self.batch.observe(num_decodes, stride)


class Recent:
    """Statistics of the last WINDOW_S seconds, with the resolution of one slice."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Window]] = deque()
        self._number = -1
        self._latest = Window()
        # Sum of all slices except the latest; recomputed when a new slice begins.
        self._closed: Window | None = None

    def at(self, now: float) -> Window:
        """Returns the slice of this time, or the latest slice if this time is before it."""
        number = int(now * (NUM_SLICES / WINDOW_S))
        if number > self._number:
            self._number, self._latest, self._closed = number, Window(), None
            self._slices.append((number, self._latest))
            self._drop_expired(number)
        return self._latest

    def window(self, now: float) -> Window:
        """The sum of all slices."""
        latest = self.at(now)
        if self._closed is None:
            self._closed = Window()
            for _, window in self._slices:
                if window is not latest:
                    self._closed.add(window)
        found = Window()
        found.add(self._closed)
        found.add(latest)
        return found

    def lane(self, lane: Lane, now: float) -> tuple[Sketch, Sketch]:
        """Times to first token and gaps between tokens of a lane, over all slices."""
        self.at(now)
        ttft, itl = Sketch(), Sketch()
        for _, window in self._slices:
            ttft.add(window.lanes[lane].ttft)
            itl.add(window.lanes[lane].itl)
        return ttft, itl

    def _drop_expired(self, number: int) -> None:
        while self._slices[0][0] <= number - NUM_SLICES:
            self._slices.popleft()
