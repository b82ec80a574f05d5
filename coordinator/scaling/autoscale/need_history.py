"""Remembers how many workers were needed, so that a pool does not shrink at once."""

from __future__ import annotations

from baton.coordinator.scaling.autoscale.types import NeedHistory, PastNeed
from baton.coordinator.state.scaling_config import ScalingConfig

# A worker that was not needed for this long may change pools.
_RECENT_S = 30.0


def with_need(
    history: NeedHistory,
    current: int,
    needed: int,
    config: ScalingConfig,
    known_s: float,
    now: float,
    *,
    num_kept: int = 0,
) -> NeedHistory:
    """Adds the present need to the needs within the window; a monotonic queue for their maximum.

    At the first decision, when `history` is empty, the present size counts as needed. It does not
    count again when earlier needs are merely older than the window: a window may be shorter than
    the time between two decisions. Entries that are not larger than the new need are dropped,
    because they can no longer be the maximum.

    Args:
        history: earlier needs; empty: no need is known yet, or decisions paused.
        current: present number of workers.
        needed: number of workers that the present load needs.
        config: lengths of the windows.
        known_s: how long the load has been known.
        now: time by the core's clock.
        num_kept: earlier needs of at most this many workers do not count, except while the load is
            known for a short time.
    """
    young = known_s < config.young_s
    since = now - (max(config.window_s, config.young_s) if young else config.window_s)
    found = [one for one in history or (PastNeed(now, current),) if since <= one.at <= now]
    dropped = needed if young else max(needed, num_kept)
    return (*(one for one in found if one.workers > dropped), PastNeed(now, needed))


def largest_need(history: NeedHistory) -> int:
    """Maximum need within the window."""
    return max(one.workers for one in history)


def recent_need(history: NeedHistory, config: ScalingConfig, known_s: float, now: float) -> int:
    """Maximum need in the last _RECENT_S seconds.

    While the load has been known for less than `config.young_s`, all earlier needs count.
    """
    young = known_s < config.young_s
    since = now - (config.young_s if young else min(_RECENT_S, config.window_s / 2))
    return max((one.workers for one in history if one.at >= since), default=0)


def last_needed_s(history: NeedHistory, number: int, now: float) -> float | None:
    """Seconds since this many workers were needed last; None: not within the window."""
    return min((now - one.at for one in history if one.workers >= number), default=None)
