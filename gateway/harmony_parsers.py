"""The parsers of gpt-oss models, whose outputs only they can read (harmony). Imports no vLLM."""

from __future__ import annotations

from typing import Any

from baton.runtime.config_error import ConfigError

MODEL_TYPE = "gpt_oss"
# The names of vLLM's parsers, by configuration key.
_NAMES = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}


def checked_names(configured: Any) -> dict[str, str]:
    """Returns the parsers of a gpt-oss model by configuration key, also those not configured.

    Args:
        configured: Has the configured names as attributes; empty: not configured.

    Raises:
        ConfigError: Another parser is configured.
    """
    for key, needed in _NAMES.items():
        name = getattr(configured, key)
        if name not in ("", needed):
            raise ConfigError(f"{key}: is {name!r}; must be {needed!r} for a gpt-oss model")
    return dict(_NAMES)
