"""Configuration of one vLLM engine, and its description once it has started."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from baton.engine.base import EngineDead, EngineInfo
from baton.engine.device_name import device_name
from baton.engine.model_revision import computation
from baton.engine.served_model import ServedModel
from baton.engine.vllm_config import (
    RefusingEngineArgs,
    bind_threads,
    checked_args,
    keep_sockets_in,
    layout_of,
    leave_room,
)
from baton.engine.vllm_forced_tokens import use_forced_tokens
from baton.engine.vllm_groups import expected_layout
from baton.engine.vllm_images import image_refusal
from baton.engine.vllm_lora import revision_of
from baton.engine.vllm_own_connector import Offloading, own_offloading
from baton.engine.vllm_refusals import (
    refuse_data_parallel,
    refuse_executor,
    refuse_speculation,
    refuse_stages,
)
from baton.engine.vllm_scheduler_class import use_scheduler
from baton.kvtransfer import engine_groups, start_phases
from baton.kvtransfer.connector.handoffs.cuda_device_copies import scratch_bytes
from baton.kvtransfer.connector.tiers.disk_tier import DISK, disk_options, most_blocks
from baton.kvtransfer.connector.tiers.host_tier import HOST_BYTES, host_options
from baton.kvtransfer.disk.directory import DiskDirectory, namespace_of
from baton.kvtransfer.layout import KvLayout
from baton.runtime.process.orphans import EndsWithParent
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model that Baton can serve with these engine arguments, as vLLM configures it.

    Attributes:
        config: vLLM's configuration.
        layout: Layout of the KV cache, without the groups of its layers.
        adapters: LoRA adapters that the engine loads.
    """

    config: VllmConfig
    layout: KvLayout
    adapters: Sequence[common_pb2.LoraAdapter]

    @property
    def expected_layout(self) -> KvLayout:
        """The layout with the groups that the engine is expected to make of its layers."""
        return expected_layout(self.config, self.layout)

    @classmethod
    def make(cls, served: ServedModel, traces: Path) -> CheckedModel:
        """Builds vLLM's configuration without loading weights; takes seconds.

        Args:
            served: The model.
            traces: Directory that profiled ranks write into.

        Raises:
            EngineDead: Baton does not serve this model or these settings.
            Exception: vLLM refuses the arguments.
        """
        args = RefusingEngineArgs(**checked_args(served, traces))
        config = args.create_engine_config()
        refuse_executor(config.parallel_config)
        # vLLM also reads the size from VLLM_DP_SIZE.
        refuse_data_parallel(config.model_config, config.parallel_config.data_parallel_size)
        refuse_speculation(config)
        refuse_stages(config.parallel_config, config.speculative_config)
        described = [
            common_pb2.LoraAdapter(name=name, revision=revision_of(path))
            for name, path in sorted(served.adapters.items())
        ]
        return cls(config, layout_of(config, served.served_name, described), described)


def _offloading(
    config: VllmConfig, engine_args: Mapping[str, Any], host_bytes: int
) -> Offloading | None:
    """Returns the settings by which vLLM keeps blocks in host memory; None: it keeps none.

    Args:
        config: vLLM's configuration.
        engine_args: The user's engine arguments.
        host_bytes: See VllmSetup.make.

    Raises:
        EngineDead: The user's arguments ask vLLM to keep blocks in host memory, and another
            argument prevents that.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if not config.cache_config.enable_prefix_caching:
        why = (
            "enable_prefix_caching: is False; offloading needs prefix caching, because vLLM finds "
            "no block again without it"
        )
    elif stages > 1:
        why = (
            f"pipeline_parallel_size: is {stages}; offloading supports 1, because stages with "
            "other numbers of layers would hold other numbers of blocks"
        )
    else:
        return own_offloading(engine_args) or Offloading(host_bytes)
    if own_offloading(engine_args) is not None:
        raise EngineDead(f"engine_args.{why}")
    if host_bytes and stages > 1:
        _log.warning("kv_store.host_bytes is not used: engine_args.%s", why)
    return None


def _hash_seed(algorithm: str) -> str | None:
    """Returns the seed of vLLM's hashes of KV blocks; None if each process draws its own seed.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
    """
    hash_block = get_hash_fn_by_name(algorithm)
    # vLLM draws a seed for hashes that are not cryptographic, unless PYTHONHASHSEED is set.
    seed, again = (resolve_none_hash_seed(hash_block) for _ in range(2))
    return str(seed) if seed == again else None


@dataclasses.dataclass(frozen=True, slots=True)
class VllmSetup:
    """Configuration of one engine.

    Attributes:
        config: vLLM's configuration, with Baton's connector and logits processor.
        layout: Layout of the KV cache; without the groups of its layers until `started`.
        adapters: LoRA adapters that the engine loads.
        rank_cpus: CPU cores that ranks are bound to; empty if they are not bound.
        transfer_socket: Control socket of the worker's transfer service.
    """

    config: VllmConfig
    layout: KvLayout
    adapters: Sequence[common_pb2.LoraAdapter]
    rank_cpus: Sequence[int]
    transfer_socket: str

    @classmethod
    def make(
        cls,
        served: ServedModel,
        transfer_socket: str,
        traces: Path,
        *,
        prior: LatencyModel | None = None,
        host_bytes: int = 0,
    ) -> VllmSetup:
        """Configures vLLM; takes seconds.

        Args:
            served: The model.
            transfer_socket: Control socket of the worker's transfer service.
            traces: Directory that profiled ranks write into.
            prior: Latency model of Baton's scheduler until it has measured steps; None: vLLM's own
                scheduler runs.
            host_bytes: Host memory for blocks that the cache evicts, unless the engine arguments
                say how much; 0: none.

        Raises:
            EngineDead: Baton does not serve this model or these settings.
            Exception: vLLM refuses the arguments.
        """
        keep_sockets_in(Path(transfer_socket).parent)
        # vLLM's own server does the same, because this process has threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        checked = CheckedModel.make(served, traces)
        config, layout = checked.config, checked.layout
        offloading = _offloading(config, served.engine_args, host_bytes)
        use_forced_tokens(config)
        if current_platform.is_cuda():
            scratch = scratch_bytes(checked.expected_layout.largest_block_bytes)
            leave_room(config.cache_config, scratch, current_platform.get_device_total_memory())
        rank_cpus = bind_threads(config)
        config.kv_transfer_config.kv_connector_extra_config = {
            "socket": transfer_socket,
            "layout": dataclasses.asdict(layout),
            "rank_cpus": rank_cpus,
            # Without it an engine core outlives a killed worker, and ranks outlive a killed engine
            # core: they may go on loading for minutes, or wait forever for a dead rank.
            "leash": EndsWithParent(),
            **(host_options(offloading.host_bytes, offloading.settings) if offloading else {}),
        }
        use_scheduler(config, prior, transfer_socket)
        return cls(config, layout, checked.adapters, rank_cpus, transfer_socket)

    def open_disk(self, disk_dir: str, disk_bytes: int) -> DiskDirectory | None:
        """Turns the disk tier on, before the engine starts.

        Args:
            disk_dir: Directory that the workers of this host share.
            disk_bytes: Most bytes of this worker's files.

        Returns:
            This worker's directory, which must stay open while the engine runs; None if the
            directory cannot be used, the engine would not find its blocks again, or it has no host
            memory.
        """
        extra = self.config.kv_transfer_config.kv_connector_extra_config
        if not extra.get(HOST_BYTES):
            return None
        algorithm = self.config.cache_config.prefix_caching_hash_algo
        if (seed := _hash_seed(algorithm)) is None:
            _log.warning(
                "kv_store.disk_dir is not used: with engine_args.prefix_caching_hash_algo %r, "
                "vLLM's keys of KV blocks differ after each start: set PYTHONHASHSEED in the "
                "worker's environment to a fixed secret number, or use sha256",
                algorithm,
            )
            return None
        made = computation(self.config.model_config)
        engine = f"vllm {vllm.__version__}, keys by {algorithm} from {seed}, {made}"
        namespace = namespace_of(self.layout.fingerprint(), engine)
        try:
            directory = DiskDirectory.open(
                Path(disk_dir).absolute(), namespace, self.layout.tp_size
            )
        except OSError as error:
            _log.warning("kv_store.disk_dir is not used: %s", error)
            return None
        extra |= disk_options(directory.path, namespace, disk_bytes)
        return directory

    @property
    def disk_kv_tokens(self) -> int:
        """Number of tokens that the disk holds, at most; 0 without a disk."""
        extra, layout = self.config.kv_transfer_config.kv_connector_extra_config, self.layout
        if (options := extra.get(DISK)) is None or not layout.keeps_every_token:
            return 0
        payload_bytes = layout.shard_bytes(1)
        num_blocks = most_blocks(options["bytes"], payload_bytes, layout.tp_size)
        return num_blocks * layout.block_size_tokens

    def started(self) -> VllmSetup:
        """Returns the setup with the groups that the started engine has made of its layers."""
        groups = engine_groups.recorded(self.transfer_socket)
        return dataclasses.replace(self, layout=self.layout.with_groups(groups))

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the KV cache holds; known once the engine has started."""
        if not self.layout.keeps_every_token:
            # vLLM's figure for requests of max_model_len.
            return int(self.config.cache_config.kv_cache_size_tokens or 0)
        # vLLM keeps one block as a placeholder that no request gets.
        num_blocks = max(0, (self.config.cache_config.num_gpu_blocks or 0) - 1)
        return num_blocks * int(self.config.cache_config.block_size)

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once; known once the engine has started."""
        most = int(self.config.scheduler_config.max_num_seqs)
        if self.layout.keeps_every_token:
            return most
        # Every request holds at least one block of each table, however short it is.
        num_blocks = self.config.cache_config.num_gpu_blocks or 0
        return max(1, min(most, (num_blocks - 1) // len(self.layout.tables)))

    @property
    def host_kv_tokens(self) -> int:
        """Number of tokens that host memory holds, at most."""
        extra = self.config.kv_transfer_config.kv_connector_extra_config
        layout = self.layout
        if not layout.keeps_every_token:
            return 0
        block_bytes = layout.shard_bytes(1) * layout.tp_size
        num_blocks = extra.get(HOST_BYTES, 0) // block_bytes
        return int(num_blocks * layout.block_size_tokens)

    def info(self, served: ServedModel, begun_at: float) -> EngineInfo:
        """Returns the description of the started engine.

        Args:
            served: The model.
            begun_at: When the start began, by time.monotonic.
        """
        config = self.config
        ended_at = start_phases.ended_at(self.transfer_socket)
        weights_at = ended_at.get(start_phases.WEIGHTS, begun_at)
        caching = bool(config.cache_config.enable_prefix_caching)
        return EngineInfo(
            engine="vllm",
            version=vllm.__version__,
            device=config.device_config.device_type,
            device_name=device_name(),
            model=common_pb2.ModelDescription(
                name=served.served_name,
                revision=self.layout.revision,
                max_model_len=config.model_config.max_model_len,
                vocab_size=config.model_config.get_vocab_size(),
                tokenizer=served.model,
                adapters=self.adapters,
                takes_images=image_refusal(config) is None,
            ),
            layout=self.layout,
            kv_tokens=self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            supports_forced_tokens=config.speculative_config is None,
            keeps_prefixes=caching,
            host_kv_tokens=self.host_kv_tokens,
            disk_kv_tokens=self.disk_kv_tokens,
            weights_s=weights_at - begun_at,
            kv_s=ended_at.get(start_phases.KV, weights_at) - weights_at,
        )
