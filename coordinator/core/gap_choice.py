"""Chooses the longest gap between tokens in an elastic cell whose operator has not set it.

The longest gap is a multiple of the ITL target: 1.2 by default, and 3 with long gaps
(runtime/steps/step_budget.py). With long gaps, a step may compute more prompt tokens than the
streams have saved time for; the streams borrow that time, and later steps are shorter to make up
for it. More prompts are then in time on workers whose decode steps take most of the ITL target, and
in cells where nearly every worker has streams.

A stream must live long enough to make up for the borrowed time, and prompts must be short, so that
it does not have to borrow again too soon. In simulations, a choice by the momentary load was worse
than either gap, because each change leaves streams that have borrowed time. The conditions below
therefore use values that change slowly, and must hold for some time.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.runtime.steps.step_budget import FAST_SHARE

# Largest cell that gets long gaps, in workers. In simulations with the Azure conversation trace,
# cells of 4 to 6 workers gained little and cells of 8 workers lost.
_MAX_WORKERS = 3


class _Limit(NamedTuple):
    """A limit with hysteresis, because the means of recent requests vary.

    Attributes:
        enter: The limit while gaps have the default length.
        stay: The limit while gaps are long.
    """

    enter: float
    stay: float

    def of(self, *, is_long: bool) -> float:
        """The limit that applies now."""
        return self.stay if is_long else self.enter


# Smallest mean output in tokens. With 60 and 90, streams ended before they had made up for the
# borrowed time.
_MIN_OUTPUT = _Limit(enter=150.0, stay=130.0)
# Longest prompt computation in ITL targets (`Workload.prompt_itls`). With 13, streams did not make
# up for the borrowed time.
_MAX_PROMPT = _Limit(enter=5.0, stay=5.5)
# Shortest decode step of one stream in ITL targets. With shorter steps, prompts are fast enough
# without long gaps.
_MIN_STEP = _Limit(enter=0.4, stay=0.37)
# The same if a step with one stream takes most of the ITL target. Prompts then get hardly any time
# without long gaps, so that streams need not make up for all the borrowed time.
_MAX_PROMPT_IF_TIGHT = _Limit(enter=10.0, stay=11.0)
# Decode step of one stream in ITL targets from which it takes most of the target.
_TIGHT_STEP = _Limit(enter=FAST_SHARE, stay=FAST_SHARE - 0.05)
# Number of ended outputs from which their mean length is used. The outputs that end first are the
# shortest.
LEAST_OUTPUTS = 32
# How long all conditions must hold before gaps become long, in seconds. Because of this wait, a
# worker that restarts in a larger cell changes nothing. Gaps become short as soon as a condition no
# longer holds, because unsuitable long gaps cost more than unsuitable short ones. If a step with
# one stream takes most of the ITL target, short gaps leave nearly no time for prompts, and each
# second adds to the queue: gaps then become long at once, however long the outputs are.
_HOLD_S = 60.0


class Workload(NamedTuple):
    """The load that the choice depends on, in addition to the number of workers.

    Attributes:
        output_tokens: Mean length of recent interactive outputs; None: fewer than LEAST_OUTPUTS
            have ended.
        prompt_itls: Time to compute a recent interactive prompt without other work, as a multiple
            of the ITL target. The mean is weighted by that time, because a stream is more likely to
            wait for a long prompt than for a short one.
        step_itls: Time of the fastest worker's decode step with one stream, as a multiple of the
            ITL target.
    """

    output_tokens: float | None
    prompt_itls: float
    step_itls: float


class GapChoice:
    """Chooses between gaps of the default length and long gaps, and remembers the choice.

    Attributes:
        is_long: Whether gaps are long now.
        reason: Reason of the choice, for people.
    """

    def __init__(self) -> None:
        self.is_long, self.reason = False, "no worker has attached yet"
        # Time since which all conditions for long gaps hold; None: one does not hold.
        self._since: float | None = None

    def update(self, num_workers: int, workload: Workload | None, now: float) -> None:
        """Chooses again.

        Args:
            num_workers: Number of attached workers.
            workload: The present load; None: no interactive prompt has been placed yet, or there
                is no ITL target.
            now: Time by the core's clock.
        """
        if objection := self._objection(num_workers, workload):
            self.is_long, self.reason, self._since = False, objection, None
            return
        assert workload is not None
        self._since = now if self._since is None else self._since
        if self._is_tight(workload):
            self.is_long = True
            self.reason = f"few workers, and decode steps take {workload.step_itls:.2f} ITL targets"
            return
        self.is_long = self.is_long or now - self._since >= _HOLD_S
        self.reason = "few workers, long outputs and short prompts"
        if not self.is_long:
            self.reason += f", but not yet for {_HOLD_S:.0f} s"

    def _is_tight(self, workload: Workload) -> bool:
        """Whether a step with one stream takes most of the ITL target."""
        return workload.step_itls > _TIGHT_STEP.of(is_long=self.is_long)

    def _objection(self, num_workers: int, workload: Workload | None) -> str:
        """Returns the condition for long gaps that does not hold, in words; empty: all hold."""
        if num_workers > _MAX_WORKERS:
            return f"{num_workers} workers; long gaps are for at most {_MAX_WORKERS}"
        if workload is None:
            return "no interactive prompt yet, or no ITL target"
        is_tight = self._is_tight(workload)
        if not is_tight:
            if workload.output_tokens is None:
                return f"fewer than {LEAST_OUTPUTS} outputs have ended"
            if workload.output_tokens < (least := _MIN_OUTPUT.of(is_long=self.is_long)):
                return f"outputs of {workload.output_tokens:.0f} tokens; long gaps need {least:g}"
        most_itls = _MAX_PROMPT_IF_TIGHT if is_tight else _MAX_PROMPT
        if workload.prompt_itls > (most := most_itls.of(is_long=self.is_long)):
            took = f"prompts take {workload.prompt_itls:.1f} ITL targets"
            return f"{took}; long gaps are for at most {most:g}"
        if workload.step_itls < (least := _MIN_STEP.of(is_long=self.is_long)):
            took = f"decode steps take {workload.step_itls:.2f} ITL targets"
            return f"{took}; long gaps need {least:g}"
        return ""
