"""The Hello message of a simulated worker."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.state.requests import WorkerKey
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2


class EngineLimits(Protocol):
    """Engine limits that a worker's Hello announces."""

    @property
    def block_size_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def host_kv_tokens(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> float: ...


def hello(
    key: WorkerKey,
    role: common_pb2.Role.ValueType,
    shape: EngineLimits,
    kv_tokens: int,
    device_name: str = "",
) -> cluster_pb2.Hello:
    """Returns the Hello of a worker with practically unlimited staging.

    Args:
        key: The worker.
        role: Its role.
        shape: Limits of its engine.
        kv_tokens: Size of its KV cache.
        device_name: Model of its device; workers of other devices have latency models of their own.
    """
    name, incarnation = key
    return cluster_pb2.Hello(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        state=cluster_pb2.WORKER_STATE_SERVING,
        model=common_pb2.ModelDescription(
            name="simulated", revision="1", max_model_len=shape.max_model_len, vocab_size=2**31
        ),
        fingerprint=kv_transfer_pb2.KvFingerprint(
            model="simulated",
            num_layers=1,
            block_size_tokens=shape.block_size_tokens,
            block_bytes=round(shape.kv_bytes_per_token * shape.block_size_tokens),
            tp_size=1,
        ),
        capacity=cluster_pb2.Capacity(
            kv_tokens=kv_tokens,
            host_kv_tokens=shape.host_kv_tokens,
            block_size_tokens=shape.block_size_tokens,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_send_bytes=2**40,
            max_receive_bytes=2**40,
            supports_forced_tokens=True,
            keeps_prefixes=shape.prefix_caching,
        ),
        kv_address=f"{name}:1",
        host_id=name,
        engine="simulated",
        engine_version="1",
        device_name=device_name,
    )
