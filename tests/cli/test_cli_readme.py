"""The README says what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from baton.runtime.config import BatonConfig

README = (Path(__file__).parents[2] / "README.md").read_text()
KEY_ROWS = re.findall(r"^\| (`[a-z_.]+`(?:, `[a-z_.]+`)*) \| (`[^`]*`|) \| ", README, re.MULTILINE)


@pytest.mark.parametrize(("keys", "default"), KEY_ROWS, ids=[row[0] for row in KEY_ROWS])
def test_every_key_of_the_table_has_its_default(keys, default):
    for key in re.findall(r"`([^`]+)`", keys):
        value = BatonConfig()
        for part in key.split("."):
            value = getattr(value, part)
        assert value == (yaml.safe_load(default.strip("`")) if default else "")


def test_the_table_was_found():
    assert len(KEY_ROWS) >= 10


def test_every_command_it_names_exists(baton):
    named = set(re.findall(r"(?:^|`)baton ([a-z]+)", README, re.MULTILINE))
    commands = set(re.findall(r"^  ([a-z]+)  ", baton("--help").out, re.MULTILINE))
    assert named <= commands
    assert {"up", "generate", "pools", "workers", "requests", "config"} <= named
