"""Examines a model before a worker loads it: whether Baton can serve it, and the cost of a handoff.

`baton check` prints the result. No weights are loaded: vLLM builds its configuration by the same
code as in a worker that starts, with the same refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from baton.engine.base import EngineDead
from baton.kvtransfer import arena, staging_size, transport_speed
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transports import registry
from baton.kvtransfer.transports.transport import ServiceContext
from baton.runtime.config import BatonConfig, PoolConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.kv import kv_fingerprint
from baton.runtime.kv.kv_transports import TRANSPORTS
from baton.runtime.process.free_memory import free_bytes
from baton.worker.main import vllm_missing, vllm_model

if TYPE_CHECKING:
    from baton.engine.vllm_setup import CheckedModel

# Transports that need no GPU and no second host.
_MEASURED = ("shm", "nixl", "grpc")
_NOTES = {
    "shm": "measured; between workers of one host",
    "nixl": "measured within this host; between hosts as fast as the network",
    "grpc": "measured over loopback; between hosts at most as fast as the network",
    "nccl": "not measured; between GPUs of different workers",
    "gloo": "not measured; between any two hosts",
}
# Files that describe a model: Hugging Face's and Mistral's.
_CONFIG_FILES = ("config.json", "params.json")
# Share of the free shared memory that the suggested staging of all workers may take.
_SHARE_OF_FREE = 0.9
_MIB = 2**20


class Refused(ConfigError):
    """Baton cannot serve the model; the message says why."""


@dataclass(frozen=True, slots=True)
class TransportCheck:
    """One transport between two workers.

    Attributes:
        name: Name in `kv_transfer.transports`.
        configured: Whether the configuration lists it.
        bytes_per_s: Measured speed; None if it was not measured.
        handoff_s: Time to move the KV cache of the prompt; None if it was not measured.
        note: How the speed was measured, or why it was not measured.
    """

    name: str
    configured: bool
    bytes_per_s: float | None
    handoff_s: float | None
    note: str


@dataclass(frozen=True, slots=True)
class StagingCheck:
    """Staging of one worker, in one direction.

    Attributes:
        send_bytes: Configured staging of the sender.
        receive_bytes: Configured staging of the receiver.
        max_prompt_tokens: Longest prompt that can be handed over.
        fits: Whether every prompt that the model accepts can be handed over.
        suggested_bytes: Value for both directions with which every prompt can be handed over, or
            else the largest value that the free shared memory of this host allows.
        suggested_prompt_tokens: Longest prompt that can be handed over with suggested_bytes, at
            most max_model_len.
        room_bytes: Memory of this host that the staging of all workers may take: most of the free
            shared memory, and at most half of the available memory.
    """

    send_bytes: int
    receive_bytes: int
    max_prompt_tokens: int
    fits: bool
    suggested_bytes: int
    suggested_prompt_tokens: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A model that Baton can serve.

    Attributes:
        model: Local directory or hub ID.
        architecture: Name of the model's class.
        device: Kind of device that vLLM uses on this host.
        max_model_len: Longest prompt with its output, in tokens.
        layout: Layout of the KV cache.
        draft: How handoffs treat the KV cache of a speculative draft; empty if there is none.
        bytes_per_token: KV cache of one token: all layers that keep every token, all ranks.
        bytes_per_block: KV cache of one block of these layers, all ranks.
        prompt_tokens: Length of the example prompt.
        prompt_bytes: Handoff of the example prompt.
        transports: The configured transports in order of preference, then the others.
        staging: Size of the staging.
        images: For a model that takes images: "served", or why they are not served; empty: the
            model takes none.
    """

    model: str
    architecture: str
    device: str
    max_model_len: int
    layout: KvLayout
    draft: str
    bytes_per_token: float
    bytes_per_block: int
    prompt_tokens: int
    prompt_bytes: int
    transports: tuple[TransportCheck, ...]
    staging: StagingCheck
    images: str = ""


def check(config: BatonConfig, prompt_tokens: int) -> ModelCheck:
    """Examines the model of a configuration, for both pools; takes some seconds.

    Args:
        config: Configuration with a local model directory or a hub ID as `model`.
        prompt_tokens: Length of the prompt whose handoff is timed.

    Raises:
        Refused: Baton cannot serve the model.
        ConfigError: vLLM is not installed, or the engine is not vLLM.
    """
    if config.engine != "vllm":
        raise ConfigError(f"engine: is {config.engine!r}; baton check examines models for 'vllm'")
    with tempfile.TemporaryDirectory(prefix="baton-check-") as name:
        directory = Path(name)
        # vLLM prints to standard output, which belongs to the result.
        with _output_on_stderr():
            checked, decode = _configured(config, directory)
        layout, vllm = checked.expected_layout, checked.config
        num_blocks = layout.num_blocks(prompt_tokens)
        return ModelCheck(
            model=config.model,
            architecture=vllm.model_config.architecture,
            device=vllm.device_config.device_type,
            max_model_len=vllm.model_config.max_model_len,
            layout=layout,
            draft=_draft(layout, decode.layout),
            bytes_per_token=layout.token_bytes,
            bytes_per_block=round(layout.token_bytes * layout.block_size_tokens),
            prompt_tokens=prompt_tokens,
            prompt_bytes=layout.handoff_bytes(num_blocks),
            transports=asyncio.run(_transports(config, layout, num_blocks, directory)),
            staging=_staging(config, layout, vllm.model_config.max_model_len),
            images=images_of(vllm),
        )


def images_of(config: Any) -> str:
    """See ModelCheck.images; `config` is vLLM's VllmConfig."""
    from baton.engine.vllm_images import image_refusal

    if not config.model_config.is_multimodal_model:
        return ""
    return image_refusal(config) or "served"


def _draft(prefill: KvLayout, decode: KvLayout) -> str:
    if prefill.draft_revision and decode.draft_revision:
        return "its KV cache is handed over with the prompt"
    if decode.draft_revision:
        return (
            "its KV cache is left out of handoffs, because prefill.engine_args has no "
            "speculative_config: the target model will accept fewer drafted tokens"
        )
    if prefill.draft_revision:
        return "decode workers have none, and do not speculate"
    return ""


def _configured(config: BatonConfig, directory: Path) -> tuple[CheckedModel, CheckedModel]:
    """Returns the model as prefill and decode workers configure it, with fitting layouts."""
    path = Path(config.model)
    if (path.is_absolute() or config.model.startswith(("./", "../"))) and not path.exists():
        raise Refused(f"model: is {config.model!r}; there is no such directory")
    if path.is_dir() and not any((path / name).is_file() for name in _CONFIG_FILES):
        raise Refused(
            f"model: is {config.model!r}; this directory has none of {', '.join(_CONFIG_FILES)}"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from baton.engine.vllm_setup import CheckedModel
    except ImportError as error:
        raise vllm_missing(error) from error

    def make(pool: PoolConfig) -> CheckedModel:
        served = vllm_model(config, pool)
        try:
            return CheckedModel.make(served, directory)
        except EngineDead as error:
            raise Refused(str(error)) from None
        except Exception as error:
            is_missing = isinstance(error, OSError) and not path.is_dir()
            problem = "cannot be read from the hub" if is_missing else "vLLM refuses it"
            reason = _one_line(error, served.engine_args)
            raise Refused(f"model: {config.model}: {problem}: {reason}") from error

    prefill = decode = make(config.prefill)
    if vllm_model(config, config.prefill) != vllm_model(config, config.decode):
        decode = make(config.decode)
        ours = prefill.expected_layout.fingerprint()
        theirs = decode.expected_layout.fingerprint()
        if differing := kv_fingerprint.differences(ours, theirs):
            raise Refused(
                "prefill.engine_args, decode.engine_args: decode workers could not load the KV "
                f"caches of prefill workers: {'; '.join(differing)}"
            )
    return prefill, decode


def _one_line(error: Exception, arguments: Mapping[str, Any]) -> str:
    """Returns an error's text on one line, without the links of pydantic.

    Args:
        error: Error of vLLM.
        arguments: Engine arguments that vLLM was given; the text names those that are wrong.
    """
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split()) or type(error).__name__
    problems: dict[str, list[str]] = {}
    for each in error.errors():
        # The later parts of a path may be names of types.
        name = str(each["loc"][0]) if each["loc"] else ""
        if name in arguments:
            name = f"engine_args.{name} is {arguments[name]!r}"
        problems.setdefault(name, []).append(" ".join(each["msg"].split()))
    return "; ".join(
        f"{name}: {'; or: '.join(found)}" if name else "; ".join(found)
        for name, found in problems.items()
    )


async def _transports(
    config: BatonConfig, layout: KvLayout, num_blocks: int, directory: Path
) -> tuple[TransportCheck, ...]:
    configured = config.kv_transfer.transports
    names = [*configured, *(name for name in TRANSPORTS if name not in configured)]
    return tuple(
        [
            await _transport(name, name in configured, layout, num_blocks, directory)
            for name in names
        ]
    )


async def _transport(
    name: str, configured: bool, layout: KvLayout, num_blocks: int, directory: Path
) -> TransportCheck:
    note, is_usable = _NOTES.get(name, "not measured"), True
    try:
        registry.transport_class(name)(name, ServiceContext(segment_name=""))
    except TransferError as error:
        note, is_usable = f"not usable here: {error}", False
    if not configured:
        note += "; not in kv_transfer.transports"
    if name not in _MEASURED or not is_usable:
        return TransportCheck(name, configured, None, None, note)
    measured = transport_speed.measured_blocks(layout, num_blocks)
    try:
        speed = await transport_speed.measure(name, layout, measured, directory)
    except TransferError as error:
        return TransportCheck(name, configured, None, None, f"not usable here: {error}")
    return TransportCheck(
        name, configured, speed.bytes_per_s, speed.handoff_s * num_blocks / measured, note
    )


def _staging(config: BatonConfig, layout: KvLayout, max_model_len: int) -> StagingCheck:
    transfer = config.kv_transfer
    holds = staging_size.num_tokens(layout, min(transfer.send_bytes, transfer.receive_bytes))
    room = min(int(arena.free_shared_bytes() * _SHARE_OF_FREE), free_bytes() // 2)
    num_arenas = 2 * max(1, config.prefill.workers + config.decode.workers)
    most = max(room // num_arenas // _MIB, 1) * _MIB
    suggested = min(staging_size.suggested_bytes(layout, max_model_len), most)
    return StagingCheck(
        send_bytes=transfer.send_bytes,
        receive_bytes=transfer.receive_bytes,
        max_prompt_tokens=holds,
        fits=holds >= max_model_len,
        suggested_bytes=suggested,
        suggested_prompt_tokens=min(staging_size.num_tokens(layout, suggested), max_model_len),
        room_bytes=room,
    )


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Sends what this process and its children write to standard output to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _sets_nothing(section: dict[str, Any]) -> bool:
    """Whether all values are sections without values; an engine argument may be `{}`."""
    return all(
        value == {} or (key != "engine_args" and isinstance(value, dict) and _sets_nothing(value))
        for key, value in section.items()
    )


def starting_config(config: BatonConfig, found: ModelCheck) -> dict[str, Any]:
    """Returns the values of a configuration file that serves the model.

    It has what the configuration sets, with enough staging and the sizes of the pools.
    """
    dumped = config.model_dump(mode="json", exclude_unset=True)
    values = {key: value for key, value in dumped.items() if not _sets_nothing({key: value})}
    given = values.get("kv_transfer", {})
    if not found.staging.fits:
        size = found.staging.suggested_bytes
        given = given | {
            "send_bytes": max(size, found.staging.send_bytes),
            "receive_bytes": max(size, found.staging.receive_bytes),
        }
    arguments = {"max_model_len": found.max_model_len} | values.get("engine_args", {})
    pools = {
        name: {"workers": getattr(config, name).workers} | values.get(name, {})
        for name in ("prefill", "decode")
    }
    own = {"model": config.model, "served_model_name": config.model_name}
    given = {"kv_transfer": given} if given else {}
    return {**own, **values, **own, "engine_args": arguments, **pools, **given}
