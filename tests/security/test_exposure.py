"""Listeners that are refused without authentication, and secrets in printed configurations."""

from pathlib import Path

import pytest

from baton.runtime.config import BatonConfig, dump, exposure, load, parse, shown
from baton.runtime.config_error import ConfigError

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
LISTENERS = (
    "coordinator.listen",
    "coordinator.metrics_listen",
    "worker.metrics_listen",
    "kv_transfer.listen",
    "http.listen",
)


def config(key: str, listen: str, **security) -> BatonConfig:
    section, name = key.split(".")
    return parse({section: {name: listen}, "security": security}, "test")


@pytest.mark.parametrize("key", LISTENERS)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "host.test:80", "*:80"])
def test_listening_for_other_hosts_needs_authentication(key, listen, caplog):
    with pytest.raises(ConfigError, match=rf"^{key}: is .* security.allow_insecure: true$"):
        exposure.check_all(config(key, listen))
    exposure.check_all(config(key, listen, allow_insecure=True))
    # One warning, although both clients and workers use the coordinator's listener.
    assert [record.getMessage() for record in caplog.records] == [
        f"{key} {listen} is open to other hosts without TLS"
    ]


@pytest.mark.parametrize("key", LISTENERS)
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:80", "[::1]:0", "localhost:80"])
def test_loopback_needs_no_authentication(key, listen):
    exposure.check_all(config(key, listen))


@pytest.mark.parametrize("key", LISTENERS)
def test_with_authentication_every_listener_may_be_public(key, keys, tmp_path):
    keys.add("one", tenant="a")
    token = tmp_path / "token"
    token.write_text("t")
    known = {
        "api_keys_file": keys.path,
        "cluster_token_file": str(token),
        "metrics_token_file": str(token),
    }
    exposure.check_all(config(key, "0.0.0.0:0", **known))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_examples_are_not_open_to_other_hosts(file):
    exposure.check_all(load(str(file)))


def test_authentication_of_clients_does_not_cover_workers(keys):
    keys.add("one", tenant="a")
    with pytest.raises(
        ConfigError, match=r"its workers are not authenticated; set security.cluster_"
    ):
        exposure.check_all(config("coordinator.listen", "0.0.0.0:0", api_keys_file=keys.path))


async def test_an_open_coordinator_does_not_start(start_coordinator):
    with pytest.raises(ConfigError, match=r"^coordinator.listen: is 0.0.0.0:0"):
        async with start_coordinator(coordinator={"listen": "0.0.0.0:0"}):
            pass
    with pytest.raises(ConfigError, match=r"^coordinator.metrics_listen: is 0.0.0.0:0"):
        async with start_coordinator(coordinator={"metrics_listen": "0.0.0.0:0"}):
            pass
    open_to_all = {"listen": "0.0.0.0:0", "metrics_listen": "0.0.0.0:0"}
    async with start_coordinator({"allow_insecure": True}, coordinator=open_to_all) as running:
        assert running.address.startswith("0.0.0.0:")


@pytest.mark.parametrize(
    ("security", "message"),
    [
        ({"cert_file": "a"}, "cert_file and key_file go together"),
        ({"cert_file": "a", "key_file": "b"}, "cert_file needs ca_file"),
        ({"client_auth": "require"}, "client_auth is 'require'; it needs ca_file"),
        ({"http_client_auth": "require"}, "http_client_auth is 'require'; it needs ca_file"),
        ({"jwt": {"key_file": "a"}}, "security.jwt: key_file needs issuer and audience"),
        ({"api_key_file": "a"}, "unknown key; did you mean 'api_keys_file'"),
    ],
)
def test_contradicting_keys_are_named(security, message):
    with pytest.raises(ConfigError, match=message):
        parse({"security": security}, "test")


def test_errors_do_not_quote_values_of_the_section():
    with pytest.raises(ConfigError) as caught:
        parse({"security": {"jwt": "hunter2", "max_calls": "hunter2"}}, "test")
    assert "hunter2" not in str(caught.value)


async def test_invalid_files_are_named_at_start(start_coordinator, tmp_path, pki):
    empty = tmp_path / "empty"
    empty.write_text("")
    for security in (
        {"api_keys_file": str(tmp_path / "none.yaml")},
        {"cluster_token_file": str(empty)},
        pki.server(cert_file=str(empty)),
        # The key of another certificate.
        pki.server(key_file=pki.file("client.key")),
    ):
        with pytest.raises(ConfigError) as caught:
            async with start_coordinator(security):
                pass
        assert any(str(value) in str(caught.value) for value in security.values())


def test_config_show_has_no_secrets():
    secret = "hunter2"
    given = parse(
        {
            "engine_args": {"hf_token": secret, "api_key": secret, "max_num_batched_tokens": 512},
            "decode": {"engine_args": {"nested": {"password": secret}}},
            "ray": {"runtime_env": {"env_vars": {"AWS_SECRET_ACCESS_KEY": secret}}},
            "tracing": {"otlp_endpoint": f"http://user:{secret}@collector.test:4317"},
            "security": {"cluster_token_file": "/run/token"},
        },
        "test",
    )
    seen = shown(given)
    assert secret not in seen
    assert "max_num_batched_tokens: 512" in seen
    assert "cluster_token_file: /run/token" in seen
    # Child processes get the complete configuration.
    assert dump(given).count(secret) == 5
