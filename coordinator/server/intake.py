"""Turns client messages into submissions: checks, identifies and tokenizes them."""

from __future__ import annotations

import contextlib
import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace

from google.rpc import code_pb2

from baton.coordinator.core.core import Core
from baton.coordinator.core.resumed_stop import known_stop
from baton.coordinator.lanes.admission import queue_full
from baton.coordinator.server.image_checks import HeldImages, check_images
from baton.coordinator.server.message_limits import TOKEN_BYTES, max_command_bytes
from baton.coordinator.server.renders import RenderedChat, Renders
from baton.coordinator.server.validation import (
    ModelLimits,
    check_lane,
    check_lengths,
    check_request,
    check_token_ids,
)
from baton.coordinator.state.lanes import LANES, lane_config
from baton.coordinator.state.requests import Request, StreamKey, Submission, with_max_tokens
from baton.runtime.config import BatonConfig
from baton.runtime.enum_names import lane_name
from baton.runtime.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidArgument,
    ResourceExhausted,
)
from baton.runtime.fair_places import FairPlaces
from baton.runtime.names import DEFAULT_TENANT, cache_salt_of
from baton.runtime.prompts.tokenization import Tokenizer
from baton.runtime.security.access import ANYONE, Access, Caller
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2, inference_pb2

# Cache of valid sampling parameters: number of entries, and maximum encoded size of an entry.
_MAX_SAMPLINGS, _MAX_SAMPLING_BYTES = 1024, 256
# W3C Trace Context, version 00; other values are ignored, as the recommendation requires.
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


class Intake:
    """Turns requests into submissions.

    Model limits come from the stable revision's workers, also after the last one has left. Before
    the first one attaches, they come from the model's own configuration.

    Args:
        core: The core.
        tokenizer: Tokenizer of the model.
        config: Effective configuration.
        model_path: Path of the model.
        access: Access control; None: every caller is accepted.
        renders: Renders chats with images.
    """

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        config: BatonConfig,
        model_path: str,
        access: Access | None = None,
        *,
        renders: Renders,
    ) -> None:
        self._renders = renders
        self._held_images = HeldImages(config.images)
        self._core, self._tokenizer, self._config = core, tokenizer, config
        self._access = access
        self._model_path = model_path
        self._max_command_bytes = max_command_bytes(config)
        self._known: common_pb2.ModelDescription | None = None
        self._known_limits: tuple[common_pb2.ModelDescription, ModelLimits] | None = None
        # Valid sampling parameters by encoded form and vocabulary size.
        self._samplings: dict[tuple[bytes, int | None], common_pb2.SamplingParams] = {}
        # Requests whose prompts are being tokenized or rendered, or wait for it.
        self._pending = {
            lane: FairPlaces(lane_config(config.lanes, lane).max_queued, self._weight_of)
            for lane in LANES
        }

    def model(self) -> common_pb2.ModelDescription:
        """Description of the served model, as far as known."""
        self._known = self._core.workers.model or self._known
        if self._known is not None:
            return self._known
        return common_pb2.ModelDescription(
            name=self._core.model_name,
            max_model_len=self._tokenizer.max_model_len or 0,
            vocab_size=self._tokenizer.vocab_size,
            tokenizer=self._model_path,
            adapters=[
                common_pb2.LoraAdapter(name=name) for name in sorted(self._config.lora_adapters)
            ],
        )

    @property
    def needs_credentials(self) -> bool:
        return self._access is not None and self._access.needs_credentials

    def caller(
        self,
        request: inference_pb2.GenerateRequest,
        authorization: str,
        peer: str,
        now: float,
    ) -> Caller:
        """Identifies the caller by the request's credential, or else by the credential of its call.

        Args:
            request: the client's request.
            authorization: credential of the gRPC call; empty: none.
            peer: address of the client, for logs.
            now: time by the core's clock.

        Raises:
            Unauthenticated: There is no valid credential.
            PermissionDenied: The caller may not send this request.
        """
        if self._access is None or not self._access.needs_credentials:
            return ANYONE
        with self._counting(request, now):
            caller = self._access.caller(request.authorization or authorization, peer=peer)
            self._access.check_request(
                caller,
                tenant=request.tenant,
                lane="batch" if request.lane == common_pb2.LANE_BATCH else "interactive",
                sampling=request.sampling,
                peer=peer,
            )
        return caller

    def acquire_call_slot(
        self, caller: Caller, call: int, request: inference_pb2.GenerateRequest, now: float
    ) -> Callable[[], None]:
        """Charges the request's call to its caller; see Access.acquire_call_slot."""
        assert self._access is not None
        older = self._running(request, caller) if request.resume.token_ids else None
        with self._counting(request, now):
            return self._access.acquire_call_slot(
                caller, call, older=older.submission.to.session if older is not None else None
            )

    def acquire_slot(
        self, caller: Caller, request: inference_pb2.GenerateRequest, now: float
    ) -> Callable[[], None] | None:
        """Takes one of the caller's request slots; see Access.acquire_slot."""
        if self._access is None:
            return None
        with self._counting(request, now):
            resumes = len(request.resume.token_ids) > 0
            return self._access.acquire_slot(caller, request.request_id, resumes=resumes)

    def hold_images(
        self, request: inference_pb2.GenerateRequest, now: float
    ) -> Callable[[], None] | None:
        """Counts the memory of the request's images; see HeldImages.hold."""
        with self._counting(request, now):
            return self._held_images.hold(request)

    async def submission(
        self,
        request: inference_pb2.GenerateRequest,
        to: StreamKey,
        arrived_at: float,
        deadline_s: float | None = None,
        caller: Caller = ANYONE,
    ) -> Submission:
        """Checks and tokenizes one request.

        Args:
            request: the client's request.
            to: stream that receives the request's events.
            arrived_at: time of arrival, by the core's clock.
            deadline_s: seconds until the deadline of the gRPC call; None: no deadline.
            caller: caller of the request.

        Raises:
            BatonError: The request is invalid, or refused for overload.
        """
        with self._counting(request, arrived_at):
            lane, sampling = self._checked(request, caller)
            prompt = array("I", request.resume.prompt_token_ids)
            chat: RenderedChat | None = None
            is_rendered = has_images(request)
            if is_rendered or not prompt:
                pending, tenant = self._pending[lane], _tenant(request, caller)
                pending.take(tenant)
                try:
                    if is_rendered:
                        chat = await self._rendered(request)
                        prompt = chat.prompt_token_ids
                    else:
                        prompt = await self._tokenizer.prompt_token_ids(request)
                finally:
                    pending.give_back(tenant)
            return self._submission(
                request, sampling, prompt, to, arrived_at, deadline_s, caller, chat
            )

    def submission_at_once(
        self,
        request: inference_pb2.GenerateRequest,
        to: StreamKey,
        arrived_at: float,
        caller: Caller = ANYONE,
    ) -> Submission | None:
        """Like `submission`, but without waiting.

        Returns:
            None if the text is so long that it must be tokenized off the event loop.

        Raises:
            BatonError: The request is invalid, or refused for overload.
        """
        known = request.resume.prompt_token_ids
        if has_images(request) or (not known and not self._tokenizer.is_short(request)):
            return None
        try:
            _, sampling = self._checked(request, caller)
            prompt = (
                array("I", known) if known else self._tokenizer.prompt_token_ids_blocking(request)
            )
            return self._submission(request, sampling, prompt, to, arrived_at, None, caller)
        except BatonError as error:
            self._count(request, error, arrived_at)
            raise

    @contextlib.contextmanager
    def _counting(
        self, request: inference_pb2.GenerateRequest, arrived_at: float
    ) -> Iterator[None]:
        """Counts requests that are refused here, because they never reach the core."""
        try:
            yield
        except BatonError as error:
            self._count(request, error, arrived_at)
            raise

    def _count(
        self, request: inference_pb2.GenerateRequest, error: BatonError, arrived_at: float
    ) -> None:
        """Counts a refused request."""
        if not isinstance(error, ResourceExhausted):
            self._core.stats.rejections[code_pb2.Code.Name(error.code).lower()] += 1
            return
        lane = common_pb2.LANE_BATCH
        if request.lane != lane:
            lane = common_pb2.LANE_INTERACTIVE
        self._core.stats.shed(lane, error.reason, arrived_at)

    def _checked(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> tuple[common_pb2.Lane.ValueType, common_pb2.SamplingParams]:
        """Checks a request before any expensive work.

        Returns:
            The request's lane, and its sampling parameters as a message shared by all requests with
            equal parameters.
        """
        limits = self._limits(request)
        encoded = request.sampling.SerializeToString()
        sampling = self._samplings.get((encoded, limits.vocab_size))
        coordinator = self._config.coordinator
        check_request(request, coordinator, limits, sampling_is_known=sampling is not None)
        if request.HasField("chat"):
            check_images(request.chat, self._config.images, taken=limits.takes_images)
        if sampling is None:
            sampling = self._shared_sampling(encoded, limits)
        lane, tenant = request.lane or common_pb2.LANE_INTERACTIVE, _tenant(request, caller)
        pending = self._pending[lane]
        # The core checks admission again after the tokenization. A resumed request that still runs
        # keeps its place in the lane.
        refused = None
        if not request.resume.token_ids or self._running(request, caller) is None:
            refused = self._core.admission_error(lane, tenant)
        if refused is None and not pending.has_room(tenant):
            num = len(pending)
            refused = queue_full(
                f"{num} prompts of the {lane_name(lane)} lane wait to be tokenized",
                num,
                pending.num_of(tenant),
                tenant,
                lane_config(self._config.lanes, lane).max_queued,
                1.0,
            )
        if refused is not None:
            raise refused
        if request.HasField("tokens") or request.resume.prompt_token_ids:
            return lane, sampling
        min_tokens = self._tokenizer.min_tokens(request)
        if limits.max_model_len is not None and min_tokens >= limits.max_model_len:
            raise ContextLengthExceeded(
                request.WhichOneof("prompt") or "prompt",
                min_tokens,
                limits.max_model_len,
                is_lower_bound=True,
            )
        return lane, sampling

    def _submission(
        self,
        request: inference_pb2.GenerateRequest,
        sampling: common_pb2.SamplingParams,
        prompt: array[int],
        to: StreamKey,
        arrived_at: float,
        deadline_s: float | None,
        caller: Caller,
        chat: RenderedChat | None = None,
    ) -> Submission:
        limits, grants = self._limits(request), caller.grants
        if self._access is not None:
            self._access.check_prompt(caller, len(prompt))
        if chat is None and not (request.HasField("tokens") or request.resume.prompt_token_ids):
            # A tokenizer's vocabulary may be larger than the model's.
            check_token_ids(request.WhichOneof("prompt") or "prompt", prompt, limits)
        lane = request.lane or common_pb2.LANE_INTERACTIVE
        lane_limits = lane_config(self._config.lanes, lane)
        check_lengths(request, len(prompt), limits)
        check_lane(request, len(prompt), lane_limits, lane_name(lane))
        timeouts = [deadline_s] if deadline_s is not None else []
        if request.HasField("timeout"):
            timeouts.append(request.timeout.seconds + request.timeout.nanos / 1e9)
        key_limit = grants.max_output_tokens if grants is not None else None
        defaults = [one for one in (lane_limits.max_output_tokens, key_limit) if one is not None]
        if request.default_max_tokens:
            defaults.append(max(request.default_max_tokens, sampling.min_tokens))
        # The workers' context may differ from that of the model's own configuration. So the core
        # cuts max_tokens of requests that come before the first worker, once one has attached:
        # the digest of a request must not depend on when its client resumes it.
        context = limits.max_model_len if self._known is not None else None
        room = (context or math.inf) - len(prompt)
        if not sampling.HasField("max_tokens"):
            if defaults:
                sampling = with_max_tokens(sampling, int(min(*defaults, room)))
        elif sampling.max_tokens > room:
            sampling = with_max_tokens(sampling, int(room))
        known = array("I", request.resume.token_ids)
        tokenizer = self._tokenizer
        stop = known_stop(
            known,
            sampling,
            tokenizer.eos_token_id,
            tokenizer.extra_eos_token_ids,
            tokenizer.decode,
        )
        self._check_command_size(request, sampling, (prompt, known), chat)
        tenant = _tenant(request, caller)
        traceparent = request.traceparent if _TRACEPARENT.fullmatch(request.traceparent) else ""
        return Submission(
            to=to,
            request_id=request.request_id or os.urandom(12).hex(),
            prompt_token_ids=prompt,
            sampling=sampling,
            lane=lane,
            arrived_at=arrived_at,
            timeout_s=min(timeouts, default=None),
            known_token_ids=known,
            known_text_chars=request.resume.num_text_chars,
            known_stop=stop,
            traceparent=traceparent,
            session_id=request.session_id,
            slo_ttft=TtftTarget.from_ms(request.slo.ttft_ms, request.slo.ttft_ms_per_1k_tokens),
            slo_itl_s=request.slo.itl_ms / 1e3 or None,
            adapter="" if request.model == limits.name else request.model,
            tenant=tenant,
            cache_salt=self._cache_salt(tenant),
            revision=request.resume.revision,
            route=request.route,
            images=chat.images if chat is not None else (),
            chat=_copied(request.chat) if chat is not None else None,
        )

    def _check_command_size(
        self,
        request: inference_pb2.GenerateRequest,
        sampling: common_pb2.SamplingParams,
        tokens: Iterable[Sized],
        chat: RenderedChat | None,
    ) -> None:
        """Raises InvalidArgument if the request's commands would not fit a worker's message."""
        num_bytes = sampling.ByteSize() + TOKEN_BYTES * sum(map(len, tokens))
        if chat is not None:
            num_bytes += request.chat.ByteSize() + sum(one.ByteSize() for one in chat.images)
        if num_bytes > self._max_command_bytes:
            raise InvalidArgument(
                request.WhichOneof("prompt") or "prompt",
                f"{num_bytes} bytes with the other parts of a worker's command",
                f"at most {self._max_command_bytes} bytes",
            )

    async def _rendered(self, request: inference_pb2.GenerateRequest) -> RenderedChat:
        """Lets a worker of the request's fleet render its chat."""
        fleet = self._core.fleets.stable
        if request.resume.token_ids:
            fleet = self._core.fleets.find(request.resume.revision) or fleet
        pixels = self._config.images.max_pixels
        return await self._renders.render(request.chat, fleet.workers, pixels)

    def _weight_of(self, tenant: str) -> float:
        return self._config.tenants.get(tenant, self._config.tenant_defaults).weight

    def _cache_salt(self, tenant: str) -> str:
        """Returns the salt that hides KV blocks from other tenants; empty: tenants share them."""
        return "" if self._config.kv_store.share == "all" else cache_salt_of(tenant)

    def _running(self, request: inference_pb2.GenerateRequest, caller: Caller) -> Request | None:
        """The running request with the same ID and tenant; None if there is none."""
        name, tenant = request.request_id, _tenant(request, caller)
        return self._core.running_request(name, tenant) if name else None

    def _shared_sampling(self, encoded: bytes, limits: ModelLimits) -> common_pb2.SamplingParams:
        """Returns sampling parameters as a shared message, which must not be changed.

        The message is a copy: a part of the request's message would keep the whole request,
        including its prompt, in memory.

        Args:
            encoded: sampling parameters that passed the checks.
            limits: model limits used by the checks.
        """
        found = common_pb2.SamplingParams.FromString(encoded)
        if len(encoded) <= _MAX_SAMPLING_BYTES:
            self._samplings[encoded, limits.vocab_size] = found
            if len(self._samplings) > _MAX_SAMPLINGS:
                del self._samplings[next(iter(self._samplings))]
        return found

    def _limits(self, request: inference_pb2.GenerateRequest) -> ModelLimits:
        model, known = self.model(), self._known_limits
        if request.resume.token_ids:
            # A resumed request stays in its fleet, which may have adapters that others lack.
            fleet = self._core.fleets.find(request.resume.revision)
            if fleet is not None:
                model = fleet.workers.model or model
        if known is None or known[0] is not model:
            limits = ModelLimits(
                model.name,
                model.max_model_len or None,
                model.vocab_size or None,
                frozenset(adapter.name for adapter in model.adapters),
                model.takes_images if self._known is not None else None,
            )
            known = self._known_limits = model, limits
        if self._known is None and request.resume.token_ids:
            # The earlier coordinator has checked the request against the context of the workers.
            return replace(known[1], max_model_len=None)
        return known[1]


def has_images(request: inference_pb2.GenerateRequest) -> bool:
    """Whether the request has images, so that a worker must render its prompt."""
    return request.HasField("chat") and any(
        part.HasField("image") for message in request.chat.messages for part in message.parts
    )


def _copied(chat: inference_pb2.ChatPrompt) -> inference_pb2.ChatPrompt:
    """Returns a copy; the original would keep the whole message in memory."""
    copy = inference_pb2.ChatPrompt()
    copy.CopyFrom(chat)
    return copy


def _tenant(request: inference_pb2.GenerateRequest, caller: Caller) -> str:
    """Tenant that the request is charged to."""
    if caller.grants is not None:
        return caller.grants.tenant
    return request.tenant or DEFAULT_TENANT
