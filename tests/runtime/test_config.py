"""Configurations that are refused, and the messages."""

from typing import get_args

import pytest
import yaml

from baton.runtime.config import BatonConfig, dump, load, parse
from baton.runtime.config_error import ConfigError
from baton.runtime.section import Section


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("coordinator", {"max_request_s": float("inf")}, "max_request_s: is inf"),
        ("simulated", {"step_base_ms": float("inf")}, "step_base_ms: is inf"),
        ("worker", {"drain_timeout_s": float("nan")}, "drain_timeout_s: is nan"),
        ("coordinator", {"heartbeat_s": 6.0}, "worker_silent_s: is 1.5; must be at least twice"),
        ("coordinator", {"heartbeat_s": 1.0, "worker_silent_s": 1.6}, "twice heartbeat_s, 2"),
        ("coordinator", {"worker_timeout_s": 1.2}, "must be at least worker_silent_s, 1.5"),
    ],
)
def test_time_limits_that_cannot_work(section, values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse({section: values}, "test")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"disk_dir": "/kv", "host_bytes": 0}, "blocks go to disk through host memory"),
        ({"disk_bytes": 0}, "disk_bytes: is 0"),
        ({"disk_bytes_per_s": 0}, "disk_bytes_per_s: is 0"),
    ],
)
def test_a_disk_that_cannot_work(values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse({"kv_store": values}, "test")


@pytest.mark.parametrize(
    "section", [{"prefill": {"workers": 10**12}}, {"scaling": {"decode": {"max_workers": 10**9}}}]
)
def test_a_pool_size_has_an_upper_limit(section):
    with pytest.raises(ConfigError, match=r"workers: is 10+; must be less than or equal to 10000"):
        parse(section, "test")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"images": {"max_bytes": 12 * 2**20 + 1}}, "less than or equal to 12582912"),
        ({"images": {"max_image_bytes": 12 * 2**20 + 1}}, "less than or equal to 12582912"),
        ({"kv_transfer": {"grpc_connections": 17}}, "less than or equal to 16"),
        ({"security": {"max_metadata_bytes": 1023}}, "greater than or equal to 1024"),
        ({"simulated": {"block_bytes": 63}}, "greater than or equal to 64"),
        (
            {"scaling": {"prefill": {"min_workers": 0, "max_workers": 0}}},
            "greater than or equal to 1",
        ),
    ],
)
def test_a_bound_of_a_field_holds_beside_the_bounds_of_its_type(values, reason):
    with pytest.raises(ConfigError, match=f"must be {reason}|should be {reason}"):
        parse(values, "test")


def test_no_field_has_two_bounds_of_one_kind():
    """pydantic would check only one of them."""

    def doubled(section, path):
        for name, field in section.model_fields.items():
            kinds = [type(each) for each in field.metadata]
            if len(kinds) != len(set(kinds)):
                yield f"{path}{name}"
            for part in (field.annotation, *get_args(field.annotation)):
                if isinstance(part, type) and issubclass(part, Section):
                    yield from doubled(part, f"{path}{name}.")

    assert list(doubled(BatonConfig, "")) == []


@pytest.mark.parametrize("value", ["1GiB", "many"])
def test_a_value_of_a_wrong_type_is_shown_with_the_right_type(value):
    with pytest.raises(ConfigError) as told:
        parse({"kv_transfer": {"send_bytes": value}}, "test")
    assert str(told.value) == (
        f"test: kv_transfer.send_bytes: is '{value}'; must be a valid integer"
    )


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError) as told:
        parse({"simulated": {"answers": [{"after": "a"}]}}, "test")
    assert str(told.value) == "test: simulated.answers.0.answer: is missing"


def test_an_error_in_yaml_says_where_in_the_file(tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("lanes: {}\nmodel: a: b\n")
    with pytest.raises(ConfigError) as told:
        load(str(file))
    assert str(told.value) == (
        f"{file}: not YAML: mapping values are not allowed here (line 2, column 9)"
    )


@pytest.mark.parametrize("port", ["http", "99999", "0"])
def test_the_url_of_a_pooling_server_has_a_port_that_exists(port):
    url = f"http://embedder.test:{port}"
    with pytest.raises(ConfigError, match=rf"http.pooling.0.url: is '{url}'; must be http://"):
        parse({"http": {"pooling": [{"model": "a", "url": url}]}}, "test")
    parse({"http": {"pooling": [{"model": "a", "url": "http://[::1]:8100"}]}}, "test")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://h", "ftp://h:1", "http://h:1/v1"])
def test_the_endpoint_for_spans_is_a_url_with_a_port(endpoint):
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


def test_pools_may_have_different_tensor_parallel_sizes():
    """Whether KV caches fit is decided by their fingerprints: latents fit across sizes."""
    config = parse({"prefill": {"engine_args": {"tensor_parallel_size": 2}}}, "test")
    assert [config.num_ranks(pool) for pool in (config.prefill, config.decode)] == [2, 1]


@pytest.mark.parametrize(("size", "num_ranks"), [(3, 6), (1, 2), (0, 0), ("3", 0)])
def test_every_stage_has_its_own_ranks(size, num_ranks):
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": size}
    config = parse({"engine_args": sizes}, "test")
    assert config.num_ranks(config.prefill) == num_ranks


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lanes": {"batch": {"share": 1}}}, "lanes.batch.share: is 1; .*less than 1"),
        ({"lanes": {"interactive": {"share": 0.5}}}, "lanes.interactive.share: unknown key"),
        ({"lanes": {"batch": {"max_running": 0}}}, "lanes.batch.max_running: is 0; "),
        ({"coordinator": {"max_queue_s": 5}}, "coordinator.max_queue_s: unknown key"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight: is 0; "),
        ({"tenants": {"a": {"wieght": 1}}}, "tenants.a.wieght: unknown key; did you mean 'weight'"),
        ({"tenants": {"a b": {}}}, "tenants: a name is 'a b'; must be 1 to 64 characters of"),
        (
            {"tenants": {"a": {"burst_tokens": 5}}},
            "tenants.a.burst_tokens: is 5; needs tokens_per_s",
        ),
    ],
)
def test_errors_in_lanes_and_tenants_are_named(values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(values, "test")


def test_keys_that_a_tenant_leaves_out_come_from_the_defaults():
    values = {
        "tenant_defaults": {"tokens_per_s": 10, "max_concurrent": 3},
        "tenants": {"a": {"burst_tokens": 5}, "b": {"max_concurrent": None, "weight": 2}},
    }
    config = parse(values, "test")
    a, b = config.tenants["a"], config.tenants["b"]
    assert (a.weight, a.max_concurrent, a.tokens_per_s, a.burst_tokens) == (1, 3, 10, 5)
    assert (b.weight, b.max_concurrent, b.tokens_per_s, b.burst_tokens) == (2, None, 10, None)
    assert parse(yaml.safe_load(dump(config)), "test") == config


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"launcher": "kubernetes"}, "launcher: is 'kubernetes'; .*'local' or 'ray'"),
        ({"ray": {"address": "head"}}, "ray.address: is 'head'; must be empty, \"auto\""),
        ({"ray": {"address": "ray://head"}}, "ray.address: is 'ray://head'; must be"),
        ({"ray": {"address": "http://head:1/"}}, "ray.address: is .*; must be"),
        ({"ray": {"adress": ""}}, "ray.adress: unknown key; did you mean 'address'"),
        ({"ray": {"namespace": ""}}, "ray.namespace: is ''"),
        ({"ray": {"prefill": {"gpus": -1}}}, "ray.prefill.gpus: is -1; "),
        ({"ray": {"decode": {"resources": {"GPU": 1}}}}, "must not name GPU; set gpus"),
        ({"ray": {"decode": {"resources": {"x": 0}}}}, "ray.decode.resources.x: is 0; "),
    ],
)
def test_errors_in_the_ray_section_are_named(values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(values, "test")


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:6379", "ray://head.svc:10001"])
def test_valid_addresses_of_ray(address):
    assert parse({"ray": {"address": address}}, "test").ray.address == address
