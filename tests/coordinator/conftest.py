"""Shared fixtures of the coordinator's tests: a core under a virtual clock, and real servers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from baton.coordinator.core.core import Core
from baton.coordinator.server.server import Coordinator
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import StreamKey, Submission
from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig, parse
from baton.runtime.network import rpc
from baton.v1 import admin_pb2_grpc, cluster_pb2, common_pb2, inference_pb2_grpc, kv_transfer_pb2
from tests.coordinator.scripted_worker import attached
from tests.coordinator.two_fleets import TwoFleets
from tests.coordinator.two_pairs import pairs

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE

CONFIG = CoreConfig(
    model_name="demo",
    max_running_requests=16,
    max_request_s=600.0,
    worker_timeout_s=10.0,
    worker_silent_s=2.0,
    worker_stuck_s=20.0,
    max_recovery_s=30.0,
    max_lost_attempts=4,
    handoff_timeout_s=10.0,
    max_prefill_requests=4,
    max_decode_requests=4,
    local_prefill=False,
    lanes=LanesConfig(
        interactive=InteractiveLaneConfig(max_queued=8), batch=BatchLaneConfig(max_queued=8)
    ),
)


def hello(name: str, pool: int, start: int = 1, **changes) -> cluster_pb2.Hello:
    """Builds the Hello of a worker of the demo model; `changes` override fields of the Hello."""
    message = cluster_pb2.Hello(
        worker_id=name,
        incarnation=start,
        role=pool,
        state=cluster_pb2.WORKER_STATE_SERVING,
        model=common_pb2.ModelDescription(
            name="demo", revision="r1", max_model_len=1024, vocab_size=512
        ),
        fingerprint=kv_transfer_pb2.KvFingerprint(
            protocol_version=1,
            model="demo",
            dtype="float32",
            num_layers=4,
            num_kv_heads=2,
            head_size=16,
            block_size_tokens=16,
            block_bytes=1024,
            layout="heads,tokens,content",
            tp_size=1,
        ),
        capacity=cluster_pb2.Capacity(
            kv_tokens=65536,
            block_size_tokens=16,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_send_bytes=2**20,
            max_receive_bytes=2**20,
            supports_forced_tokens=True,
            keeps_prefixes=True,
        ),
        kv_address=f"{name}.test:1",
        engine="scripted",
    )
    for field, value in changes.items():
        if hasattr(value, "DESCRIPTOR"):
            getattr(message, field).CopyFrom(value)
        elif isinstance(value, dict):
            getattr(message, field).update(value)
        else:
            setattr(message, field, value)
    return message


class SendDelta(NamedTuple):
    """The decoded delta that one SendDeltas effect carries for one stream."""

    to: StreamKey
    delta: common_pb2.TokenDelta


class World:
    """A core under a virtual clock that records every effect of the core.

    Attributes:
        now: Virtual time in seconds.
        sent: Effects for each client stream; deltas are decoded into SendDelta.
        commands: Commands sent to each worker, by worker ID.
        membership: All other effects: welcomes, refusals, fences, starts and ends of workers.
    """

    def __init__(self, **changes) -> None:
        self.now = 1000.0
        self.core = Core(replace(CONFIG, **changes), lambda count: next(self._ids).to_bytes(count))
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self.sent: dict[StreamKey, list] = defaultdict(list)
        self.commands: dict[str, list] = defaultdict(list)
        self.membership: list = []

    def handle(self, event) -> list:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, ev.SendDeltas):
                for to, encoded in effect.deltas:
                    delta = common_pb2.TokenDelta.FromString(encoded)
                    self.sent[to].append(SendDelta(to, delta))
            elif isinstance(effect, ev.SendCommand):
                self.commands[effect.worker[0]].append(effect.command)
            elif hasattr(effect, "to"):
                self.sent[effect.to].append(effect)
            else:
                self.membership.append(effect)
        self.core.check_integrity()
        return effects

    def attach(self, worker_id: str, role: int, incarnation: int = 1, **changes) -> list:
        return self.handle(ev.WorkerAttached(hello(worker_id, role, incarnation, **changes)))

    def pair(self) -> World:
        self.attach("p", PREFILL)
        self.attach("d", DECODE)
        return self

    def submit(self, session: int = 1, num_prompt: int = 20, **changes) -> StreamKey:
        """Submits a request and returns its stream.

        Args:
            session: Client session of the stream.
            num_prompt: Length of the prompt in tokens.
            changes: Fields of the Submission; `sampling` is a dict of SamplingParams fields.
        """
        number = next(self._numbers)
        to = StreamKey(session, number)
        sampling = common_pb2.SamplingParams(**{"max_tokens": 8, **changes.pop("sampling", {})})
        fields = {
            "to": to,
            "request_id": f"r{number}",
            "prompt_token_ids": list(range(num_prompt)),
            "sampling": sampling,
            "lane": common_pb2.LANE_INTERACTIVE,
            "arrived_at": self.now,
            **changes,
        }
        self.handle(ev.Submitted(Submission(**fields)))
        return to

    def step(self, worker_id: str, *outputs, incarnation: int = 1) -> list:
        return self.handle(
            ev.WorkerStep((worker_id, incarnation), cluster_pb2.StepOutputs(outputs=outputs))
        )

    def step_columns(
        self, worker_id: str, *tokens: tuple[int, int, int], incarnation: int = 1
    ) -> list:
        """Reports a step in the column format: one token per output, each with the text "é".

        Args:
            worker_id: Worker that reports the step.
            tokens: One (handle, offset, token ID) per output.
            incarnation: Incarnation of the worker.
        """
        step = cluster_pb2.StepOutputs()
        for handle, offset, token_id in tokens:
            delta = common_pb2.TokenDelta(offset=offset, token_ids=[token_id], text="é")
            step.tokens.handles.append(handle)
            step.tokens.offsets.append(offset)
            step.tokens.token_ids.append(token_id)
            step.tokens.num_text_chars.append(1)
            step.tokens.deltas.append(delta.SerializeToString())
        return self.handle(ev.WorkerStep((worker_id, incarnation), step))

    def after(self, seconds: float) -> None:
        """Advances the clock; the core gets a Tick at each of its deadlines."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.handle(ev.Tick())
        self.now = end

    def wait(self, seconds: float, *, silent: Collection[str] = ()) -> None:
        """Advances the clock in steps of one second; workers send a sign of life after each step.

        Args:
            seconds: Duration; a whole number.
            silent: IDs of workers that send no sign of life.
        """
        for _ in range(round(seconds)):
            self.after(1.0)
            for worker in self.core.workers:
                if worker.id not in silent:
                    self.handle(ev.WorkerHeard(worker.key))

    def kinds(self, to: StreamKey) -> list[str]:
        return [type(effect).__name__.removeprefix("Send") for effect in self.sent[to]]

    def tokens(self, to: StreamKey) -> list[int]:
        deltas = [one.delta for one in self.sent[to] if isinstance(one, SendDelta)]
        return [token for delta in deltas for token in delta.token_ids]

    def last(self, to: StreamKey):
        return self.sent[to][-1]


def output(
    request: str,
    tokens=(),
    offset: int = 0,
    text: str = "",
    finish: int | None = None,
    stop: str = "",
    attempt: int = 1,
    timings: dict | None = None,
) -> cluster_pb2.RequestOutput:
    """Builds the output of one request in a step.

    Args:
        request: Request ID.
        tokens: New output tokens.
        offset: Position of the first new token in the output.
        text: New text.
        finish: FinishReason; 0 means that the prefill worker has done its part; None: no end.
        stop: Stop string or token ID that ended the output.
        attempt: Attempt number.
        timings: Fields of StageTimings.
    """
    message = cluster_pb2.RequestOutput(request_id=request, attempt=attempt)
    if tokens or text:
        message.delta.CopyFrom(common_pb2.TokenDelta(offset=offset, token_ids=tokens, text=text))
    if finish is not None:
        message.finished.CopyFrom(cluster_pb2.WorkerFinished(reason=finish, stop=stop))
    if timings is not None:
        message.timings.CopyFrom(cluster_pb2.StageTimings(**timings))
    return message


@pytest.fixture
def world() -> World:
    """A core with one serving worker in each pool: "p" and "d"."""
    return World().pair()


@pytest.fixture
def new_world() -> type[World]:
    return World


@pytest.fixture
def out():
    return output


@pytest.fixture
def two_pairs(new_world) -> World:
    """A core with two serving workers in each pool: "p", "p2", "d" and "d2"."""
    return pairs(new_world())


@pytest.fixture
def two_fleets(new_world, out):
    """Factory of a world with two fleets and a rollout of the second; share=None: no rollout."""

    def make(share=1.0, **changes):
        return TwoFleets(new_world, out, share, **changes)

    return make


@pytest.fixture
def say_hello():
    return hello


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(directory: Path) -> Path:
    """Writes a model directory with the files that the coordinator reads: at most 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": 512, "max_position_embeddings": 1024}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
def fresh_model_dir(tmp_path) -> Path:
    return make_model(tmp_path / "demo")


@pytest.fixture
def coordinator_config(model_dir):
    """Factory of a configuration from its `lanes` section and keys of its `coordinator` section."""

    def build(lanes=None, **coordinator):
        values = {"listen": "127.0.0.1:0", "heartbeat_s": 0.2, "worker_timeout_s": 5.0}
        sections = {"coordinator": {**values, **coordinator}, "lanes": lanes or {}}
        sections["decode"] = {"local_prefill": False}
        return parse({"model": str(model_dir), **sections}, "test")

    return build


@pytest_asyncio.fixture
async def coordinator(coordinator_config):
    async with Coordinator(coordinator_config()) as running:
        yield running
        assert running.shell.core.num_requests == 0
        running.shell.core.check_integrity()


@pytest_asyncio.fixture
async def channel(coordinator):
    async with rpc.channel(coordinator.address) as channel:
        yield channel


@pytest.fixture
def inference(channel):
    return inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture
def admin(channel):
    return admin_pb2_grpc.AdminStub(channel)


@pytest.fixture
def pair(coordinator, say_hello):
    """Context manager that attaches one scripted worker to each pool of `coordinator`."""

    def attach(**options):
        hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
        return attached(coordinator.address, *hellos, **options)

    return attach
