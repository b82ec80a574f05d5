"""The command that runs a module of the tests in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

# Modules of the tests are imported as `tests.folder.module` from here.
ROOT = str(Path(__file__).parents[1])
_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)


def command_of(module: str) -> tuple[str, ...]:
    """Returns the command that runs a module as a program; its arguments follow."""
    return sys.executable, "-c", _RUN, ROOT, module
