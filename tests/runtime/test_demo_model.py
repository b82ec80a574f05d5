"""Demo models that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.runtime import demo_model
from baton.runtime.config_error import ConfigError


@pytest.mark.parametrize("weights", [False, True])
def test_files_that_cannot_be_written_are_a_configuration_error(tmp_path, weights):
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "cache"
    problem = rf"^model: is 'demo', .* {root}/demo-v1: Not a directory; set HOME"
    with pytest.raises(ConfigError, match=problem):
        demo_model.ensure("demo", weights=weights, root=root)


def test_a_forbidden_home_directory_is_a_configuration_error(monkeypatch):
    monkeypatch.setenv("HOME", "/nonexistent")

    def forbid(path, *_, **__):
        raise PermissionError(13, os.strerror(13), str(path))

    # Root may write everywhere.
    monkeypatch.setattr(Path, "mkdir", forbid)
    place = "/nonexistent/.cache/baton/demo-v1"
    with pytest.raises(ConfigError, match=rf"^model: .* {place}: Permission denied; set HOME"):
        demo_model.ensure("demo", weights=False)


def test_a_user_without_a_home_directory_is_a_configuration_error(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"^model: .* no home directory; set HOME"):
        demo_model.ensure("demo", weights=False)
    assert demo_model.ensure("other") == "other"
