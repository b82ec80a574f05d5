"""Programs of other projects, from the environment of `make test-clients`, against a running Baton.

Each test runs one client and adds a row to the table that is printed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.client_runs import (
    ANSWER,
    COMMAND,
    ENVIRONMENT,
    QUESTION,
    RESULT,
    Baton,
    Row,
    call,
    started,
)

# Routes that say nothing about a client.
_NOT_COUNTED = ("/metrics", "/health", "other")

_rows: dict[str, Row] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("clients")
            if not (ENVIRONMENT / ".installed").exists():
                item.add_marker(pytest.mark.skip("make test-clients installs the clients"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = {report.nodeid for report in terminalreporter.getreports("passed")}
    rows = [row for name, row in _rows.items() if name in passed]
    if not rows:
        return
    terminalreporter.section("clients")
    for row in rows:
        routes = ", ".join(f"{route} {count}" for route, count in sorted(row.requests.items()))
        terminalreporter.write_line(f"| {row.client} | {row.version} | {row.ran} | {routes} |")


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Baton on the simulated engine, whose model calls tools of agents."""
    answers = [
        {"after": f"{QUESTION} (Claude Code)", "answer": call("Bash", command=COMMAND)},
        {"after": f"{QUESTION} (Codex)", "answer": call("exec_command", cmd=COMMAND)},
        {"after": f"{QUESTION} (SDK)", "answer": call("shell", command=COMMAND)},
        {"after": RESULT, "answer": ANSWER},
    ]
    # Agents send prompts of tens of thousands of tokens.
    sizes = {"max_model_len": 131072, "kv_tokens": 262144, "mean_output_tokens": 20}
    directory = tmp_path_factory.mktemp("simulated")
    settings = {"simulated": {**sizes, "answers": answers}}
    yield from started(directory, "--engine", "simulated", **settings)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Baton with the toy model on vLLM."""
    yield from started(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def baton(simulated: str, tmp_path: Path) -> Baton:
    return Baton(simulated, tmp_path)


@pytest.fixture
def baton_on_vllm(vllm: str, tmp_path: Path) -> Baton:
    return Baton(vllm, tmp_path)


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, str], None]]:
    """Adds the client, its version, and what it ran to the table.

    The row gets the requests that the gateway counted during the test.
    """
    name = "baton_on_vllm" if "baton_on_vllm" in request.fixturenames else "baton"
    baton: Baton = request.getfixturevalue(name)
    before, rows = baton.requests(), list[Row]()

    def add(client: str, version: str, ran: str) -> None:
        rows.append(Row(client, version, ran))

    yield add
    (found,) = rows
    for (route, code), count in (baton.requests() - before).items():
        if route not in _NOT_COUNTED:
            assert code == "200", f"{route} answered {code} to {count} requests"
            found.requests[route] += count
    _rows[request.node.nodeid] = found
