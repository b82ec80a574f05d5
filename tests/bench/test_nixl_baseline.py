"""The NIXL baseline, which must be installed separately."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from baton.bench import nixl_transfer


def test_a_missing_nixl_is_reported_before_the_run(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        nixl_transfer.require(argparse.ArgumentParser())
    assert "nixl is not installed: `make bench` installs it" in capsys.readouterr().err
