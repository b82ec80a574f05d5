"""Checks the images of a chat, and bounds the memory of all of them."""

from __future__ import annotations

from collections.abc import Callable

from baton.runtime.config import ImagesConfig
from baton.runtime.errors import InvalidArgument, ResourceExhausted
from baton.runtime.prompts.prompt_images import FORMATS, image_format, images_of
from baton.v1 import inference_pb2


def check_images(
    chat: inference_pb2.ChatPrompt, limits: ImagesConfig, *, taken: bool | None
) -> None:
    """Checks number, size and format of a chat's images; only a worker decodes the pixels.

    Args:
        chat: Chat prompt of a request.
        limits: Configured limits (`images`).
        taken: Whether the model takes images; None: not known yet.

    Raises:
        InvalidArgument: An image is refused; `field` names its content part.
    """
    num_images = num_bytes = 0
    for index, message in enumerate(chat.messages):
        for number, part in enumerate(message.parts):
            if not part.HasField("image"):
                continue
            field = f"chat.messages[{index}].parts[{number}].image"
            size = len(part.image)
            if taken is False:
                raise InvalidArgument(field, f"{size} bytes", "this model takes no images")
            if image_format(part.image) is None:
                raise InvalidArgument(field, part.image[:16], f"must be a file of {FORMATS}")
            if size > limits.max_image_bytes:
                allowed = f"at most {limits.max_image_bytes} bytes (images.max_image_bytes)"
                raise InvalidArgument(field, f"{size} bytes", allowed)
            num_images, num_bytes = num_images + 1, num_bytes + size
            if num_images > limits.max_count:
                allowed = f"at most {limits.max_count} images in a request (images.max_count)"
                raise InvalidArgument(field, f"image {num_images}", allowed)
            if num_bytes > limits.max_bytes:
                allowed = (
                    f"together with the images before it at most {limits.max_bytes} bytes "
                    "(images.max_bytes)"
                )
                raise InvalidArgument(field, f"{num_bytes} bytes", allowed)


class HeldImages:
    """Counts the bytes of the images of all requests that have not ended.

    Args:
        limits: Configured limits (`images`).
    """

    def __init__(self, limits: ImagesConfig) -> None:
        self._limits, self.num_bytes = limits, 0

    def hold(self, request: inference_pb2.GenerateRequest) -> Callable[[], None] | None:
        """Counts the images of a request.

        Returns:
            A function to call when the request has ended, which ends the count; None: the request
            has no images.

        Raises:
            ResourceExhausted: The images do not fit beside those of other requests now.
        """
        num_bytes, most = sum(map(len, images_of(request.chat))), self._limits.max_held_bytes
        if not num_bytes or num_bytes > self._limits.max_bytes:
            # `check_images` refuses a request whose own images are too large.
            return None
        if self.num_bytes + num_bytes > most:
            raise ResourceExhausted(
                f"images of {num_bytes} bytes do not fit beside the {self.num_bytes} bytes of "
                f"other requests' images; at most {most} bytes (images.max_held_bytes)",
                reason="IMAGES_FULL",
                retry_after_s=1.0,
            )
        self.num_bytes += num_bytes

        def release() -> None:
            self.num_bytes -= num_bytes

        return release
