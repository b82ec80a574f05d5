"""Engines whose processes are forked from the folder's fork server, which has imported vLLM.

Baton has vLLM spawn its processes, and each of them imports vLLM again, which takes longer than the
tests of a small model. Use it where only the engine's answers matter: what happens at the end of a
parent or a rank is tested with spawned processes.
"""

from __future__ import annotations

import os
from multiprocessing import context, forkserver

from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor


class _Process(context.ForkServerProcess):
    """A process with the environment and the process group of the process that starts it."""

    def start(self) -> None:
        self._environment, self._group = dict(os.environ), os.getpgid(0)
        super().start()

    def run(self) -> None:
        os.setpgid(0, self._group)
        os.environ.clear()
        os.environ.update(self._environment)
        fork_engines()
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def fork_engines() -> None:
    """Makes this process, itself a child of the fork server, fork vLLM's processes from there."""
    # The server's address is known here, but multiprocessing would start another server.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    for module in (utils, multiproc_executor):
        module.get_mp_context = _Context
