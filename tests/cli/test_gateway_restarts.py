"""`baton up` restarts its gateway process; a shell stands in for the gateway."""

from __future__ import annotations

import asyncio
import errno
import os

from baton.cli import gateway
from baton.runtime.config import parse


async def test_a_failed_gateway_start_is_retried(monkeypatch, caplog):
    monkeypatch.setattr(gateway, "_FIRST_PAUSE_S", 0.0)
    start, serves_again = asyncio.create_subprocess_exec, asyncio.Event()
    programs = ["echo ready and gone", None, "echo ready again; exec sleep 60"]

    async def next_one(*arguments, **options):
        program = programs.pop(0)
        if program is None:
            raise OSError(errno.EAGAIN, "no more processes")
        if not programs:
            serves_again.set()
        return await start("sh", "-c", program, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", next_one)
    listener, url = gateway.bind("127.0.0.1:0")
    config = parse({"http": {"listen": url.removeprefix("http://")}}, "test")
    process = gateway.GatewayProcess(config, "127.0.0.1:9", listener)
    try:
        await process.start()
        async with asyncio.timeout(120.0):
            await serves_again.wait()
    finally:
        await process.stop()
    assert listener.fileno() == -1
    told = [record.message for record in caplog.records]
    assert told == [
        "the gateway process ended with code 0; starting it again",
        "the gateway process cannot be started: [Errno 11] no more processes",
    ]


async def test_ctrl_c_never_reaches_a_gateway_that_starts(monkeypatch):
    start, groups = asyncio.create_subprocess_exec, []

    async def noted(*_arguments, **options):
        process = await start("sh", "-c", "echo ready now; exec sleep 60", **options)
        groups.append(os.getpgid(process.pid) == process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    listener, url = gateway.bind("127.0.0.1:0")
    config = parse({"http": {"listen": url.removeprefix("http://")}}, "test")
    process = gateway.GatewayProcess(config, "127.0.0.1:9", listener)
    try:
        await process.start()
    finally:
        await process.stop()
    assert groups == [True]
