"""Commands, configuration keys, metrics, files and alerts named in deploy/README.md exist."""

from __future__ import annotations

import re

import pytest
import yaml

from baton.runtime.config import BatonConfig
from baton.v1 import admin_pb2
from tests.deploy.deploy_files import COMMANDS, DEPLOY, ROOT
from tests.deploy.exported import names

GUIDE = (DEPLOY / "README.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", GUIDE))


def test_every_alert_has_a_section():
    anchors = {line.lstrip("# ").lower() for line in GUIDE.splitlines() if line.startswith("### ")}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{rule['alert'].lower()}"
        assert rule["alert"].lower() in anchors
    assert {one for one in anchors if one.startswith("baton")} == {
        rule["alert"].lower() for rule in alerts
    }
    assert set(re.findall(r"\bBaton[A-Z]\w+", GUIDE)) == {rule["alert"] for rule in alerts}


def test_commands_exist():
    named = set(re.findall(r"(?:^|`)baton ([a-z]+)", GUIDE, re.MULTILINE))
    assert named <= COMMANDS.commands.keys()
    assert len(named) > 8


def test_options_exist():
    for command, rest in re.findall(r"`baton ([a-z]+) ([^`]*)`", GUIDE):
        if command == "config":
            continue
        known = {one for option in COMMANDS.commands[command].load().params for one in option.opts}
        assert set(re.findall(r"(--[a-z-]+)", rest)) <= known


KEYS = sorted(
    key
    for key in QUOTED
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.split(".")[0] in BatonConfig.model_fields
)


@pytest.mark.parametrize("key", KEYS)
def test_keys_exist(key):
    value = BatonConfig()
    for part in key.split("."):
        value = getattr(value, part)


def test_keys_were_found():
    assert len(KEYS) > 15


def test_metrics_exist():
    exported = names()
    named = {one for one in QUOTED if re.fullmatch(r"(baton|gen_ai)_\w+", one)}
    assert len(named) > 6
    for name in named:
        assert name in exported or f"{name}_bucket" in exported


def test_panels_exist():
    shown = " ".join(path.read_text() for path in (DEPLOY / "grafana" / "dashboards").iterdir())
    named = re.findall(r'panel "([^"]+)"', GUIDE)
    assert len(named) > 5
    for title in named:
        assert f'"title": "{title}"' in shown


def test_files_exist():
    for name in re.findall(r"`(?:baton up --config )?(deploy/[\w./-]+)`", GUIDE):
        assert (ROOT / name).exists() or name == "deploy/compose/secrets"
    for name in re.findall(
        r"`((?:examples|docker|compose|kubernetes|prometheus|grafana)/[\w./-]*)`", GUIDE
    ):
        assert (DEPLOY / name).exists()


def test_simulator_settings_match_the_reported_latencies():
    shown = {field.name for field in admin_pb2.LatencyInfo.DESCRIPTOR.fields}
    section = set(type(BatonConfig().simulated).model_fields)
    costs = {name for name in shown if name.endswith("_ms")}
    assert len(costs) == 7
    assert costs <= section
