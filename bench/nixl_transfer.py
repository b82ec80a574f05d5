"""NIXL between two processes on this machine, with its UCX backend and Baton's frame sizes.

The receiver reads the sender's memory, as in vLLM's NixlConnector. NIXL computes no checksums.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import mmap
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# Time limit for each step of a process: importing NIXL, registering memory, one transfer.
STEP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
WARM_UP_TRANSFERS = 2
# Interval for polling a transfer. vLLM polls once per engine step.
_POLL_S = 0.0002


def require(parser: argparse.ArgumentParser) -> None:
    """Exits with an error before any measurement if NIXL is not installed."""
    if importlib.util.find_spec("nixl") is None:
        parser.error("nixl is not installed: `make bench` installs it; --no-nixl goes without")


@dataclass(frozen=True, slots=True)
class NixlSpeed:
    """The transfer between two agents in `wall_s`; CPU times are those of the whole processes."""

    num_bytes: int
    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float
    intact: bool


@dataclass(frozen=True, slots=True)
class _Memory:
    """An agent's metadata and memory address, which the other agent needs for reads."""

    metadata: bytes
    address: int


def measure(handoff_bytes: int, frame_bytes: int, seconds: float, ucx: str = "all") -> NixlSpeed:
    """Reads the same handoff repeatedly, one read at a time.

    Args:
        handoff_bytes: Size of the handoff, a multiple of `frame_bytes`.
        frame_bytes: Size of each descriptor.
        seconds: Smallest duration of the measurement.
        ucx: Value of UCX_TLS: "all", or "tcp" alone.

    Raises:
        RuntimeError: NIXL does not work on this machine; its messages are on stderr.
    """
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes = []
    for role in (_send, _receive):
        near, far = context.Pipe()
        process = context.Process(target=role, args=(far, handoff_bytes, frame_bytes, seconds, ucx))
        process.start()
        far.close()
        ends.append(near)
        processes.append(process)
    sender, receiver = ends
    try:
        receiver.send(_answer(sender))
        _answer(receiver)
        sender.send("cpu time")
        sender_cpu_s = _answer(sender)
        receiver.send("begin")
        num_bytes, wall_s, receiver_cpu_s, intact = _answer(receiver)
        sender.send("cpu time")
        sender_cpu_s = _answer(sender) - sender_cpu_s
        return NixlSpeed(num_bytes, wall_s, sender_cpu_s, receiver_cpu_s, intact)
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(end: Connection) -> Any:
    try:
        if end.poll(STEP_TIMEOUT_S):
            return end.recv()
    except (EOFError, OSError):
        raise RuntimeError("NIXL: a process has ended") from None
    raise RuntimeError(f"NIXL: no answer within {STEP_TIMEOUT_S:.0f} s")


def _agent(name: str, memory: mmap.mmap, ucx: str) -> tuple[Any, int]:
    """Returns an agent with registered memory, and the address of the memory."""
    # NIXL and UCX read these variables when they are loaded.
    os.environ |= {"UCX_TLS": ucx, "NIXL_LOG_LEVEL": "WARN"}
    nixl: Any = importlib.import_module("nixl")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not agent.register_memory([(address, len(memory), 0, "")], "DRAM"):
        raise RuntimeError("NIXL refused the memory")
    return agent, address


def _send(end: Connection, handoff_bytes: int, frame_bytes: int, seconds: float, ucx: str) -> None:
    memory = mmap.mmap(-1, handoff_bytes)
    memory[:] = _content(handoff_bytes)
    agent, address = _agent("sender", memory, ucx)
    end.send(_Memory(agent.get_agent_metadata(), address))
    try:
        while end.recv():
            end.send(time.process_time())
    except EOFError:
        pass


def _receive(
    end: Connection, handoff_bytes: int, frame_bytes: int, seconds: float, ucx: str
) -> None:
    memory = mmap.mmap(-1, handoff_bytes)
    agent, address = _agent("receiver", memory, ucx)
    theirs: _Memory = end.recv()
    name = agent.add_remote_agent(theirs.metadata)
    offsets = range(0, handoff_bytes, frame_bytes)
    handle = agent.initialize_xfer(
        "READ",
        agent.get_xfer_descs([(address + at, frame_bytes, 0) for at in offsets], "DRAM"),
        agent.get_xfer_descs([(theirs.address + at, frame_bytes, 0) for at in offsets], "DRAM"),
        name,
    )
    for _ in range(WARM_UP_TRANSFERS):
        _transfer(agent, handle)
    end.send("ready")
    end.recv()
    memory[:] = bytes(handoff_bytes)
    num_bytes, started, cpu_s = 0, time.monotonic(), time.process_time()
    while (wall_s := time.monotonic() - started) < seconds:
        _transfer(agent, handle)
        num_bytes += handoff_bytes
    cpu_s = time.process_time() - cpu_s
    end.send((num_bytes, wall_s, cpu_s, memory[:] == _content(handoff_bytes)))


def _transfer(agent: Any, handle: Any) -> None:
    deadline = time.monotonic() + STEP_TIMEOUT_S
    state = agent.transfer(handle)
    while state == "PROC" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"NIXL: a transfer is in state {state}")


def _content(num_bytes: int) -> bytes:
    """Returns content in which no two frames are equal."""
    period = bytes(range(251)) * 4099
    return (period * (num_bytes // len(period) + 1))[:num_bytes]
