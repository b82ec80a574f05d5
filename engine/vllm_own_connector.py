"""The user's own KV connector (`engine_args.kv_transfer_config`), inside Baton's connector.

vLLM loads one connector. Baton's contains vLLM's OffloadingConnector (connector/host_tier.py), so
settings of that one are used there. vLLM's MultiConnector would not do: a request loads from one of
its connectors only, and blocks that one of them failed to load are kept by another as if they were
right. Other connectors are refused, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.engine.base import EngineDead

ARGUMENT = "kv_transfer_config"
OFFLOADING = "OffloadingConnector"
# vLLM makes a kv_transfer_config of these, in place of the given one.
_SIZE, _BACKEND = "kv_offloading_size", "kv_offloading_backend"
OWN_ARGUMENTS = (ARGUMENT, _SIZE, _BACKEND)

_POLICIES = ("lru", "arc")
_HANDS_OVER = "hands KV caches over between engines, which Baton's connector does itself"
_STORES = (
    "loads KV blocks that Baton cannot verify, and does not tell the coordinator which blocks it "
    "has: set kv_store.host_bytes and kv_store.disk_dir instead"
)
# Why vLLM's connectors cannot be inside Baton's.
_REFUSED = {
    "NixlConnector": _HANDS_OVER,
    "NixlPullConnector": _HANDS_OVER,
    "NixlPushConnector": _HANDS_OVER,
    "MooncakeConnector": _HANDS_OVER,
    "MoRIIOConnector": _HANDS_OVER,
    "LMCacheConnectorV1": _STORES,
    "LMCacheMPConnector": _STORES,
    "MooncakeStoreConnector": _STORES,
    "FlexKVConnectorV1": _STORES,
    "HF3FSKVConnector": _STORES,
    "SimpleCPUOffloadConnector": "does not tell the coordinator which blocks it has: name "
    f"{OFFLOADING}",
    "MultiConnector": "keeps blocks that one of its connectors failed to load as if they were "
    f"right, in another one: name {OFFLOADING} alone",
    "ExampleConnector": "names its files by a prompt's tokens alone, so that other tenants, "
    "adapters and weights load them, verifies nothing that it loads, and stores a prompt that "
    "takes several steps incompletely: set kv_store.disk_dir instead",
    "ExampleHiddenStatesConnector": "keeps hidden states, not KV blocks",
    "DecodeBenchConnector": "fills KV blocks with made-up values",
}
# Why settings of the OffloadingConnector are refused.
_ONE_BLOCK = "Baton finds, reports and deletes single blocks"
_OTHER_SPECS = (
    "vLLM's other tiers load files and bytes of other hosts that nothing verifies; for files, set "
    "kv_store.disk_dir"
)
_REFUSED_SETTINGS = {
    "block_size": _ONE_BLOCK,
    "blocks_per_chunk": _ONE_BLOCK,
    "spec_name": _OTHER_SPECS,
    "spec_module_path": _OTHER_SPECS,
    "secondary_tiers": _OTHER_SPECS,
}
_SUPPORTED_SETTINGS = ("cpu_bytes_to_use", "eviction_policy", "offload_prompt_only")


@dataclass(frozen=True, slots=True)
class Offloading:
    """Settings of vLLM's OffloadingConnector that the user has given.

    Attributes:
        host_bytes: Host memory of all ranks in bytes.
        settings: Other settings, by vLLM's names.
    """

    host_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)


def own_offloading(engine_args: Mapping[str, Any]) -> Offloading | None:
    """Returns what the user's engine arguments say about offloading; None: nothing.

    Raises:
        EngineDead: Names the argument, its value, and what is allowed.
    """
    size, config = engine_args.get(_SIZE), engine_args.get(ARGUMENT)
    if size is not None:
        return _by_size(engine_args, size, config)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise EngineDead(f"engine_args.{ARGUMENT}: is {config!r}; must be a mapping")
    _refuse_connector(config)
    extra = config.get("kv_connector_extra_config") or {}
    found = _refuse_settings(extra)
    host_bytes = extra.get("cpu_bytes_to_use")
    if not isinstance(host_bytes, int | float) or host_bytes < 1:
        raise EngineDead(
            f"{found}.cpu_bytes_to_use: is {host_bytes!r}; must be a number of bytes, at least 1"
        )
    settings = {name: extra[name] for name in _SUPPORTED_SETTINGS[1:] if name in extra}
    return Offloading(int(host_bytes), settings)


def _by_size(engine_args: Mapping[str, Any], size: Any, config: Any) -> Offloading:
    if config is not None:
        raise EngineDead(f"engine_args.{_SIZE}: is {size!r}; give it or {ARGUMENT}, not both")
    if (backend := engine_args.get(_BACKEND, "native")) != "native":
        raise EngineDead(
            f"engine_args.{_BACKEND}: is {backend!r}; Baton supports native, because the other "
            f"{_STORES}"
        )
    if not isinstance(size, int | float) or size <= 0:
        raise EngineDead(f"engine_args.{_SIZE}: is {size!r}; must be a number of GiB above 0")
    return Offloading(int(size * 2**30))


def _refuse_connector(config: Mapping[str, Any]) -> None:
    """Refuses connectors, and settings of all connectors that Baton sets itself."""
    connector = config.get("kv_connector")
    if connector != OFFLOADING:
        why = _REFUSED.get(str(connector), "is not known to work there")
        raise EngineDead(
            f"engine_args.{ARGUMENT}.kv_connector: is {connector!r}; inside Baton's connector only "
            f"{OFFLOADING} is supported, and this one {why}"
        )
    for name, value in config.items():
        if name in ("kv_connector", "kv_connector_extra_config"):
            continue
        # A worker may change its role.
        if (name, value) != ("kv_role", "kv_both"):
            raise EngineDead(
                f"engine_args.{ARGUMENT}.{name}: is {value!r}; is set by Baton: leave it out"
            )


def _refuse_settings(extra: Any) -> str:
    """Refuses settings of the OffloadingConnector; returns their place among the arguments."""
    found = f"engine_args.{ARGUMENT}.kv_connector_extra_config"
    if not isinstance(extra, Mapping):
        raise EngineDead(f"{found}: is {extra!r}; must be a mapping")
    for name, value in extra.items():
        if name in _SUPPORTED_SETTINGS or (name, value) == ("spec_name", "CPUOffloadingSpec"):
            continue
        why = _REFUSED_SETTINGS.get(name)
        raise EngineDead(
            f"{found}.{name}: is {value!r}; supported are {', '.join(_SUPPORTED_SETTINGS)}"
            + (f": {why}" if why else "")
        )
    if (policy := extra.get("eviction_policy", "lru")) not in _POLICIES:
        raise EngineDead(
            f"{found}.eviction_policy: is {policy!r}; must be {' or '.join(_POLICIES)}"
        )
    if not isinstance(only := extra.get("offload_prompt_only", False), bool):
        raise EngineDead(f"{found}.offload_prompt_only: is {only!r}; must be true or false")
    return found
