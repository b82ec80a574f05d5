"""The configuration that `baton check --write` proposes."""

from types import SimpleNamespace

from baton.cli.effective_config import load_config
from baton.runtime.config import parse
from baton.worker.model_check import starting_config


def test_a_proposed_configuration_has_no_empty_sections():
    staging = SimpleNamespace(fits=True)
    found = SimpleNamespace(staging=staging, max_model_len=4096)
    assert starting_config(load_config(None, model="glossary"), found) == {
        "model": "glossary",
        "served_model_name": "glossary",
        "engine_args": {"max_model_len": 4096},
        "prefill": {"workers": 1},
        "decode": {"workers": 1},
    }
    overrides = {"decode": {"engine_args": {"hf_overrides": {}}}}
    given = parse(overrides, "test")
    assert starting_config(given, found)["decode"] == {"workers": 1} | overrides["decode"]
