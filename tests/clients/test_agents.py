"""Command lines of coding agents, which call a tool and read its result."""

import json

import pytest

from tests.clients.client_runs import ANSWER, COMMAND, ENVIRONMENT, MODEL, QUESTION, RESULT


def program(pattern):
    """Path of a program of an npm package for this platform."""
    found = list((ENVIRONMENT / "npm" / "node_modules").glob(pattern))
    if not found:
        pytest.skip(f"npm has no {pattern} for this platform")
    return found[0]


def events(told):
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def test_claude_code_calls_a_tool_and_answers_with_its_result(baton, row):
    claude = program("@anthropic-ai/claude-code-linux-*/claude")
    row("Claude Code", baton.run(claude, "--version").split()[0], "a session with the tool Bash")
    told = baton.run(
        *(claude, "-p", f"{QUESTION} (Claude Code)", "--max-turns", "3"),
        *("--allowedTools", "Bash(uname:*)", "--output-format", "stream-json", "--verbose"),
        ANTHROPIC_BASE_URL=baton.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    said = [
        part
        for event in events(told)
        if event["type"] in ("assistant", "user")
        for part in event["message"]["content"]
    ]
    assert [part["type"] for part in said] == ["tool_use", "tool_result", "text"]
    assert said[0]["input"] == {"command": COMMAND}
    assert said[1]["content"] == RESULT
    assert said[2]["text"] == ANSWER


def test_codex_calls_a_tool_and_answers_with_its_result(baton, row):
    codex = program("@openai/codex-linux-*/vendor/*/bin/codex")
    row("Codex", baton.run(codex, "--version").split()[-1], "a session with the tool exec_command")
    provider = f'{{name = "baton", base_url = "{baton.url}/v1", wire_api = "responses"}}'
    told = baton.run(
        *(codex, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        *("-m", MODEL, "-c", "model_provider=baton", "-c", f"model_providers.baton={provider}"),
        f"{QUESTION} (Codex)",
    )
    done = [event["item"] for event in events(told) if event["type"] == "item.completed"]
    done = [item for item in done if item["type"] != "error"]
    assert [item["type"] for item in done] == ["command_execution", "agent_message"]
    assert COMMAND in done[0]["command"]
    assert done[0]["aggregated_output"].strip() == RESULT
    assert done[1]["text"] == ANSWER
