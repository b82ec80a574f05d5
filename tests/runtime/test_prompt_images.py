"""Hashes and digests of prompts with images."""

import pytest

from baton.runtime.prompts.block_hashes import block_hashes, image_seed
from baton.runtime.prompts.prompt_images import (
    block_keys,
    end_of_images,
    image_format,
    image_id,
    keyed_tokens,
)
from baton.runtime.prompts.request_digest import request_digest
from baton.v1 import common_pb2

SIZE = 4
# An image from the last token of the first block to the first token of the third one.
PROMPT = [1, 2, 3, *[9] * 6, 4, 5, 6]


def image(name, offset=3, num_tokens=6):
    return common_pb2.PromptImage(id=name, offset=offset, num_tokens=num_tokens)


def hashes(*images, begin=0, parent=0):
    tokens = PROMPT[begin:]
    keys = block_keys(images, begin, len(tokens), SIZE)
    return list(block_hashes(tokens, SIZE, parent, keys))


def test_blocks_name_the_images_that_they_have_tokens_of():
    keys = block_keys([image("a")], 0, len(PROMPT), SIZE)
    assert keys == [[("a", 3)], [("a", -1)], [("a", -5)]]
    # The second image begins where the first one ends; the third one is behind the full blocks.
    images = [image("a", 2, 2), image("b", 4, 1), image("c", 13, 2)]
    assert block_keys(images, 0, 14, SIZE) == [[("a", 2)], [("b", 0)], []]
    assert block_keys(images, 4, 6, SIZE) == [[("b", 0)]]


def test_hashes_of_blocks_depend_on_images_up_to_their_end():
    one, other, none = hashes(image("a")), hashes(image("b")), hashes()
    assert not {*one} & {*other} | {*one} & {*none}
    # From the block on which the image begins.
    moved = hashes(image("a", 4, 5))
    assert moved[0] == none[0]
    assert not {*moved[1:]} & {*one, *none}
    assert one[1:] == hashes(image("a"), begin=SIZE, parent=one[0])
    assert image_seed(7, []) == 7


def test_digests_depend_on_images():
    sampling = common_pb2.SamplingParams(max_tokens=3)
    digests = {
        request_digest(PROMPT, sampling, "", images)
        for images in ([], [image("a")], [image("b")], [image("a", 3, 5)])
    }
    assert len(digests) == 4
    assert keyed_tokens(PROMPT, []).tolist() == PROMPT
    keyed = keyed_tokens(PROMPT, [image("a")]).tolist()
    assert (keyed[:3], keyed[9:]) == (PROMPT[:3], PROMPT[9:])
    assert len({*keyed}) == len(keyed)
    assert end_of_images([image("a"), image("b", 9, 1)]) == 10
    assert end_of_images([]) == 0


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x89PNG\r\n\x1a\n...", "PNG"),
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"GIF89a", "GIF"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "WebP"),
        (b"RIFF\x00\x00\x00\x00WAVE", None),
        (b"<svg>", None),
        (b"", None),
    ],
)
def test_formats_are_told_by_the_first_bytes(data, name):
    assert image_format(data) == name
    assert len(image_id(data)) == 64
