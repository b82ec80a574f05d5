"""The README says what the code does."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from baton.coordinator.core import Core
from baton.coordinator.core_config import CoreConfig
from baton.coordinator.metrics import registry
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import BatonConfig
from baton.runtime.refusals import Refusals
from baton.worker.metrics import WorkerCollector

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


def test_every_metric_it_names_exists():
    config = BatonConfig()
    core = Core(CoreConfig.of(config))
    registries = (
        WorkerCollector("demo", "prefill").registry(),
        registry(core, config),
        GatewayCollector(GatewayStats(("/v1/completions",))).registry(),
        Refusals(),
    )
    shown = "".join(generate_latest(one).decode() for one in registries)
    exist = set(re.findall(r"^# HELP (\w+)", shown, re.MULTILINE))
    named = set(re.findall(r"`(baton_\w+)`", README))
    assert named <= exist
    assert len(named) >= 10


def test_every_command_it_names_exists(baton):
    named = set(re.findall(r"(?:^|`)baton ([a-z]+)", README, re.MULTILINE))
    commands = set(re.findall(r"^  ([a-z]+)  ", baton("--help").out, re.MULTILINE))
    assert named <= commands
    assert {"up", "generate", "pools", "workers", "requests", "config"} <= named
