"""LoRA adapters of a vLLM engine: its settings, and the revision of the adapters' weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from baton.engine.base import EngineDead
from baton.engine.file_digest import file_digest
from baton.engine.model_revision import downloaded_commit

_CONFIG = "adapter_config.json"
# Default for the most adapters in one batch; each takes memory beside the weights.
_MAX_IN_BATCH = 8


def lora_requests(adapters: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Returns vLLM's LoRARequest of each adapter, by name."""
    return {
        name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=adapters[name])
        for number, name in enumerate(sorted(adapters), start=1)
    }


def lora_args(adapters: Mapping[str, str], engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns vLLM's engine arguments for these adapters that the user has not set; empty for none.

    All adapters stay loaded. Raises EngineDead if the user's arguments do not allow that, or if an
    adapter is missing.
    """
    if not adapters:
        return {}
    if engine_args.get("enable_lora") is False:
        raise EngineDead("engine_args.enable_lora: is False; lora_adapters needs it: leave it out")
    in_batch = engine_args.get("max_loras", min(len(adapters), _MAX_IN_BATCH))
    if current_platform.is_cpu():
        in_batch = _with_a_free_slot(len(adapters), engine_args.get("max_loras"))
    found = {
        "enable_lora": True,
        "max_loras": in_batch,
        "max_cpu_loras": max(len(adapters), in_batch),
    }
    rank = max(_rank(name, path) for name, path in adapters.items())
    if rank:
        allowed = sorted(get_args(MaxLoRARanks))
        found["max_lora_rank"] = next((one for one in allowed if one >= rank), rank)
    kept = engine_args.get("max_cpu_loras")
    if kept is not None and kept < len(adapters):
        raise EngineDead(
            f"engine_args.max_cpu_loras: is {kept}; must be at least {len(adapters)}, the number "
            "of lora_adapters, which all stay loaded"
        )
    return found


def _with_a_free_slot(num_adapters: int, max_loras: int | None) -> int:
    """Returns the number of slots that vLLM needs on a CPU: the last slot must stay empty.

    vLLM's CPU kernels (vllm/lora/ops/torch_ops) use slot -1 for requests without an adapter, which
    is the last slot: in a mixed batch such requests would be computed with that slot's adapter.
    """
    if max_loras is not None and max_loras <= num_adapters:
        raise EngineDead(
            f"engine_args.max_loras: is {max_loras}; must be at least {num_adapters + 1} on a CPU, "
            "one more than there are lora_adapters: vLLM computes requests of the base model with "
            "what is in the last slot there; leave it out"
        )
    return max_loras or num_adapters + 1


def revision_of(path: str) -> str:
    """Returns a digest of the adapter's weights; for a hub ID, the commit that vLLM loads."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return downloaded_commit(path, _CONFIG)
    return file_digest([directory / _CONFIG, *directory.glob("adapter_model.*")])


def _rank(name: str, path: str) -> int:
    """Returns the rank of a local adapter; 0 for an adapter that vLLM will download."""
    directory = Path(path)
    if not directory.is_dir():
        if directory.is_absolute() or path.startswith("."):
            raise EngineDead(f"lora_adapters.{name}: is {path!r}; there is no such directory")
        return 0
    try:
        rank = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineDead(
            f"lora_adapters.{name}: is {path!r}, which has no {_CONFIG} with a rank `r`: {error}"
        ) from None
    if not isinstance(rank, int) or rank < 1:
        raise EngineDead(f"lora_adapters.{name}: r in {_CONFIG} is {rank!r}; must be 1 or more")
    return rank
