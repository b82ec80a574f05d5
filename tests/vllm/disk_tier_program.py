"""One engine of two ranks that keeps blocks on disk, then a second one in its place."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.kvtransfer.disk.orders import owner_of
from tests.vllm import engine_cases
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import TIMEOUT_S, Side, left_behind, side
from tests.vllm.engine_host_tier import ask, evict, hashes
from tests.vllm.forked_engines import fork_engines

# As many blocks as the engine's cache has; see engine_cases.py.
HOST_BYTES = 64 * 2**15
OWN_CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES, "eviction_policy": "arc"},
}


def files(disk_dir: Path) -> Iterator[Path]:
    return (one for one in disk_dir.rglob("rank-*/*/*/*") if one.is_file())


def directories(disk_dir: Path, cache_salt: str) -> list[Path]:
    """Returns the directories of all files with this salt."""
    return list(disk_dir.rglob(f"rank-*/{owner_of(cache_salt)}"))


def damage(disk_dir: Path) -> int:
    """Flips a bit in every file of the second rank; returns the number of files."""
    num_files = 0
    for num_files, path in enumerate(disk_dir.rglob("rank-1/*/*/*"), start=1):
        data = bytearray(path.read_bytes())
        data[(997 * num_files) % len(data)] ^= 4
        path.write_bytes(data)
    return num_files


async def written(one: Side, name: str, prompt: list[int], cache_salt: str = "") -> None:
    """Repeats a request until the disk has all blocks of its prompt; it may have been busy."""
    wanted = set(hashes(prompt, cache_salt))
    while not wanted <= one.on_disk:
        await ask(one, f"{name}, once more", prompt, cache_salt)


async def first_life(one: Side, disk_dir: Path) -> dict[str, Any]:
    prompt = cases.prompt(330, 91)
    made: dict[str, Any] = {"first": await ask(one, "first", prompt)}
    await written(one, "first", [*prompt, *made["first"]["tokens"]])
    await evict(one, "a")
    made["again"] = await ask(one, "again", prompt)
    made["cached"] = await ask(one, "cached", prompt)
    await evict(one, "b")
    twins = (ask(one, f"twin {n}", prompt) for n in range(2))
    made["twins"] = await asyncio.gather(*twins)
    made["other tenant"] = await ask(one, "other tenant", prompt, "search")
    await evict(one, "c")
    made["num_damaged"] = damage(disk_dir)
    made["damaged"] = await ask(one, "damaged", prompt)
    await written(one, "damaged", prompt)
    made["num_wrong_files"] = one.num_wrong_files
    await evict(one, "d")
    one.engine.take_load()
    made["written again"] = await ask(one, "written again", prompt)
    load = one.engine.take_load()
    made["loads"] = [dataclasses.asdict(each) for each in (load.host_loads, load.disk_loads)]
    return made


async def deleted(one: Side, disk_dir: Path, turn: list[int]) -> dict[str, Any]:
    """Deletes some blocks of one tenant, then those of the tenant, then all."""
    prompt = cases.prompt(330, 94)
    made: dict[str, Any] = {"tenant's": await ask(one, "tenant's", prompt, "search")}
    await written(one, "tenant's", prompt, "search")
    chosen = hashes(prompt, "search")[engine_cases.NUM_KEPT :]
    made["chosen deleted"] = dataclasses.asdict(await one.engine.drop_cache("search", chosen))
    made["chosen again"] = await ask(one, "chosen again", prompt, "search")
    await written(one, "chosen again", prompt, "search")
    owners = directories(disk_dir, "search")
    made["num_owner_directories"] = len(owners)
    made["deleted"] = dataclasses.asdict(await one.engine.drop_cache("search"))
    made["num_owner_directories, deleted"] = sum(1 for path in owners if path.exists())
    made["tenant's again"] = await ask(one, "tenant's again", prompt, "search")
    made["other's"] = await ask(one, "other's", turn)
    made["num_files, before"] = len(list(files(disk_dir)))
    running = asyncio.create_task(ask(one, "running", cases.prompt(200, 95)))
    made["all deleted"] = dataclasses.asdict(await one.engine.drop_cache(None))
    made["running"] = await running
    made["all deleted again"] = dataclasses.asdict(await one.engine.drop_cache(None))
    made["num_files, after"] = len(list(files(disk_dir)))
    made["num_in_host"], made["num_on_disk, after"] = len(one.in_host), len(one.on_disk)
    made["computed again"] = await ask(one, "computed again", turn)
    return made


async def second_life(one: Side, disk_dir: Path, answer: list[int]) -> dict[str, Any]:
    prompt = cases.prompt(330, 91)
    made: dict[str, Any] = {"restarted": await ask(one, "restarted", prompt)}
    made["restarted, other tenant"] = await ask(one, "restarted, other", prompt, "search")
    turn = [*prompt, *answer, *cases.prompt(50, 92)]
    made["next"] = await ask(one, "next", turn)
    made["num_on_disk"] = len(one.on_disk)
    made |= await deleted(one, disk_dir, turn)
    await evict(one, "e")
    shutil.move(disk_dir, disk_dir.with_name("gone"))
    made["without a disk"] = await ask(one, "without a disk", turn)
    made["after"] = await ask(one, "after", cases.prompt(200, 93))
    made["disk_failed"] = one.disk_failed
    made["left"] = await left_behind(one)
    return made


async def run(model: str, ranks: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        disk_dir = Path(directory) / "kv"

        def engine(name: str, **offloading: Any) -> contextlib.AbstractAsyncContextManager[Side]:
            socket_path = str(Path(directory) / name)
            # The user's own settings go before Baton's, which hold no block here.
            return side(
                model, ranks, socket_path, host_bytes=1, disk_dir=str(disk_dir), **offloading
            )

        async with asyncio.timeout(2 * TIMEOUT_S):
            async with engine("1.sock", kv_offloading_size=HOST_BYTES / 2**30) as one:
                made |= await first_life(one, disk_dir)
            made["num_files"] = len(list(files(disk_dir)))
            async with engine("2.sock", kv_transfer_config=OWN_CONNECTOR) as one:
                made["host_kv_tokens"] = one.info.host_kv_tokens
                made |= await second_life(one, disk_dir, made["first"]["tokens"])
                made["disk_kv_tokens"] = one.info.disk_kv_tokens
    return made


def main(model: str, ranks: int) -> dict[str, Any]:
    """Returns the results of the cases."""
    fork_engines()
    return asyncio.run(run(model, ranks))
