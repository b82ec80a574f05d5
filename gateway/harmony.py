"""Prompts of gpt-oss models, whose chats have a format of their own (harmony) and no template.

Source: vllm/renderers/online_renderer.py, which plain vLLM servers render these chats with.
"""

from __future__ import annotations

from typing import Any

from vllm.renderers.online_renderer import OnlineRenderer


def _renderer() -> Any:
    """A renderer for chats alone, because its constructor needs an engine's configuration."""
    found: Any = object.__new__(OnlineRenderer)
    found.supports_browsing = found.supports_code_interpreter = False
    found.renderer = None
    return found


_RENDERER = _renderer()


def prompt_token_ids(request: Any) -> list[int]:
    """Renders a chat.

    Args:
        request: vLLM's ChatCompletionRequest.

    Raises:
        VLLMValidationError: vLLM rejects a field of the request.
        ValueError: A message cannot be rendered.
    """
    _, (prompt,) = _RENDERER._make_request_with_harmony(request, request.tools is not None)
    return list(prompt["prompt_token_ids"])
