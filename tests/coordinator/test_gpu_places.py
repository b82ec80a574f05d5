"""Assignment of a host's GPUs to workers."""

import asyncio

import pytest

from baton.coordinator.launchers import launcher
from baton.coordinator.launchers.gpu_places import VISIBLE, GpuPlaces, gpus_here
from baton.coordinator.launchers.launchers import make_launcher
from baton.runtime.config import parse


def test_each_worker_has_gpus_of_its_own_while_there_are_enough():
    places = GpuPlaces([str(index) for index in range(8)])
    taken = [places.take(f"w{number}", 2)[VISIBLE] for number in range(4)]
    assert taken == ["0,1", "2,3", "4,5", "6,7"]
    places.give_back("w1")
    assert places.take("w4", 2) == {VISIBLE: "2,3"}


def test_with_too_few_the_least_used_are_shared():
    places = GpuPlaces(["0", "1"])
    assert [places.take(name, 1)[VISIBLE] for name in "abcd"] == ["0", "1", "0", "1"]
    places.give_back("b")
    places.give_back("unknown")
    assert places.take("e", 1) == {VISIBLE: "1"}


def test_a_replacement_gets_the_gpus_of_the_ending_worker():
    """A crashed worker's processes hold its GPUs for a while, and no healthy worker shares its."""
    places = GpuPlaces(["0", "1", "2"])
    assert [places.take(name, 1)[VISIBLE] for name in "ab"] == ["0", "1"]
    places.ends("a")
    # Free GPUs come first.
    assert places.take("c", 1) == {VISIBLE: "2"}
    assert places.blocked_by("c") == []
    assert places.take("d", 1) == {VISIBLE: "0"}
    assert places.blocked_by("d") == ["a"]
    places.give_back("a")
    assert places.blocked_by("d") == []
    assert places.take("e", 3) == {VISIBLE: "0,1,2"}
    places.ends("b")
    places.ends("d")
    assert places.blocked_by("e") == ["b", "d"]


async def test_a_worker_starts_when_the_ending_worker_has_left_its_gpu(monkeypatch):
    started, waits, gone = {}, asyncio.Queue(), asyncio.Event()

    class Process:
        @classmethod
        async def start(cls, worker_id, *arguments, environment, **options):
            started[worker_id] = environment[VISIBLE]
            return cls()

        async def stop(self, stop_timeout_s):
            await gone.wait()

    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.setattr(launcher, "WorkerProcess", Process)
    config = parse({"engine": "vllm"}, "test")
    made = make_launcher(
        config, "127.0.0.1:9", print, on_waits=lambda *wait: waits.put_nowait(wait)
    )
    await made.start("prefill-0", "prefill")
    await made.start("decode-0", "decode")
    async with asyncio.TaskGroup() as group, asyncio.timeout(60.0):
        group.create_task(made.end("decode-0"))
        await asyncio.sleep(0)
        group.create_task(made.start("decode-1", "decode"))
        reason = "waits for GPUs, until these workers have ended: decode-0"
        assert await waits.get() == ("decode-1", reason)
        assert started == {"prefill-0": "0", "decode-0": "1"}
        gone.set()
        assert await waits.get() == ("decode-1", "")
    assert started == {"prefill-0": "0", "decode-0": "1", "decode-1": "1"}


@pytest.mark.parametrize(("gpus", "number"), [([], 1), (["0"], 2), (["0"], 0)])
def test_an_impossible_number_of_gpus_is_left_to_the_engine(gpus, number):
    assert GpuPlaces(gpus).take("a", number) == {}


def test_gpus_that_a_process_may_use_are_found(tmp_path):
    """A container with the third and the eleventh GPU of a host calls them 0 and 1."""
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == ["0", "1"]
    assert gpus_here({VISIBLE: "GPU-a, 3"}, tmp_path) == ["GPU-a", "3"]
    assert gpus_here({VISIBLE: ""}, tmp_path) == []
