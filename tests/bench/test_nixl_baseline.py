"""The baseline that has to be installed apart."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from baton.bench import nixl_transfer


def test_a_run_that_could_not_end_is_not_begun(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        nixl_transfer.require(argparse.ArgumentParser())
    assert "nixl is not installed: `make bench` installs it" in capsys.readouterr().err
