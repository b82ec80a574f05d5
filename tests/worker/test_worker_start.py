import asyncio
import sys

# In place of Python: a transfer service that never serves, and says to a file that it is there.
SILENT_SERVICE = """#!/bin/sh
touch {begun}
exec sleep 600
"""


async def test_a_worker_that_is_to_leave_does_not_wait_for_its_transfer_service(
    start_worker, tmp_path, monkeypatch
):
    begun, program = tmp_path / "begun", tmp_path / "python"
    program.write_text(SILENT_SERVICE.format(begun=begun))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = start_worker()
    async with asyncio.timeout(60):
        while not begun.exists():
            assert not worker.task.done()
            await asyncio.sleep(0.01)
    worker.stop.set()
    assert await worker.exit_code() == 0
