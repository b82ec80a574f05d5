"""README and docs/ agree with the code: keys, metrics, commands, links and file names."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from baton.coordinator.core.core import Core
from baton.coordinator.server.metrics import registry
from baton.coordinator.state.config import CoreConfig
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.runtime.config import BatonConfig
from baton.runtime.security.refusals import Refusals
from baton.worker.gpus import GpuCollector
from baton.worker.metrics import WorkerCollector

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TEXT = "\n".join(PAGES.values())
KEY_ROWS = re.findall(r"^\| (`[a-z_.]+`(?:, `[a-z_.]+`)*) \| (`[^`]*`|) \| ", TEXT, re.MULTILINE)


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
        GatewayCollector(
            GatewayStats(("/v1/completions",), Counter()),
            CallerSlots(1, "requests", "gateway_full"),
        ).registry(),
        Refusals(),
        # Without GPUs, the collector reads nothing from NVML.
        GpuCollector(None, ()),
    )
    shown = "".join(generate_latest(one).decode() for one in registries)
    exist = set(re.findall(r"^# HELP (\w+)", shown, re.MULTILINE))
    named = set(re.findall(r"`(baton_\w+)`", TEXT))
    assert named <= exist
    assert len(named) >= 10


def test_every_command_it_names_exists(baton):
    named = set(re.findall(r"(?:^|`)baton ([a-z]+)", TEXT, re.MULTILINE))
    commands = set(re.findall(r"^  ([a-z]+)  ", baton("--help").out, re.MULTILINE))
    assert named <= commands
    assert {"up", "generate", "pools", "workers", "requests", "config"} <= named


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", PAGES[name]):
        file = (ROOT / name).parent / target if target else ROOT / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


def test_every_page_is_found_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[^)#]*)", PAGES["README.md"]))
    assert linked == {name for name in PAGES if name.startswith("docs/")}


TOP_FOLDERS = "|".join(
    path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
)
FILES = sorted(set(re.findall(rf"`((?:{TOP_FOLDERS})/[\w./-]*)`", PAGES["docs/architecture.md"])))


@pytest.mark.parametrize("name", FILES)
def test_files_named_in_the_architecture_page_exist(name):
    assert (ROOT / name).exists()


def test_the_architecture_page_names_files():
    assert len(FILES) >= 40
