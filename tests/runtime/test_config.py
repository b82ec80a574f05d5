"""What a configuration may not say."""

import pytest

from baton.runtime.config import ConfigError, parse


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("coordinator", {"max_request_s": float("inf")}, "max_request_s: is inf"),
        ("worker", {"drain_timeout_s": float("nan")}, "drain_timeout_s: is nan"),
        ("coordinator", {"heartbeat_s": 6.0}, "worker_silent_s: is 2.0; must be at least twice"),
        ("coordinator", {"heartbeat_s": 1.0, "worker_silent_s": 1.5}, "twice heartbeat_s, 2"),
        ("coordinator", {"worker_timeout_s": 1.5}, "must be at least worker_silent_s, 2"),
    ],
)
def test_times_that_cannot_work(section, values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse({section: values}, "test")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://h", "ftp://h:1", "http://h:1/v1"])
def test_an_endpoint_of_spans_is_a_url_with_a_port(endpoint):
    with pytest.raises(
        ConfigError, match=r"otlp_endpoint: is .*; must be http://host:port or https"
    ):
        parse({"tracing": {"otlp_endpoint": endpoint}}, "test")
    parse({"tracing": {"otlp_endpoint": "https://collector.test:4317"}}, "test")


@pytest.mark.parametrize("value", ["80", "9-8", "0-5", "1-65536", "a-b", "5-"])
def test_a_port_range_is_two_ports_in_order(value):
    with pytest.raises(ConfigError, match=r"port_range: is .*; must be first-last, two ports"):
        parse({"kv_transfer": {"port_range": value}}, "test")


def test_transports_are_known_and_named_once():
    with pytest.raises(ConfigError, match=r"transports: is .*; must name each transport once"):
        parse({"kv_transfer": {"transports": ["grpc", "grpc"]}}, "test")
    with pytest.raises(ConfigError, match=r"transports.0: is 'pigeon'"):
        parse({"kv_transfer": {"transports": ["pigeon"]}}, "test")


def test_pools_of_different_tensor_parallel_sizes_are_refused_with_both_values():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2 for prefill and 1 for decode"):
        parse({"prefill": {"engine_args": {"tensor_parallel_size": 2}}}, "test")
    parse({"engine_args": {"tensor_parallel_size": 2}}, "test")
