"""Which workers use each other's KV caches, by vLLM's own configuration of their models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.kvtransfer.disk import block_file
from baton.kvtransfer.disk.block_file import Identity
from baton.kvtransfer.disk.directory import DiskDirectory, rank_directory, scan
from baton.kvtransfer.disk.orders import BlockName, owner_of
from tests.vllm.image_model import write_image_model
from tests.vllm.test_refusals import LLAMA
from tests.vllm.vllm_programs import Program

pytestmark = [pytest.mark.vllm]

PAYLOAD_BYTES = 512
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 256,
}
OTHER_SIZE = {"size": {"longest_edge": 224}}
OTHER_BACKGROUND = {"image": {"rgba_background_color": [0, 0, 0]}}
OTHER_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


def checkpoint(directory: Path, **changed: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    (directory / "model.safetensors").write_bytes(b"weights")
    return str(directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("revisions")
    model, long = checkpoint(path / "model"), checkpoint(path / "long", rope_scaling=LONG_ROPE)
    images = write_image_model(path / "images")
    other_images = str(shutil.copytree(images, path / "other images"))
    processor = path / "other images" / "preprocessor_config.json"
    processor.write_text(processor.read_text().replace("0.5", "0.4"))
    cases = {
        "model": (model, {}, {}),
        "copy": (checkpoint(path / "copy"), {}, {}),
        "two ranks": (model, {"tensor_parallel_size": 2}, {}),
        "short context": (model, {"max_model_len": 128}, {}),
        "other theta": (checkpoint(path / "theta", rope_theta=500000.0), {}, {}),
        "override": (model, {"hf_overrides": OTHER_THETA}, {}),
        "long rope, short context": (long, {"max_model_len": 256}, {}),
        "long rope, long context": (long, {"max_model_len": 257}, {}),
        "random keys": (model, {"prefix_caching_hash_algo": "xxhash"}, {}),
        "seeded keys": (model, {"prefix_caching_hash_algo": "xxhash"}, {"PYTHONHASHSEED": "1"}),
        "images": (images, {}, {}),
        "images, again": (images, {"max_num_seqs": 3}, {}),
        "images, other size": (images, {"mm_processor_kwargs": OTHER_SIZE}, {}),
        "images, other background": (images, {"media_io_kwargs": OTHER_BACKGROUND}, {}),
        "images, other file": (other_images, {}, {}),
        "other seed": (model, {"prefix_caching_hash_algo": "xxhash"}, {"PYTHONHASHSEED": "2"}),
    }
    with Program("revisions_program", cases, directory=path) as program:
        result: dict[str, Any] = program.result()
    return result


@pytest.mark.parametrize("name", ["copy", "two ranks", "short context"])
def test_workers_of_one_cell_hand_over_to_each_other(made: dict[str, Any], name: str) -> None:
    assert made[name]["revision"] == made["model"]["revision"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model", "other theta"),
        ("model", "override"),
        ("long rope, short context", "long rope, long context"),
    ],
)
def test_other_rope_parameters_are_another_model(
    made: dict[str, Any], one: str, other: str, tmp_path: Path
) -> None:
    assert made[one]["revision"] != made[other]["revision"]
    assert num_found(tmp_path, made[one]["namespace"]) == 0
    assert num_found(tmp_path, made[one]["namespace"]) == 1
    assert num_found(tmp_path, made[other]["namespace"]) == 0


@pytest.mark.parametrize("what", ["size", "background", "file"])
def test_files_of_images_that_were_prepared_otherwise_are_not_used(
    made: dict[str, Any], tmp_path: Path, what: str
) -> None:
    """The keys that vLLM makes of blocks name an image by its own bytes."""
    other = made[f"images, other {what}"]
    # Such workers may serve in one cell: a handoff has the reader's images.
    assert other["revision"] == made["images"]["revision"]
    assert num_found(tmp_path, made["images"]["namespace"]) == 0
    assert num_found(tmp_path, made["images, again"]["namespace"]) == 1
    assert num_found(tmp_path, other["namespace"]) == 0


def test_no_disk_is_used_if_vllms_keys_of_blocks_differ_after_a_start(
    made: dict[str, Any], tmp_path: Path
) -> None:
    assert made["random keys"]["namespace"] is None
    assert made["seeded keys"]["revision"] == made["random keys"]["revision"]
    assert num_found(tmp_path, made["seeded keys"]["namespace"]) == 0
    assert num_found(tmp_path, made["seeded keys"]["namespace"]) == 1
    assert num_found(tmp_path, made["other seed"]["namespace"]) == 0


def num_found(disk_dir: Path, namespace: str) -> int:
    """Starts a worker on a disk, which leaves a block there; returns how many it has found."""
    directory = DiskDirectory.open(disk_dir, bytes.fromhex(namespace), num_ranks=1)
    found = scan(directory.path, 1, PAYLOAD_BYTES, lambda _: None)
    rank, block = rank_directory(directory.path, 0), BlockName(bytes(32), 1, owner_of(""))
    identity = Identity(bytes.fromhex(namespace), block.key, 0)
    pages = [memoryview(bytearray(PAYLOAD_BYTES))]
    block_file.write(rank / block.path, rank / "written", identity, pages)
    directory.close()
    assert found.num_wrong == 0
    return len(found.blocks)
