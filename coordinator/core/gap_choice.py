"""Chooses the longest gap of an elastic cell whose operator has set none.

With long gaps, streams may owe time (runtime/step_budget.py). This lets prompts be in time where
decode steps leave them little time, and where hardly a worker is without streams. But a stream
must live long enough to catch up, and prompts must be short, so that it does not owe more again and
again. In simulations, a choice by the momentary load was worse than either gap, because each change
leaves streams behind. The conditions here change slowly, and the choice waits.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.runtime.step_budget import FAST_SHARE

# Most workers with long gaps. In simulations with the Azure conversation trace, 4 to 6 workers gain
# little and 8 lose.
_MOST_WORKERS = 3
# For each of the others, the limit from which gaps become long, and the limit to which they stay
# long: the means of recent requests vary. Mean output in tokens; with 60 and 90, streams ended
# before they had caught up.
_LEAST_OUTPUT = {False: 150.0, True: 130.0}
# Time of a prompt in ITL targets, weighted as in `Workload`. With 13, streams did not catch up.
_MOST_PROMPT = {False: 5.0, True: 5.5}
# Decode step of one stream in ITL targets. Beside shorter steps, prompts are fast enough as it is.
_LEAST_STEP = {False: 0.4, True: 0.37}
# Outputs from which the means count. The first outputs that end are the shortest.
LEAST_OUTPUTS = 32
# How long all conditions must hold before gaps become long, in seconds. The end of a condition
# counts at once, because long gaps cost more where they do not belong than the default does. So a
# worker that restarts changes nothing, and gaps change at most twice in this time. If a step with
# one stream takes most of the ITL target, short gaps leave prompts next to no time, and each second
# builds a queue: gaps become long at once then, and before any output has ended.
_HOLD_S = 60.0


class Workload(NamedTuple):
    """The load that the choice depends on, beside the number of workers.

    Attributes:
        output_tokens: Mean length of recent interactive outputs; None: fewer than LEAST_OUTPUTS
            have ended.
        prompt_itls: Time to compute a recent interactive prompt without other work, as a multiple
            of the ITL target. It is the mean over the time that prompts take: a stream that waits
            for a prompt waits for one of this length on average.
        step_itls: Time of the fastest worker's decode step with one stream, likewise.
    """

    output_tokens: float | None
    prompt_itls: float
    step_itls: float

    @property
    def is_tight(self) -> bool:
        """Whether a step with one stream takes most of the ITL target."""
        return self.step_itls > FAST_SHARE


class GapChoice:
    """The choice between the default and long gaps, in the course of time.

    Attributes:
        is_long: Whether gaps are long now.
        reason: Why, for people.
    """

    def __init__(self) -> None:
        self.is_long, self.reason = False, "no worker has attached yet"
        # Since when all conditions for long gaps hold; None: they do not.
        self._since: float | None = None

    def look(self, num_workers: int, workload: Workload | None, now: float) -> None:
        """Chooses again.

        Args:
            num_workers: Number of attached workers.
            workload: None: no interactive prompt has been placed yet, or there is no ITL target.
            now: Time by the core's clock.
        """
        if against := self._against(num_workers, workload):
            self.is_long, self.reason, self._since = False, against, None
            return
        assert workload is not None
        self._since = now if self._since is None else self._since
        self.is_long = self.is_long or workload.is_tight or now - self._since >= _HOLD_S
        self.reason = "few workers, long outputs and short prompts"
        if not self.is_long:
            self.reason += f", but not yet for {_HOLD_S:.0f} s"

    def _against(self, num_workers: int, workload: Workload | None) -> str:
        """Returns what speaks against long gaps; empty: nothing."""
        if num_workers > _MOST_WORKERS:
            return f"{num_workers} workers; long gaps are for at most {_MOST_WORKERS}"
        if workload is None:
            return "no interactive prompt yet, or no ITL target"
        if workload.output_tokens is None:
            if not workload.is_tight:
                return f"fewer than {LEAST_OUTPUTS} outputs have ended"
        elif workload.output_tokens < (least := _LEAST_OUTPUT[self.is_long]):
            return f"outputs of {workload.output_tokens:.0f} tokens; long gaps need {least:g}"
        if workload.prompt_itls > (most := _MOST_PROMPT[self.is_long]):
            took = f"prompts take {workload.prompt_itls:.1f} ITL targets"
            return f"{took}; long gaps are for at most {most:g}"
        if workload.step_itls < (least := _LEAST_STEP[self.is_long]):
            took = f"decode steps take {workload.step_itls:.2f} ITL targets"
            return f"{took}; long gaps need {least:g}"
        return ""
