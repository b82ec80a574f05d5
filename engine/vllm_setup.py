"""How one vLLM engine is configured, and what it tells of itself once it has started."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig

from baton.engine.base import EngineInfo
from baton.engine.vllm_config import (
    RECORDING,
    RefusingEngineArgs,
    bind_threads,
    checked_args,
    keep_sockets_in,
    layout_of,
)
from baton.engine.vllm_forced_tokens import use_forced_tokens
from baton.engine.vllm_lora import revision_of
from baton.engine.vllm_refusals import refuse_speculation
from baton.kvtransfer import engine_stages
from baton.kvtransfer.layout import KvLayout
from baton.runtime.orphans import EndsWithParent
from baton.v1 import common_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class VllmSetup:
    """One engine's configuration.

    Attributes:
        config: vLLM's own, with Baton's connector and logits processor in it.
        layout: of the KV cache.
        adapters: LoRA adapters that it loads.
        rank_cpus: the CPU cores that ranks are bound to; empty where they are not.
        transfer_socket: control socket of the worker's transfer service.
    """

    config: VllmConfig
    layout: KvLayout
    adapters: Sequence[common_pb2.LoraAdapter]
    rank_cpus: Sequence[int]
    transfer_socket: str

    @classmethod
    def make(
        cls,
        model: str,
        served_name: str,
        engine_args: dict[str, Any],
        adapters: Mapping[str, str],
        transfer_socket: str,
        traces: Path,
    ) -> VllmSetup:
        """Configures vLLM; takes seconds.

        Args:
            model: local directory or hub id.
            served_name: what requests call the model.
            engine_args: vLLM's own engine arguments, by vLLM's names.
            adapters: directory or hub id of each LoRA adapter, by the name that requests give.
            transfer_socket: control socket of the worker's transfer service.
            traces: directory that profiled ranks write into.

        Raises:
            EngineDead: Baton does not serve this.
            Exception: what vLLM raises of arguments that make no sense.
        """
        keep_sockets_in(Path(transfer_socket).parent)
        args = RefusingEngineArgs(**checked_args(model, served_name, engine_args, adapters, traces))
        # As vLLM's own server does: this process has threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        config = args.create_engine_config()
        refuse_speculation(config.speculative_config)
        use_forced_tokens(config)
        described = [
            common_pb2.LoraAdapter(name=name, revision=revision_of(path))
            for name, path in sorted(adapters.items())
        ]
        layout = layout_of(config, served_name, described)
        rank_cpus = bind_threads(config)
        config.kv_transfer_config.kv_connector_extra_config = {
            "socket": transfer_socket,
            "layout": dataclasses.asdict(layout),
            "rank_cpus": rank_cpus,
            # An engine core outlives a killed worker otherwise, and ranks a killed engine core:
            # told to end, it may load for minutes, or wait for ever for a rank that is dead.
            "leash": EndsWithParent(),
        }
        return cls(config, layout, described, rank_cpus, transfer_socket)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; known once the engine has started."""
        # One block is vLLM's placeholder: no request gets it.
        num_blocks = max(0, (self.config.cache_config.num_gpu_blocks or 0) - 1)
        return num_blocks * int(self.config.cache_config.block_size)

    @property
    def has_recording(self) -> bool:
        """Whether vLLM's workers have Baton's extension, and not another that takes its place."""
        return bool(self.config.parallel_config.worker_extension_cls == RECORDING)

    def info(self, served_name: str, tokenizer: str, begun_at: float) -> EngineInfo:
        """What the started engine is.

        Args:
            served_name: what requests call the model.
            tokenizer: local directory or hub id of it.
            begun_at: when the start began, by time.monotonic.
        """
        config = self.config
        ended_at = engine_stages.ended_at(self.transfer_socket)
        weights_at = ended_at.get(engine_stages.WEIGHTS, begun_at)
        caching = bool(config.cache_config.enable_prefix_caching)
        return EngineInfo(
            engine="vllm",
            version=vllm.__version__,
            device=config.device_config.device_type,
            model=common_pb2.ModelDescription(
                name=served_name,
                revision=self.layout.revision,
                max_model_len=config.model_config.max_model_len,
                vocab_size=config.model_config.get_vocab_size(),
                tokenizer=tokenizer,
                adapters=self.adapters,
            ),
            layout=self.layout,
            kv_tokens=self.kv_tokens,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            supports_forced_tokens=config.speculative_config is None,
            keeps_prefixes=caching,
            weights_s=weights_at - begun_at,
            kv_s=ended_at.get(engine_stages.KV, weights_at) - weights_at,
        )
