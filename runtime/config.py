"""The one configuration object of every process.

Read once at start, from a YAML file and command-line overrides; nothing else reads the environment.
An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from baton.runtime.names import (
    FIRST_REVISION,
    REVISION_NAMES,
    TENANT_NAMES,
    did_you_mean,
    is_revision,
    is_tenant,
)
from baton.runtime.section import PositiveInt, PositiveSeconds, Section
from baton.runtime.security_config import SecurityConfig

_SECRET_KEY = re.compile(
    r"(^|[_-])(token|secret|passw(or)?d|passphrase|credentials?|(api|access|private|secret)[_-]?keys?)$",
    re.I,
)
_PASSWORD = re.compile(r"//[^/@\s]+@")


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""


class CoordinatorConfig(Section):
    """Where the coordinator listens, and what it lets in."""

    listen: str = Field("127.0.0.1:7070", description="host:port of gRPC; port 0 picks a free one")
    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; port 0 picks a free one"
    )
    max_running_requests: PositiveInt = Field(4096, description="admitted and not ended")
    max_requests_per_session: PositiveInt = Field(4096)
    max_prompt_bytes: PositiveInt = Field(4 * 2**20, description="text or token ids of one prompt")
    max_stop_strings: PositiveInt = Field(16)
    max_stop_string_chars: PositiveInt = Field(256)
    max_logprobs: int = Field(20, ge=0)
    max_request_s: PositiveSeconds = Field(3600, description="longest life of a request")
    heartbeat_s: PositiveSeconds = Field(0.5, description="of the workers' streams")
    worker_silent_s: PositiveSeconds = Field(
        1.5,
        validate_default=True,
        description="the requests of a worker silent for so long go on elsewhere",
    )
    worker_timeout_s: PositiveSeconds = Field(
        10.0, validate_default=True, description="a worker silent for so long is lost"
    )
    worker_stuck_s: PositiveSeconds = Field(
        20.0,
        description="the requests of a worker whose engine makes no step for so long go on "
        "elsewhere; after three times as long it is lost",
    )
    max_recovery_s: PositiveSeconds = Field(
        30.0, description="longest wait for another worker of a request whose worker was lost"
    )
    max_lost_attempts: PositiveInt = Field(
        4, description="a request fails after so many attempts in a row without a new token"
    )
    adoption_grace_s: PositiveSeconds = Field(
        30.0, description="how long workers go on without a coordinator"
    )
    handoff_timeout_s: PositiveSeconds = Field(
        10.0, description="how long a decode worker waits for a commit before it recomputes"
    )
    drain_timeout_s: PositiveSeconds = Field(30.0, description="Ctrl-C: longest wait for requests")

    @field_validator("worker_silent_s")
    @classmethod
    def _heartbeats_fit(cls, silent_s: float, info: ValidationInfo) -> float:
        """A healthy worker, heard once per heartbeat, must not be given up for one that is late."""
        least_s = 2 * info.data.get("heartbeat_s", 0.0)
        if silent_s < least_s:
            raise ValueError(f"must be at least twice heartbeat_s, {least_s:g}")
        return silent_s

    @field_validator("worker_timeout_s")
    @classmethod
    def _is_no_sooner(cls, timeout_s: float, info: ValidationInfo) -> float:
        least_s = info.data.get("worker_silent_s", 0.0)
        if timeout_s < least_s:
            raise ValueError(f"must be at least worker_silent_s, {least_s:g}")
        return timeout_s


class LaneConfig(Section):
    """What one lane lets in; null is no limit."""

    max_queued: PositiveInt = Field(1024, description="requests that wait")
    max_queue_s: PositiveSeconds = Field(60.0, description="longest wait for a worker")
    max_prompt_tokens: PositiveInt | None = Field(None, description="of one request")
    max_output_tokens: PositiveInt | None = Field(
        None, description="of one request; also what one gets that names no max_tokens"
    )
    max_running: PositiveInt | None = Field(None, description="dispatched and not ended")
    ttft_ms: PositiveInt | None = Field(
        None,
        description="time to first token wanted of requests that name none; one that is predicted "
        "to take longer is not admitted",
    )


class InteractiveLaneConfig(LaneConfig):
    """The lane of people who wait."""

    itl_ms: PositiveInt = Field(
        100,
        description="inter-token latency wanted; batch outputs beside interactive ones yield to it",
    )


class BatchLaneConfig(LaneConfig):
    """The lane that yields."""

    max_queue_s: PositiveSeconds = Field(600.0, description="longest wait for a worker")
    share: float = Field(
        0.05, ge=0, lt=1, description="of the tokens served, while both lanes have work to start"
    )


class LanesConfig(Section):
    """The order of requests: interactive first, then batch; inside a lane tenants share fairly."""

    interactive: InteractiveLaneConfig = Field(default_factory=InteractiveLaneConfig)
    batch: BatchLaneConfig = Field(default_factory=BatchLaneConfig)
    long_prompt_tokens: int = Field(
        0, ge=0, description="interactive prompts longer than this queue with batch; 0: none does"
    )
    prompt_token_weight: float = Field(
        1.0, gt=0, le=1000, description="of a prompt token in what a tenant was served"
    )
    output_token_weight: float = Field(2.0, gt=0, le=1000, description="of an output token there")


class TenantConfig(Section):
    """What one tenant gets; null is no limit."""

    weight: float = Field(1.0, ge=0.001, le=1000, description="of its share beside others'")
    max_concurrent: PositiveInt | None = Field(None, description="dispatched and not ended")
    tokens_per_s: float | None = Field(
        None, gt=0, le=1e12, description="prompt and output, admitted over time"
    )
    burst_tokens: PositiveInt | None = Field(
        None, description="at once, after a pause; null: what ten seconds bring"
    )


class PoolConfig(Section):
    """One pool's workers."""

    workers: int = Field(1, ge=0)
    max_requests_per_worker: PositiveInt = Field(
        256, description="dispatched to one worker at a time"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="for this pool, over the common engine_args"
    )


class DecodePoolConfig(PoolConfig):
    """The workers that decode."""

    local_prefill: bool = Field(
        True,
        description="whether a decode worker may compute a prompt itself where that is much sooner "
        "than a prefill worker would, and within itl_ms",
    )


class KvTransferConfig(Section):
    """The transfer service beside each engine."""

    listen: str = Field(
        "",
        description="host:port; port 0 picks a free one; empty: the interface that leads to the "
        "coordinator, loopback when that is where it listens",
    )
    advertise_host: str = Field("", description="host other workers dial; empty: that of listen")
    transports: list[Literal["shm", "nccl", "gloo", "grpc"]] = Field(
        ["shm", "nccl", "grpc"],
        min_length=1,
        description="how bytes may move, best first; each pair takes the first that both can",
    )
    grpc_connections: PositiveInt = Field(
        2, le=16, description="to each other worker; handoffs are spread over them"
    )
    port_range: str = Field(
        "", description="first-last: where a port 0 of listen is picked; empty: anywhere"
    )
    send_bytes: PositiveInt = Field(256 * 2**20, description="the sender's staging")
    receive_bytes: PositiveInt = Field(256 * 2**20, description="the receiver's staging")
    open_timeout_s: PositiveSeconds = Field(5.0, description="wait for a reservation")
    idle_timeout_s: PositiveSeconds = Field(
        60.0, description="an open handoff that gets no frame for so long expires"
    )
    commit_ttl_s: PositiveSeconds = Field(
        30.0, description="a committed handoff that nobody loads for so long expires"
    )
    claim_timeout_s: PositiveSeconds = Field(10.0, description="longest load")
    progress_bytes: PositiveInt = Field(
        4 * 2**20,
        description="what arrives is loaded by so many bytes at a time, and at the commit",
    )
    cpus: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="cores the service runs on; empty: any (baton up on CPUs: none that prefills)",
    )

    @field_validator("port_range")
    @classmethod
    def _is_port_range(cls, value: str) -> str:
        first, separator, last = value.partition("-")
        if value and not (
            separator
            and first.isdigit()
            and last.isdigit()
            and 1 <= int(first) <= int(last) <= 65535
        ):
            raise ValueError("must be first-last, two ports of 1 to 65535, the lower one first")
        return value

    @field_validator("transports")
    @classmethod
    def _are_different(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("must name each transport once")
        return value


class WorkerConfig(Section):
    """A worker process."""

    metrics_listen: str = Field("127.0.0.1:0")
    drain_timeout_s: PositiveSeconds = Field(30.0, description="SIGTERM: longest wait")
    start_timeout_s: PositiveSeconds = Field(600.0, description="longest load of the model")
    attach_timeout_s: PositiveSeconds = Field(
        30.0, description="a worker that finds no coordinator for so long ends"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="shown by baton workers --json, beside those it adds"
    )
    revision: str = Field(
        FIRST_REVISION,
        description="names model and engine arguments together; requests stay on workers of one. "
        "The coordinator's own is the stable one, which gets what no rollout takes",
    )

    @field_validator("revision")
    @classmethod
    def _is_revision(cls, value: str) -> str:
        if not is_revision(value):
            raise ValueError(f"must be {REVISION_NAMES}")
        return value


class HttpConfig(Section):
    """The OpenAI-compatible gateway."""

    listen: str = Field(
        "127.0.0.1:8000",
        description="host:port; port 0 picks a free one; empty: baton up starts no gateway",
    )
    max_connections: PositiveInt = Field(4096)
    max_running_requests: PositiveInt = Field(1024, description="generations at a time")
    max_choices: PositiveInt = Field(128, description="of one request: its prompts times n")
    max_body_bytes: PositiveInt = Field(8 * 2**20)
    max_header_bytes: PositiveInt = Field(32 * 2**10, description="request line and headers")
    read_timeout_s: PositiveSeconds = Field(
        30.0, description="longest wait for a whole head, and for a whole body"
    )
    write_timeout_s: PositiveSeconds = Field(
        60.0, description="a client that takes nothing for so long is disconnected"
    )
    keep_alive_s: PositiveInt = Field(75, description="of idle connections")
    drain_timeout_s: PositiveSeconds = Field(30.0, description="SIGTERM: longest wait for requests")


class TracingConfig(Section):
    """Spans in the traces of requests."""

    otlp_endpoint: str = Field(
        "",
        description="http://host:port (or https) of an OpenTelemetry collector, OTLP over gRPC; "
        "gets the stages of requests whose traceparent is sampled; empty: nobody does",
    )
    tail_share: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="of other requests, beside all that failed and all that were slower than 99 % "
        "lately; null: none of them",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str) -> str:
        scheme, separator, address = value.partition("://")
        host, _, port = address.rpartition(":")
        if value and not (
            separator
            and scheme in ("http", "https")
            and host
            and "/" not in host
            and port.isdigit()
            and 1 <= int(port) <= 65535
        ):
            raise ValueError("must be http://host:port or https://host:port")
        return value


class LatencyConfig(Section):
    """What steps cost on a worker that nobody has measured: the latency model's seed, in ms.

    The defaults are about an 8B model on a small GPU; the fit to what workers report replaces them.
    """

    prefill_base_ms: float = Field(10.0, ge=0, allow_inf_nan=False, description="per step")
    prefill_per_token_ms: float = Field(0.1, ge=0, allow_inf_nan=False)
    prefill_per_token_squared_ms: float = Field(2e-6, ge=0, allow_inf_nan=False)
    step_base_ms: float = Field(15.0, ge=0, allow_inf_nan=False, description="per decode step")
    step_per_request_ms: float = Field(0.05, ge=0, allow_inf_nan=False)
    step_per_kv_token_ms: float = Field(2e-4, ge=0, allow_inf_nan=False)


class TargetsConfig(Section):
    """What pools are sized for; null is no promise, and makes no pool grow."""

    ttft_ms: PositiveInt | None = Field(500, description="time to first token")
    itl_ms: PositiveInt | None = Field(50, description="inter-token latency")
    percentile: float = Field(95.0, gt=0, lt=100, description="of requests and tokens")


class NoTargetsConfig(TargetsConfig):
    """Of work that can wait: it promises nothing unless told."""

    ttft_ms: PositiveInt | None = Field(None, description="time to first token")
    itl_ms: PositiveInt | None = Field(None, description="inter-token latency")


class LaneTargetsConfig(Section):
    """Targets by lane."""

    interactive: TargetsConfig = Field(default_factory=TargetsConfig)
    batch: NoTargetsConfig = Field(default_factory=NoTargetsConfig)


class PoolLimitsConfig(Section):
    """How many workers a pool may have."""

    min_workers: int = Field(1, ge=0)
    max_workers: PositiveInt = Field(16)

    @model_validator(mode="after")
    def _are_ordered(self) -> PoolLimitsConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}; must be at most max_workers, "
                f"{self.max_workers}"
            )
        return self


class ScalingSection(Section):
    """How the pools size themselves."""

    autoscale: bool = Field(
        False,
        description="whether baton up changes the pools' sizes by itself; off, they have workers",
    )
    targets: LaneTargetsConfig = Field(default_factory=LaneTargetsConfig)
    prefill: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    decode: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    max_gpus: PositiveInt | None = Field(None, description="of both pools together; null: no limit")
    interval_s: PositiveSeconds = Field(5.0, description="between two decisions")
    cold_start_s: PositiveSeconds = Field(
        60.0, description="until a started worker serves: the load is forecast so far ahead"
    )
    start_timeout_s: PositiveSeconds = Field(
        600.0, description="a worker that starts for longer is given up"
    )
    down_window_s: float = Field(
        180.0, ge=0, description="a pool shrinks to the most it needed within this time"
    )
    idle_s: PositiveSeconds = Field(
        300.0, description="without a request for so long a pool with min_workers 0 ends its last"
    )
    flip: bool = Field(True, description="whether workers may change roles")
    flip_quiet_s: float = Field(120.0, ge=0, description="between a flip and one back")


class RayPoolConfig(Section):
    """What one worker of a pool takes of its Ray node."""

    cpus: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False, description="Ray's CPU resource")
    gpus: float | None = Field(
        None,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="Ray's GPU resource; null: one per tensor-parallel rank of vLLM where a node "
        "of Ray has GPUs, otherwise none",
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]] = Field(
        default_factory=dict, description="custom ones, by name"
    )

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, key in (("CPU", "cpus"), ("GPU", "gpus")):
            if name in resources:
                raise ValueError(f"must not name {name}; set {key} instead")
        return resources


class RayConfig(Section):
    """Where `launcher: ray` finds its cluster, and what workers take of it."""

    address: str = Field(
        "",
        description='ray://host:port, host:port, "auto" (the cluster that this host is part of); '
        "empty: a Ray of one's own on this host, which ends with the coordinator",
    )
    namespace: str = Field(
        "baton",
        min_length=1,
        description="of the workers' actors; one coordinator's alone: what an earlier one left "
        "there is ended",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's own, of the workers' actors, passed through"
    )
    connect_timeout_s: PositiveSeconds = Field(60.0, description="longest wait for Ray")
    placement_timeout_s: PositiveSeconds = Field(
        300.0, description="a worker that finds no room for so long is given up"
    )
    prefill: RayPoolConfig = Field(default_factory=RayPoolConfig)
    decode: RayPoolConfig = Field(default_factory=RayPoolConfig)

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value in ("", "auto"):
            return value
        host, _, port = value.removeprefix("ray://").rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError('must be empty, "auto", host:port or ray://host:port')
        return value


class SimulatedConfig(Section):
    """The simulated engine's timing: milliseconds from the latency model, times `time_scale`."""

    time_scale: float = Field(1.0, ge=0, description="0 answers at once")
    prefill_base_ms: float = Field(5.0, ge=0)
    prefill_per_token_ms: float = Field(0.05, ge=0)
    prefill_per_token_squared_ms: float = Field(0.0, ge=0)
    step_base_ms: float = Field(8.0, ge=0)
    step_per_request_ms: float = Field(0.2, ge=0)
    step_per_kv_token_ms: float = Field(0.0, ge=0)
    max_model_len: PositiveInt = 8192
    kv_tokens: PositiveInt = 65536
    block_size_tokens: PositiveInt = 16
    prefix_caching: bool = Field(True, description="keep finished blocks for equal prefixes")
    num_layers: PositiveInt = 4
    block_bytes: PositiveInt = Field(1024, ge=64, description="of one block of one layer")
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048


class BatonConfig(Section):
    """Everything. `baton config show` prints it with the defaults filled in."""

    model: str = Field(
        "glossary",
        description='local directory, hub id, "glossary": the toy that ships with Baton, '
        'or "demo": random weights, made on first use',
    )
    served_model_name: str = Field("", description="what requests call it; empty: from model")
    engine: Literal["vllm", "simulated"] = "vllm"
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM's own engine arguments, passed through"
    )
    lora_adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters: local directory or hub id of each, by the name that requests "
        "give as their model; every worker loads all",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    lanes: LanesConfig = Field(default_factory=LanesConfig)
    tenant_defaults: TenantConfig = Field(default_factory=TenantConfig)
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict, description="by name; what one leaves out is tenant_defaults'"
    )
    prefill: PoolConfig = Field(default_factory=PoolConfig)
    decode: DecodePoolConfig = Field(default_factory=DecodePoolConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    latency: LatencyConfig = Field(default_factory=LatencyConfig)
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)
    scaling: ScalingSection = Field(default_factory=ScalingSection)
    launcher: Literal["local", "ray"] = Field(
        "local", description="how baton up starts workers: on this host, or through Ray"
    )
    ray: RayConfig = Field(default_factory=RayConfig)

    @field_validator("tenants")
    @classmethod
    def _have_defaults(
        cls, tenants: dict[str, TenantConfig], info: ValidationInfo
    ) -> dict[str, TenantConfig]:
        defaults = info.data.get("tenant_defaults", TenantConfig())
        return {
            name: defaults.model_copy(update=one.model_dump(exclude_unset=True))
            for name, one in tenants.items()
        }

    @model_validator(mode="after")
    def _tenants_make_sense(self) -> BatonConfig:
        for name in self.tenants:
            if not is_tenant(name):
                raise ValueError(f"tenants: a name is {name!r}; must be {TENANT_NAMES}")
        named = {f"tenants.{name}": tenant for name, tenant in self.tenants.items()}
        for key, tenant in {"tenant_defaults": self.tenant_defaults, **named}.items():
            if tenant.burst_tokens is not None and tenant.tokens_per_s is None:
                raise ValueError(
                    f"{key}.burst_tokens: is {tenant.burst_tokens}; needs tokens_per_s, "
                    "the rate at which it fills again"
                )
        return self

    @model_validator(mode="after")
    def _adapters_make_sense(self) -> BatonConfig:
        for name, path in self.lora_adapters.items():
            if not name or name == self.model_name:
                taken = f"must not be empty, nor {self.model_name!r}, which is the base model's"
                raise ValueError(f"lora_adapters: a name is {name!r}; {taken}")
            if not path:
                raise ValueError(f"lora_adapters.{name}: is empty; must be a directory or hub id")
        return self

    @model_validator(mode="after")
    def _ranks_match(self) -> BatonConfig:
        """Rank i hands over to rank i."""
        sizes = [self.tensor_parallel_size(pool) for pool in (self.prefill, self.decode)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"tensor_parallel_size is {sizes[0]} for prefill and {sizes[1]} for decode; rank i "
                "hands over to rank i: both pools must have the same size"
            )
        return self

    def tensor_parallel_size(self, pool: PoolConfig) -> Any:
        """Ranks of each of a pool's engines, as configured: vLLM checks that it is a number."""
        return (self.engine_args | pool.engine_args).get("tensor_parallel_size", 1)

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self.served_model_name or Path(self.model).name


def parse(values: Mapping[str, Any], source: str) -> BatonConfig:
    """Builds a configuration from plain values.

    Raises:
        ConfigError: with one line per wrong key.
    """
    try:
        return BatonConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in _explain(error)]
        raise ConfigError("\n".join(lines)) from None


def load(path: str | None, overrides: Mapping[str, Any] | None = None) -> BatonConfig:
    """Reads a YAML file ("-" is standard input, None is defaults) and lays overrides over it.

    Args:
        path: of the file.
        overrides: nested like the file; None values are left out.

    Raises:
        ConfigError: unreadable file, not YAML, wrong or unknown keys.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(sys.stdin if path == "-" else Path(path).read_text()) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: is a {type(values).__name__}; must be a mapping of keys")
    return parse(_merged(values, overrides or {}), path or "command line")


def dump(config: BatonConfig) -> str:
    """The effective configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def shown(config: BatonConfig) -> str:
    """The same for people: what looks like a secret is left out."""
    return yaml.safe_dump(_without_secrets(config.model_dump(mode="json")), sort_keys=False)


def split_address(address: str, key: str) -> tuple[str, int]:
    """host:port as its parts.

    Raises:
        ConfigError: naming `key` when it is not host:port.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key}: is {address!r}; must be host:port with a port up to 65535")
    return host, int(port)


def _without_secrets(value: Any, key: str = "") -> Any:
    """Engine arguments and Ray's env_vars may hold some (hf_token), and addresses a password."""
    if isinstance(value, dict):
        return {name: _without_secrets(one, str(name)) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_secrets(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.search(key):
        return "***"
    return _PASSWORD.sub("//***@", value)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        elif isinstance(value, Mapping):
            merged[key] = _merged({}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            yield f"{key}: unknown key{_nearest(path)}"
        elif not path:
            yield problem["msg"].removeprefix("Value error, ")
        elif path[0] == "security":
            # A secret may stand there by mistake.
            yield f"{key}: {problem['msg'].removeprefix('Value error, ')}"
        else:
            allowed = problem["msg"].removeprefix("Value error, ").lower()
            yield f"{key}: is {problem['input']!r}; {allowed}"


def _nearest(path: list[str]) -> str:
    section: Any = BatonConfig
    for part in path[:-1]:
        known = get_args(section)
        section = known[-1] if known else section.model_fields[part].annotation
    hint = did_you_mean(path[-1], section.model_fields, cutoff=0.5)
    return hint or f"; known: {', '.join(section.model_fields)}"
