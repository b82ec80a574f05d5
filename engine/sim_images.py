"""Renders chats with images for the simulated engine, which gives each image the same tokens."""

from __future__ import annotations

from baton.engine.base import RenderedPrompt
from baton.runtime.errors import InvalidArgument
from baton.runtime.prompts.prompt_images import image_id, images_of
from baton.runtime.prompts.tokenization import Tokenizer
from baton.v1 import common_pb2, inference_pb2

# Stands for an image in the text of a prompt: a character for private use.
_MARK = "\ue000"
_PLACEHOLDER = 0


class ImageRenderer:
    """Renders chats with images; takes a while to make.

    Args:
        model: Local directory or hub ID with a tokenizer.json.
        num_image_tokens: Tokens of one image.

    Raises:
        ConfigError: The model has no tokenizer.
    """

    def __init__(self, model: str, num_image_tokens: int) -> None:
        self._tokenizer, self._num_image_tokens = Tokenizer(model), num_image_tokens

    def render(self, chat: inference_pb2.ChatPrompt) -> RenderedPrompt:
        """Returns the prompt of a chat.

        Raises:
            InvalidArgument: The chat template refuses it, or a text has the mark of images.
        """
        files, marked = images_of(chat), inference_pb2.ChatPrompt()
        marked.CopyFrom(chat)
        for index, message in enumerate(marked.messages):
            if any(
                _MARK in text for text in (message.content, *(one.text for one in message.parts))
            ):
                raise InvalidArgument(f"chat.messages[{index}]", _MARK, "must not have U+E000")
            if message.parts:
                texts = [_MARK if one.HasField("image") else one.text for one in message.parts]
                message.content = "\n".join(texts)
                del message.parts[:]
        first, *rest = self._tokenizer.render(marked).split(_MARK)
        tokens = self._encode(first)
        images = []
        for file, text in zip(files, rest, strict=True):
            image = common_pb2.PromptImage(
                id=image_id(file), offset=len(tokens), num_tokens=self._num_image_tokens
            )
            images.append(image)
            tokens += [_PLACEHOLDER] * self._num_image_tokens + self._encode(text)
        return RenderedPrompt(tokens, images)

    def close(self) -> None:
        self._tokenizer.close()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_text(text, add_special_tokens=False).tolist()
