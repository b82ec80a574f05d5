"""Renders chats with images as vLLM does, and makes the image features of vLLM's requests.

A worker that computes a prompt gets the image files and processes them. A worker that gets the
prompt's KV cache needs only where the images stand: its requests have the same placeholders and
hashes, so that vLLM names their blocks alike, and no pixels.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.utils import argsort_mm_positions
from vllm.renderers.params import ChatParams
from vllm.v1.engine.input_processor import InputProcessor

from baton.engine.base import EngineRequest, RenderedPrompt, RequestRejected
from baton.runtime.errors import InvalidArgument
from baton.runtime.prompts.prompt_images import image_id
from baton.v1 import common_pb2, inference_pb2

# Architectures whose answers were compared with those of one plain vLLM (docs/models.md).
COMPARED = ("Idefics3ForConditionalGeneration",)
# Formats of files, by Pillow's names.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_IMAGE = "image"
# Memory for the latest rendered chats: the worker that renders a chat often computes it, too.
_MAX_KEPT_BYTES = 2**28


def image_refusal(config: VllmConfig) -> str | None:
    """Returns why a model's chats may not have images here, in words; None: they may."""
    model, lora = config.model_config, config.lora_config
    if not model.supports_multimodal_inputs:
        return "the model takes none, or engine_args turn them off"
    if model.architecture not in COMPARED:
        return (
            f"they were not compared with plain vLLM for {model.architecture}; they were for "
            f"{', '.join(COMPARED)}"
        )
    if lora is not None and lora.enable_tower_connector_lora:
        return "engine_args.enable_tower_connector_lora is on: adapters would share images"
    return None


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A chat as vLLM's processor gives it.

    Attributes:
        token_ids: The prompt with placeholders.
        features: Its images for vLLM, in order, with their pixels.
        num_bytes: Size of the pixels.
    """

    token_ids: list[int]
    features: list[MultiModalFeatureSpec]
    num_bytes: int


class VllmImages:
    """Renders chats with images; its methods may be called from any thread and take a while.

    Args:
        inputs: vLLM's input processor.
    """

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._refusal = image_refusal(inputs.vllm_config)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Rendered] = OrderedDict()
        self._num_kept_bytes = 0

    def render(self, chat: inference_pb2.ChatPrompt, max_pixels: int) -> RenderedPrompt:
        """Returns the prompt of a chat. Raises InvalidArgument: see Engine.render."""
        if self._refusal is not None:
            raise InvalidArgument("chat", "images", f"images are not served: {self._refusal}")
        _check_pixels(chat, max_pixels)
        rendered = self._rendered(chat)
        for number, feature in enumerate(rendered.features, start=1):
            most = self._inputs.mm_encoder_cache_size
            if (count := feature.mm_position.get_num_embeds()) > most:
                allowed = f"at most {most} tokens, the size of vLLM's encoder cache"
                raise InvalidArgument(f"chat image {number}", f"{count} tokens", allowed)
        return RenderedPrompt(
            rendered.token_ids, [_described(feature) for feature in rendered.features]
        )

    def processed(
        self, request: EngineRequest, chat: inference_pb2.ChatPrompt
    ) -> list[MultiModalFeatureSpec]:
        """Returns the images of a request with their pixels, from its chat.

        Raises:
            RequestRejected: This engine does not render the chat, or to another prompt.
        """
        try:
            rendered = self._rendered(chat)
        except InvalidArgument as error:
            raise RequestRejected(str(error)) from error
        prompt = list(request.prompt_token_ids[: len(rendered.token_ids)])
        images = [_described(feature) for feature in rendered.features]
        if prompt != rendered.token_ids or images != list(request.images):
            raise RequestRejected(
                "this engine renders the chat to another prompt than the worker that rendered it "
                "first: model, vLLM or engine_args differ"
            )
        return rendered.features

    def _rendered(self, chat: inference_pb2.ChatPrompt) -> _Rendered:
        key = hashlib.sha256(chat.SerializeToString(deterministic=True)).digest()
        # One chat at a time: the processor is not made for several threads.
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            found = self._kept[key] = self._render(chat)
            self._num_kept_bytes += found.num_bytes
            while self._num_kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1:
                self._num_kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
            return found

    def _render(self, chat: inference_pb2.ChatPrompt) -> _Rendered:
        messages = [_message(one) for one in chat.messages]
        add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        kwargs = json.loads(chat.template_kwargs) if chat.template_kwargs else {}
        tools = json.loads(chat.tools) if chat.tools else None
        params = ChatParams(
            chat_template_kwargs={
                **kwargs,
                "add_generation_prompt": add,
                "continue_final_message": chat.continue_final_message,
                "tools": tools,
            }
        )
        try:
            _, (made,) = self._inputs.renderer.render_chat([messages], params)
        except Exception as error:
            # vLLM and the model's processor raise many types for a chat that they do not take.
            _find_broken(chat)
            roles = [message.role for message in chat.messages]
            allowed = f"vLLM does not render them: {' '.join(str(error).split())}"
            raise InvalidArgument("chat.messages", roles, allowed) from error
        placeholders, hashes = made["mm_placeholders"], made["mm_hashes"]
        features = [
            MultiModalFeatureSpec(
                data=made["mm_kwargs"][modality][index],
                modality=modality,
                identifier=hashes[modality][index],
                mm_position=placeholders[modality][index],
                mm_hash=hashes[modality][index],
            )
            for modality, index in argsort_mm_positions(placeholders)
        ]
        token_ids = list(made["prompt_token_ids"])
        if features and features[-1].mm_position.offset + features[-1].mm_position.length >= len(
            token_ids
        ):
            # The last token is always computed, also after a handoff.
            raise InvalidArgument("chat.messages", "...", "the prompt must not end with an image")
        num_bytes = sum(
            element.data.nbytes
            for feature in features
            for element in feature.data.values()
            if isinstance(element.data, torch.Tensor)
        )
        return _Rendered(token_ids, features, num_bytes)


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Returns a message as vLLM takes it."""
    fields = json.loads(message.fields) if message.fields else {}
    content: str | list[dict[str, Any]] = message.content
    if message.parts:
        content = [_part(part) for part in message.parts]
    return {"role": message.role, "content": content, **fields}


def _part(part: inference_pb2.ContentPart) -> dict[str, Any]:
    if not part.HasField("image"):
        return {"type": "text", "text": part.text}
    encoded = base64.b64encode(part.image).decode()
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{encoded}"},
        # Names the image in vLLM's hashes of blocks.
        "uuid": image_id(part.image),
    }


def _check_pixels(chat: inference_pb2.ChatPrompt, max_pixels: int) -> None:
    """Reads the sizes of the images from their first bytes, before they are decoded.

    Raises:
        InvalidArgument: An image cannot be read, or they have too many pixels together.
    """
    num_pixels = 0
    for field, data in _files(chat):
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
        except Exception as error:  # Pillow's readers raise many types.
            raise _unreadable(field, data, error) from error
        num_pixels += width * height
        if num_pixels > max_pixels:
            allowed = (
                f"together with the images before it at most {max_pixels} pixels "
                "(images.max_pixels)"
            )
            raise InvalidArgument(field, f"{width} x {height} pixels", allowed)


def _find_broken(chat: inference_pb2.ChatPrompt) -> None:
    """Raises InvalidArgument for the first image that cannot be decoded."""
    for field, data in _files(chat):
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                image.load()
        except Exception as error:  # Pillow's readers raise many types.
            raise _unreadable(field, data, error) from error


def _unreadable(field: str, data: bytes, error: Exception) -> InvalidArgument:
    reason = " ".join(str(error).split())
    return InvalidArgument(field, f"{len(data)} bytes", f"cannot be read as an image: {reason}")


def _files(chat: inference_pb2.ChatPrompt) -> Sequence[tuple[str, bytes]]:
    """Returns the path and the file of each image."""
    return [
        (f"chat.messages[{index}].parts[{number}].image", part.image)
        for index, message in enumerate(chat.messages)
        for number, part in enumerate(message.parts)
        if part.HasField("image")
    ]


def _described(feature: MultiModalFeatureSpec) -> common_pb2.PromptImage:
    if feature.modality != _IMAGE:
        raise InvalidArgument("chat.messages", feature.modality, "only images are served")
    position = feature.mm_position
    mask = b"" if position.is_embed is None else bytes(position.is_embed.to(torch.uint8).tolist())
    return common_pb2.PromptImage(
        id=feature.identifier, offset=position.offset, num_tokens=position.length, mask=mask
    )


def without_pixels(image: common_pb2.PromptImage) -> MultiModalFeatureSpec:
    """Returns an image for vLLM without its pixels, for a request that gets its KV cache."""
    mask = torch.tensor(list(image.mask), dtype=torch.bool) if image.mask else None
    return MultiModalFeatureSpec(
        data=None,
        modality=_IMAGE,
        identifier=image.id,
        mm_position=PlaceholderRange(image.offset, image.num_tokens, mask),
        mm_hash=image.id,
    )
