"""Engines whose processes are forked from the folder's fork server, which has imported vLLM.

Baton has vLLM spawn its processes, and each of them imports vLLM again, which takes longer than the
tests of a small model. Use it where only the engine's answers matter: what happens at the end of a
parent or a rank is tested with spawned processes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from multiprocessing import context, forkserver

from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor

from baton.kvtransfer.connector.tiers import cpu_tier_copies

# Most bytes that a rank copies in one step on a CPU: two blocks of two layers in engine_cases.py.
STEP_BYTES = 2**15
# Set when this process has started its first engine process.
has_started = threading.Event()


class _Process(context.ForkServerProcess):
    """A process with the environment and the process group of the process that starts it."""

    def start(self) -> None:
        self._environment, self._group = dict(os.environ), os.getpgid(0)
        super().start()
        has_started.set()

    def run(self) -> None:
        os.setpgid(0, self._group)
        os.environ.clear()
        os.environ.update(self._environment)
        fork_engines()
        super().run()

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        code = super()._bootstrap(parent_sentinel)
        # The fork server would end the process without C++ destructors, which remove the shared
        # memory of vLLM's ranks.
        ctypes.CDLL(None).exit(code)
        raise AssertionError("exit returned")


class _Context(context.ForkServerContext):
    Process = _Process


def fork_engines() -> None:
    """Makes this process, itself a child of the fork server, fork vLLM's processes from there.

    On a CPU, the engines divide their copies over many steps.
    """
    # The server's address is known here, but multiprocessing would start another server.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    for module in (utils, multiproc_executor):
        module.get_mp_context = _Context
    # The caches are small, so that no load of handoffs or host memory would take several steps.
    cpu_tier_copies.STEP_BYTES = cpu_tier_copies.IDLE_STEP_BYTES = STEP_BYTES
    cpu_tier_copies.LONG_STEP_BYTES_PER_S = 0
