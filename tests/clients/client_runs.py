"""Runs programs of other projects against a running Baton."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import httpx2 as httpx

from baton import models
from tests.gateway.baton_command import Process

ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients"
MODEL, MODEL_DIRECTORY = "glossary", Path(models.__file__).parent / "glossary"
# Bounds hangs. No test may fail because a busy machine is slow.
RUN_S = 280.0
QUESTION, COMMAND, RESULT, ANSWER = (
    "Which kernel runs here?",
    "uname -s",
    "Linux",
    "This machine runs Linux.",
)
_COUNT = re.compile(r'^baton_http_requests_total\{code="(\d+)",route="([^"]+)"\} (\d+)', re.M)


@dataclass
class Row:
    """One client in the table."""

    client: str
    version: str
    ran: str
    requests: Counter[str] = field(default_factory=Counter)


@dataclass
class Baton:
    """A running Baton.

    Attributes:
        url: URL of its gateway.
        directory: A directory for the files of the test.
    """

    url: str
    directory: Path

    def requests(self) -> Counter[tuple[str, str]]:
        """Returns the number of requests so far by route and HTTP status."""
        text = httpx.get(f"{self.url}/metrics").text
        return Counter({(route, code): int(count) for code, route, count in _COUNT.findall(text)})

    def run(self, *command: object, **environment: str) -> str:
        """Runs a program in an environment of its own; returns what it printed.

        Args:
            command: The program and its arguments.
            environment: Additional environment variables.
        """
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        path = os.pathsep.join([str(ENVIRONMENT / "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
        # Nothing of the caller's environment or home reaches the program.
        variables = {"PATH": path, "HOME": str(home), "TERM": "dumb", "COLUMNS": "200"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.directory,
            env={**variables, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        told = done.stdout[-4000:] + done.stderr[-4000:]
        assert done.returncode == 0, told
        return done.stdout


def started(directory: Path, *arguments: str, **config: object) -> Iterator[str]:
    http = {"listen": "127.0.0.1:0", "batches": {"dir": str(directory / "batches")}}
    file = directory / "baton.yaml"
    file.write_text(
        json.dumps({"http": http, "tool_call_parser": "hermes", **config}), encoding="utf-8"
    )
    process = Process(
        "up", "--config", str(file), "--listen", "127.0.0.1:0", *arguments, directory=directory
    )
    try:
        yield process.ready(r"http=(\S+)").group(1)
        _, left = process.stop()
        assert not left
    finally:
        process.close()


def call(name: str, **arguments: str) -> str:
    """A tool call in the format of the hermes parser."""
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


def version_of(package: str) -> str:
    """Version of a Python package in the clients' environment, or beside Baton."""
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    found = list(metadata.distributions(name=package, path=[str(site)]))
    return found[0].version if found else metadata.version(package)
