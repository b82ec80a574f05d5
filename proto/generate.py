"""Generates the Python code of the .proto files, beside them.

`python proto/generate.py` writes the code; `python proto/generate.py --check` fails if the
committed code differs from the .proto files.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent
# google/protobuf/*.proto ship inside grpc_tools.
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
GENERATED = re.compile(r".*_pb2(_grpc)?\.pyi?$")


def generate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2_grpc.py and their .pyi to `out` for every .proto file."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("baton/**/*.proto"))
    arguments = ["protoc", f"-I{PROTO}", f"-I{WELL_KNOWN}"]
    arguments += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy")]
    arguments += [f"--mypy_grpc_out={out}"]
    if protoc.main([*arguments, *sources]) != 0:
        raise SystemExit("protoc failed")


def generated_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.glob("baton/**/*"))
        if GENERATED.match(path.name)
    }


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(PROTO)
        return
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh, committed = generated_files(Path(directory)), generated_files(PROTO)
    stale = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    if stale:
        raise SystemExit(f"generated code is stale: {', '.join(stale)}; run make proto")


if __name__ == "__main__":
    main()
