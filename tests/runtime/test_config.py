"""What a configuration may not say."""

import pytest

from baton.runtime.config import ConfigError, parse


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("coordinator", {"max_request_s": float("inf")}, "max_request_s: is inf"),
        ("worker", {"drain_timeout_s": float("nan")}, "drain_timeout_s: is nan"),
        ("coordinator", {"heartbeat_s": 6.0}, "worker_timeout_s: is 10.0; must be at least twice"),
        ("coordinator", {"heartbeat_s": 1.0, "worker_timeout_s": 1.5}, "twice heartbeat_s, 2"),
    ],
)
def test_times_that_cannot_work(section, values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse({section: values}, "test")
