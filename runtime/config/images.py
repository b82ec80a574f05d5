"""The `images` section: limits of images in chats."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from baton.runtime.section import PositiveInt, Section

# A request and each command of it are one gRPC message, which holds more than the images.
_MessageBytes = Annotated[int, Field(ge=1, le=12 * 2**20)]


class ImagesConfig(Section):
    """Limits of images in chats; the coordinator checks all but the pixels, a worker those."""

    max_count: PositiveInt = Field(16, description="Images of one request.")
    max_image_bytes: _MessageBytes = Field(4 * 2**20, description="Size of one image's file.")
    max_bytes: _MessageBytes = Field(
        5 * 2**20,
        description="Size of the files of one request's images, together. In JSON they take a "
        "third more (http.max_body_bytes).",
    )
    max_pixels: PositiveInt = Field(
        16_777_216,
        description="Pixels of one request's images, together, before the model's processor "
        "resizes them.",
    )
    max_held_bytes: PositiveInt = Field(
        256 * 2**20,
        description="Size of the files of the images of all requests that have not ended. The "
        "coordinator holds them for workers that take over; more are refused.",
    )

    @model_validator(mode="after")
    def _fits(self) -> ImagesConfig:
        if self.max_held_bytes < self.max_bytes:
            raise ValueError(f"max_held_bytes must be at least max_bytes, {self.max_bytes}")
        return self
