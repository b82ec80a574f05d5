"""docs/errors.md has every reason and every HTTP code that the source can send."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()


def found(pattern, *folders):
    """Returns the group of each match in the Python files of some folders."""
    return {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(pattern, path.read_text(), re.MULTILINE)
    }


# A reason stands in the call that makes an error, in a variable, or in a constant of errors.
REASONS = found(r'reason(?:=| = )"([A-Z_]+)"', "client", "coordinator", "runtime", "worker")
CONSTANTS = found(r'^(?:TENANT_RATE|_PROXY) = "(\w+)"', "client", "coordinator")
CONSTANTS |= found(r'^(?:RESTARTING|CONTEXT_\w+) = "(\w+)"', "runtime")
CODES = found(r'\bcode(?:=| = )"([a-z_]+_[a-z_]+|internal|overloaded|timeout)"', "gateway")


def test_the_source_was_read():
    assert {"QUEUE_FULL", "OPEN_STREAMS", "SLOW_READER"} <= REASONS
    assert {"RESTARTING", "CONTEXT_LENGTH_EXCEEDED", "TENANT_RATE", "PROXY"} == CONSTANTS
    assert {"storage_full", "internal", "model_not_found"} <= CODES


@pytest.mark.parametrize("reason", sorted(REASONS | CONSTANTS))
def test_a_reason_is_listed(reason):
    assert f"`{reason}`" in PAGE


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_http_code_is_listed(code):
    assert f"`{code}`" in PAGE
