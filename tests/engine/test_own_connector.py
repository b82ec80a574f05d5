"""The user's kv_transfer_config: OffloadingConnector is used, all others are refused by name."""

from __future__ import annotations

import pytest

from baton.engine.base import EngineDead
from baton.engine.vllm_own_connector import Offloading, own_offloading


def config(connector="OffloadingConnector", extra=None, **others):
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_extra_config": extra or {},
            **others,
        }
    }


def refusal(arguments):
    with pytest.raises(EngineDead) as error:
        own_offloading(arguments)
    return str(error.value)


def test_settings_of_the_offloading_connector_are_taken():
    assert own_offloading({"max_model_len": 512}) is None
    extra = {"cpu_bytes_to_use": 2.5e9, "eviction_policy": "arc", "spec_name": "CPUOffloadingSpec"}
    assert own_offloading(config(extra=extra, kv_role="kv_both")) == Offloading(
        2_500_000_000, {"eviction_policy": "arc"}
    )
    extra = {"cpu_bytes_to_use": 10, "offload_prompt_only": True}
    assert own_offloading(config(extra=extra)) == Offloading(10, {"offload_prompt_only": True})
    assert own_offloading({"kv_offloading_size": 1.5}) == Offloading(3 * 2**29)


@pytest.mark.parametrize(
    ("connector", "why"),
    [
        ("NixlConnector", "hands KV caches over between engines"),
        ("LMCacheConnectorV1", "cannot verify"),
        ("MooncakeStoreConnector", "cannot verify"),
        ("MultiConnector", "failed to load"),
        ("ExampleConnector", "names its files by a prompt's tokens alone"),
        ("Somebodys", "is not known to work there"),
        (None, "is not known to work there"),
    ],
)
def test_other_connectors_are_refused_by_name(connector, why):
    message = refusal(config(connector))
    where = f"engine_args.kv_transfer_config.kv_connector: is {connector!r}; "
    assert message.startswith(where)
    assert "only OffloadingConnector" in message
    assert why in message


@pytest.mark.parametrize(
    ("extra", "named", "why"),
    [
        ({}, "cpu_bytes_to_use: is None", "bytes"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use: is 0", "at least 1"),
        ({"cpu_bytes_to_use": 9, "eviction_policy": "fifo"}, "policy: is 'fifo'", "lru or arc"),
        ({"cpu_bytes_to_use": 9, "block_size": 64}, "block_size: is 64", "single blocks"),
        ({"spec_name": "TieringOffloadingSpec"}, "spec_name: is 'Tiering", "nothing verifies"),
        ({"store_threshold": 2}, "store_threshold: is 2", "supported are cpu_bytes_to_use"),
        ({"offload_prompt_only": "no"}, "offload_prompt_only: is 'no'", "true or false"),
    ],
)
def test_settings_that_baton_cannot_follow_are_refused(extra, named, why):
    message = refusal(config(extra=extra))
    assert message.startswith("engine_args.kv_transfer_config.kv_connector_extra_config.")
    assert named in message
    assert why in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_transfer_config": "x"}, "kv_transfer_config: is 'x'; must be a mapping"),
        (config(extra="x"), "kv_connector_extra_config: is 'x'; must be a mapping"),
        (config(kv_role="kv_producer"), "kv_role: is 'kv_producer'; is set by Baton"),
        (config(kv_connector_module_path="a.b"), "kv_connector_module_path: is 'a.b'"),
        ({"kv_offloading_size": "x"}, "kv_offloading_size: is 'x'; must be a number of GiB"),
        ({"kv_offloading_size": 1, **config()}, "kv_offloading_size: is 1; give it or"),
        (
            {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
            "kv_offloading_backend: is 'lmcache'; Baton supports native",
        ),
    ],
)
def test_arguments_that_contradict_baton_are_refused(arguments, named):
    assert named in refusal(arguments)
