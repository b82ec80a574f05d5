"""TTFT targets that grow with the prompt, and their configuration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.server.lane_targets import lane_targets
from baton.coordinator.state.scaling_config import Targets, in_seconds
from baton.runtime.config import BatonConfig, TargetsConfig, parse
from baton.runtime.config_error import ConfigError
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2


def test_the_target_grows_with_the_prompt() -> None:
    target = TtftTarget.from_ms(1000, 500)
    assert target is not None
    assert [target.of(count) for count in (0, 1000, 100_000)] == [1.0, 1.5, 51.0]
    assert target.scaled(0.5).of(1000) == 0.75
    assert str(target) == "1000 ms + 500 ms per 1,000 prompt tokens"
    assert target.brief == "1000 ms + 500 ms/1k"
    assert str(TtftTarget(0.0125)) == TtftTarget(0.0125).brief == "12.5 ms"
    assert TtftTarget.from_ms(None) is None
    assert TtftTarget.from_ms(0) is None


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32))
def test_without_a_slope_the_target_is_the_base_for_every_prompt(base_ms: int, count: int) -> None:
    target = TtftTarget.from_ms(base_ms)
    assert target is not None
    assert target.of(count) == base_ms / 1e3


def configured(section: str, **targets: object) -> BatonConfig:
    values: dict[str, object] = {"interactive": targets}
    if section == "scaling":
        values = {"targets": values}
    return parse({section: values}, "test")


@pytest.mark.parametrize("section", ["scaling", "lanes"])
@pytest.mark.parametrize(
    ("slope", "told"),
    [
        (-1, "is -1; must be greater than or equal to 0"),
        (math.nan, "ttft_ms_per_1k_tokens"),
        (math.inf, "ttft_ms_per_1k_tokens"),
        (2**31, "is 2147483648; must be less than or equal to 2147483647"),
        ("fast", "ttft_ms_per_1k_tokens: is 'fast'"),
    ],
)
def test_a_wrong_slope_is_named(section: str, slope: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(section, ttft_ms=500, ttft_ms_per_1k_tokens=slope)
    assert "interactive.ttft_ms_per_1k_tokens" in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("section", ["scaling", "lanes"])
def test_a_slope_needs_a_base(section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(section, ttft_ms=None, ttft_ms_per_1k_tokens=5)
    assert "ttft_ms_per_1k_tokens is 5, but ttft_ms is not set" in str(caught.value)


@pytest.mark.parametrize("slope", [-0.001, math.nan, math.inf])
def test_the_autoscaler_takes_no_wrong_slope(slope: float) -> None:
    with pytest.raises(ValueError, match=r"targets\.ttft_s_per_1k_tokens is"):
        Targets(ttft_s_per_1k_tokens=slope)
    with pytest.raises(ValueError, match="0 if ttft_s is null"):
        Targets(ttft_s=None, ttft_s_per_1k_tokens=1.0)


def test_targets_keep_their_slope_between_seconds_and_milliseconds() -> None:
    found = in_seconds(TargetsConfig(ttft_ms=250, ttft_ms_per_1k_tokens=40))
    assert found.ttft == TtftTarget(0.25, 0.04)
    told = lane_targets(common_pb2.LANE_INTERACTIVE, found)
    assert (told.ttft_ms, told.ttft_ms_per_1k_tokens) == (250, 40)
    assert TtftTarget.from_ms(told.ttft_ms, told.ttft_ms_per_1k_tokens) == found.ttft
