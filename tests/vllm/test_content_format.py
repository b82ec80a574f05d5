"""Whether chat templates read a content as a text or as parts is decided as vLLM decides it."""

from __future__ import annotations

from pathlib import Path

import jinja2
import jinja2.ext
import pytest

from baton.runtime.prompts.content_format import reads_parts

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def each(body: str, messages: str = "messages") -> str:
    return "{% for message in " + messages + " %}" + body + "{% endfor %}"


def loop(content: str) -> str:
    return "{% for part in " + content + " %}{{ part.text }}{% endfor %}"


def pairs(content: str) -> str:
    return "{% for key, part in " + content + " %}{{ part }}{% endfor %}"


RENDER = "{% macro render(given) %}" + loop("given") + "{% endmacro %}"
PARTS = [
    each(loop("message.content")),
    each(loop("message['content']")),
    each(loop("message['content'] | selectattr('type', 'equalto', 'text')")),
    each(loop("message.content[1:]")),
    each("{% set content = message.content %}" + loop("content")),
    each("{% if message.content is string %}a{% else %}" + loop("message.content") + "{% endif %}"),
    each(loop("message.content"), "messages[1:]"),
    "{% set turns = messages %}{% set rest = turns[1:] %}" + each(loop("message.content"), "rest"),
    RENDER + each("{{ render(message.content) }}"),
    RENDER + each("{{ render(given=message['content']) }}"),
    each("{% call render(message.content) %}{% endcall %}") + RENDER,
    # Other targets than plain names matter only for messages and contents.
    "{% set ns.first, ns.rest = [], [] %}" + each(loop("message.content")),
    "{% set ns.turns = messages[0] %}" + each(loop("message.content")),
    "{% set ns.turns %}{{ messages }}{% endset %}" + each(loop("message.content")),
    "{% for i, turn in messages.items() %}{% endfor %}" + each(loop("message.content")),
    pairs("tools") + each(loop("message.content")),
    # The first loop over a content decides.
    each(loop("message.content") + pairs("message.content")),
    "{% macro outer(given) %}" + RENDER + "{% endmacro %}" + each("{{ render(message.content) }}"),
    # A loop in two macros belongs to the inner one, unless only the outer one is given a content.
    "{% macro outer(given) %}{% macro inner(other) %}"
    + loop("given")
    + "{% endmacro %}{% endmacro %}"
    + each("{{ outer(message.content) }}"),
]
TEXTS = [
    "",
    "{{ messages[0].content }}",
    each("{{ message.content }}"),
    each("{% set text = message.content %}" + loop("text")),
    each(loop("message.tool_calls")),
    each(loop("message['content'].split('a')")),
    each(loop("other.content")),
    loop("messages[0].content"),
    RENDER + each("{{ render(message.tool_calls) }}"),
    "{% macro render(content) %}" + loop("content") + "{% endmacro %}" + each("{{ render([]) }}"),
    "{% for i, message in messages %}" + loop("message.content") + "{% endfor %}",
    "{% for (message,) in messages %}" + loop("message.content") + "{% endfor %}",
    "{% for i, turn in messages[1:] %}{% endfor %}" + each(loop("message.content")),
    each(loop("message.content")) + "{% for i, turn in messages %}{% endfor %}",
    "{% set ns.turns = messages %}" + each(loop("message.content")),
    each(loop("message.content")) + "{% set ns.turns = messages | reverse %}",
    "{% set first, rest = messages %}" + each(loop("message.content")),
    "{% set turns = messages %}{% set ns.turns = turns[1:] %}" + each(loop("message.content")),
    each(pairs("message.content")),
    each(pairs("message.content") + loop("message.content")),
    each("{% set content = message.content %}" + pairs("content")),
    "{% macro render(given) %}"
    + pairs("given")
    + "{% endmacro %}"
    + each("{{ render(message.content) }}"),
    "{% macro outer(given) %}{% macro inner(other) %}"
    + loop("given")
    + "{% endmacro %}{% endmacro %}"
    + each("{{ outer(message.content) }}{{ inner(message.content) }}"),
]


def is_in_parts(source: str) -> bool:
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    return reads_parts(environment.parse(source))


@pytest.fixture
def in_parts_for_vllm():
    from vllm.renderers.hf import _detect_content_format

    return lambda source: _detect_content_format(source, default="string") == "openai"


@pytest.mark.parametrize(("sources", "in_parts"), [(PARTS, True), (TEXTS, False)])
def test_loops_over_a_content_make_the_difference(in_parts_for_vllm, sources, in_parts):
    for source in sources:
        assert in_parts_for_vllm(source) == in_parts, source
        assert is_in_parts(source) == in_parts, source


def test_templates_that_come_with_vllm_are_read_as_vllm_reads_them(in_parts_for_vllm):
    import vllm.transformers_utils.chat_templates as packaged

    paths = list(Path(packaged.__file__).parent.glob("*.jinja"))
    assert paths
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert is_in_parts(source) == in_parts_for_vllm(source), path.name
