"""Chats whose last message the model continues instead of beginning a new one.

Source: transformers, utils/chat_template_utils.py, render_jinja_template; plain vLLM servers render
these chats with it.
"""

from __future__ import annotations

import json
from typing import Any

from baton.runtime.errors import InvalidArgument
from baton.v1 import inference_pb2

# Transformers' mark. Its last character tells whether a template keeps white space at the end.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def check_continuation(chat: inference_pb2.ChatPrompt) -> None:
    """Checks that the last message can be continued, if `continue_final_message` is set.

    Args:
        chat: A chat that is valid otherwise.

    Raises:
        InvalidArgument: The last message cannot be continued.
    """
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt or not chat.HasField("add_generation_prompt"):
        raise InvalidArgument(
            "chat.continue_final_message",
            True,
            "must not be set together with add_generation_prompt, which is true unless the request "
            "sets it to false",
        )
    index, last = len(chat.messages) - 1, chat.messages[-1]
    field = f"chat.messages[{index}]"
    if last.role != "assistant":
        allowed = "must be assistant with continue_final_message"
        raise InvalidArgument(f"{field}.role", last.role, allowed)
    if last.parts and not last.parts[-1].text:
        number = len(last.parts) - 1
        allowed = "must be text with continue_final_message"
        raise InvalidArgument(f"{field}.parts[{number}]", "no text", allowed)
    if not last.parts and not last.content:
        allowed = "must not be empty with continue_final_message"
        raise InvalidArgument(f"{field}.content", last.content, allowed)
    if last.fields and json.loads(last.fields).get("tool_calls"):
        # Templates write the calls after the text, where the prompt has ended.
        allowed = "must have none with continue_final_message"
        raise InvalidArgument(field, "a message with tool_calls", allowed)


def mark_end(messages: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's text, for `up_to_mark`; returns the text.

    Args:
        messages: As the chat template reads them; at least one. The last one is changed.
    """
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + _MARK
        return content
    text: str = content[-1]["text"]
    last["content"] = [*content[:-1], {**content[-1], "text": text + _MARK}]
    return text


def up_to_mark(rendered: str, text: str) -> str:
    """Returns a rendered chat up to the marked end of its last message.

    Args:
        rendered: The chat as its template writes it.
        text: The text that `mark_end` returned.

    Raises:
        ValueError: The template has changed the text.
    """
    at = rendered.rfind(_MARK.rstrip())
    if at < 0 or not rendered[:at].rstrip().endswith(text.strip()):
        raise ValueError("it changes the text of the last message, which is to be continued")
    kept = rendered[:at]
    return kept if rendered.startswith(_MARK, at) else kept.rstrip()
