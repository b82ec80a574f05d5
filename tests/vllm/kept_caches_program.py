"""Reports which temporary and cache directories a worker's engine uses."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from baton.engine.vllm_config import keep_sockets_in


def main(directory: str) -> dict[str, str]:
    before = default_cache_dir()
    keep_sockets_in(Path(directory))
    # The directory of another engine in the same process.
    keep_sockets_in(Path(directory))
    after = str(Path(default_cache_dir()).resolve())
    return {"before": before, "after": after, "temporary": tempfile.gettempdir()}
