"""A plain vLLM server, which runs in a process of the fork server (tests/vllm/vllm_programs.py)."""

from __future__ import annotations

import runpy
import sys


def main(*arguments: str) -> None:
    from tests.vllm.forked_engines import fork_engines

    fork_engines()
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
