"""Tokenization of prompts with the files of a model directory."""

from __future__ import annotations

import json

import pytest

from baton.runtime.config_error import ConfigError
from baton.runtime.errors import InvalidArgument
from baton.runtime.prompts.tokenization import Tokenizer
from baton.v1 import inference_pb2


@pytest.fixture
def tokenizer(model_dir):
    tokenizer = Tokenizer(str(model_dir))
    yield tokenizer
    tokenizer.close()


def chat(*messages, **fields) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(
        messages=[{"role": role, "content": content} for role, content in messages], **fields
    )


def set_settings(directory, **settings) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_plain_text_gets_the_post_processors_tokens(tokenizer):
    assert tokenizer.encode_text("fox")[0] == 0
    assert tokenizer.encode_text("fox").count(0) == 1


@pytest.mark.parametrize(
    ("settings", "ends"),
    [({"add_bos_token": False}, ()), ({"add_bos_token": True, "add_eos_token": True}, (0, 1))],
)
def test_settings_decide_about_special_tokens(fresh_model_dir, settings, ends):
    set_settings(fresh_model_dir, **settings)
    tokenizer = Tokenizer(str(fresh_model_dir))
    ids = tokenizer.encode_text("fox")
    assert tuple(one for one in ids if one in (0, 1)) == ends
    tokenizer.close()


def test_chat_writes_its_own_special_tokens(tokenizer):
    assert tokenizer.render(chat(("user", "hi"))) == "<s><user>hi</s><assistant>"
    bare = chat(("user", "<b>&"), add_generation_prompt=False)
    assert tokenizer.render(bare) == "<s><user><b>&</s>"
    assert list(tokenizer.encode_chat(chat(("user", "hi")))).count(0) == 1


def test_templates_are_given_what_the_caller_sends_for_them(fresh_model_dir):
    """For example, a variable that turns off the reasoning of a model."""
    source = "{{ bos_token }}{% if enable_thinking is false %}quick{% else %}slow{% endif %}"
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"))) == "<s>slow"
    hasty = chat(("user", "hi"), template_kwargs='{"enable_thinking": false}')
    assert tokenizer.render(hasty) == "<s>quick"
    tokenizer.close()


@pytest.mark.parametrize("source", ["{{ 1 // n }}", "{% for _ in range(10**9 - n) %}{% endfor %}"])
def test_a_template_error_is_the_callers_fault(fresh_model_dir, source):
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        tokenizer.render(chat(("user", "x"), template_kwargs='{"n": 0}'))
    tokenizer.close()


def test_template_refusal_is_the_callers_fault(tokenizer):
    with pytest.raises(InvalidArgument, match="unknown role robot"):
        tokenizer.render(chat(("robot", "hi")))


ROLES = "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("known", "rendered"),
    [
        ("", "system:Be brief.\n\nIt is May.\n\nUse tools.|user:hi|user:and?|"),
        (
            "{# 'developer' #}",
            "developer:Be brief.|user:hi|system:It is May.|user:and?|developer:Use tools.|",
        ),
    ],
)
def test_developer_messages_are_system_messages_where_a_template_does_not_know_them(
    fresh_model_dir, known, rendered
):
    set_settings(fresh_model_dir, chat_template=known + ROLES)
    tokenizer = Tokenizer(str(fresh_model_dir))
    turns = [("developer", "Be brief."), ("user", "hi"), ("system", "It is May."), ("user", "and?")]
    assert tokenizer.render(chat(*turns, ("developer", "Use tools."))) == rendered
    plain = chat(("system", "a"), ("user", "b"), ("system", "c"))
    assert tokenizer.render(plain) == "system:a|user:b|system:c|"
    tokenizer.close()


# As in SmolVLM and LLaVA: a text that is no list of parts would be missing.
PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content[0].type == 'image' %}!{% endif %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)


def test_templates_that_read_parts_are_given_the_text_as_a_part(fresh_model_dir):
    set_settings(fresh_model_dir, chat_template=PARTS)
    tokenizer = Tokenizer(str(fresh_model_dir))
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "")]
    assert tokenizer.render(chat(*turns)) == "[system]Be brief.[user]hi[assistant]"
    turns = [("user", "hi"), ("developer", "Be brief."), ("developer", "Use tools.")]
    assert tokenizer.render(chat(*turns)) == "[system]Be brief.\n\nUse tools.[user]hi"
    assert tokenizer.render(continued(("user", "hi"), ("assistant", "It "))).endswith("t]It ")
    prompt = chat(("user", "hi"), ("user", ""))
    prompt.messages[1].parts.add(image=b"a")
    prompt.messages[1].parts.add(text="b")
    assert tokenizer.render(prompt) == "[user]hi[user]!<image>b"
    tokenizer.close()


TWO_TEXTS = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("role", "rendered"),
    [
        ("user", "[user](a)(b)"),
        ("assistant", "[assistant](a)(b)"),
        ("developer", "[system](a)(b)"),
        # As in vLLM, the result of a tool is one text.
        ("tool", "[tool]a\nb"),
    ],
)
def test_several_texts_of_a_message_stay_parts_if_the_template_reads_parts(
    fresh_model_dir, role, rendered
):
    source = (
        "{% for message in messages %}[{{ message.role }}]"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    message = inference_pb2.ChatMessage(role=role, parts=TWO_TEXTS)
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(inference_pb2.ChatPrompt(messages=[message])) == rendered
    tokenizer.close()


def test_several_texts_of_a_message_are_joined_if_the_template_reads_a_text(fresh_model_dir):
    set_settings(fresh_model_dir, chat_template=ROLES)
    tokenizer = Tokenizer(str(fresh_model_dir))
    message = inference_pb2.ChatMessage(role="user", parts=TWO_TEXTS)
    assert tokenizer.render(inference_pb2.ChatPrompt(messages=[message])) == "user:a\nb|"
    tokenizer.close()


def test_results_of_tools_stay_texts_for_templates_that_read_parts(fresh_model_dir):
    """As in vLLM."""
    source = "{% if message.role == 'tool' %}{{ message.content }}{% else %}|{% endif %}"
    loop = "{% for part in message.content %}{% endfor %}"
    set_settings(fresh_model_dir, chat_template=each_turn(source + loop))
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"), ("tool", "cold"))) == "[user]|</s>[tool]cold</s>"
    tokenizer.close()


def continued(*messages):
    return chat(*messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "text", ["It", "It ", " ", "It\n\nis <b>", "CONTINUE_FINAL_MESSAGE_TAG it"]
)
def test_a_continued_chat_ends_inside_its_last_message(tokenizer, text):
    prompt = continued(("user", "hi"), ("assistant", text))
    assert tokenizer.render(prompt) == f"<s><user>hi</s><assistant>{text}"
    images = continued(("user", "hi"), ("assistant", ""))
    images.messages[1].parts.add(text="It")
    images.messages[1].parts.add(text=text)
    assert tokenizer.render(images) == f"<s><user>hi</s><assistant>It\n{text}"


def test_the_text_after_an_image_can_be_continued(fresh_model_dir):
    source = (
        "{% for part in messages[0].content %}"
        "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}</s>"
    )
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    prompt = continued(("assistant", ""))
    prompt.messages[0].parts.add(text="a")
    prompt.messages[0].parts.add(image=b"b")
    prompt.messages[0].parts.add(text="c ")
    assert tokenizer.render(prompt) == "a<image>c "
    tokenizer.close()


def each_turn(content: str) -> str:
    return "{% for message in messages %}[{{ message.role }}]" + content + "</s>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "num_refused"),
    [
        (each_turn("{{ message.content }}"), 0),
        (each_turn("{{ message.content | trim }}"), 0),
        (each_turn("{{ message.content.split('</think>')[-1].lstrip('\\n') }}"), 1),
        (each_turn("{{ message.content | upper }}"), 6),
        (each_turn("{% if message.role == 'user' %}{{ message.content }}{% endif %}"), 8),
        ("{{ messages[-1].content }}|{{ messages[-1].content }}</s>", 0),
    ],
)
def test_continued_chats_are_rendered_as_transformers_does(fresh_model_dir, source, num_refused):
    """Or refused, if the template leaves out or changes the text.

    Transformers takes a changed text if the given one occurs anywhere else in the chat.
    """
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    refused = 0

    def check_refused(turns):
        with pytest.raises(InvalidArgument, match="chat template refuses them") as caught:
            tokenizer.render(continued(*turns))
        assert caught.value.field == "chat.messages"

    texts = ["It", "It ", "\n It is\n", "so</think>\n\nIt", "<think>so", " ", "</s>", "It</s>[a]"]
    for text in texts:
        turns = [("user", "hi"), ("assistant", text)]
        conversation = [{"role": role, "content": content} for role, content in turns]
        try:
            ((wanted,), _) = theirs.render_jinja_template(
                [conversation], chat_template=source, continue_final_message=True
            )
        except ValueError:
            refused += 1
            check_refused(turns)
        else:
            if wanted.rstrip().endswith(text.strip()):
                assert tokenizer.render(continued(*turns)) == wanted, text
            else:
                check_refused(turns)
    assert refused == num_refused
    tokenizer.close()


def test_template_file_wins_and_its_extensions_work(fresh_model_dir):
    (fresh_model_dir / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = Tokenizer(str(fresh_model_dir))
    rendered = tokenizer.render(chat(("user", "<ü>"), ("user", "again")))
    assert rendered == '{"role": "user", "content": "<ü>"}'
    tokenizer.close()


def test_templates_know_that_there_are_no_tools_and_no_documents(fresh_model_dir):
    """As in transformers, the variables are defined and None."""
    source = (
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
        "{% if documents is not none %}{{ documents | tojson }}{% endif %}{{ messages[0].content }}"
    )
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"))) == "hi"
    tokenizer.close()


def test_templates_read_tools_and_calls(fresh_model_dir):
    """Templates get arguments as objects; invalid JSON arguments must not fail the chat."""
    source = (
        "{{ tools[0].function.name }}{% for message in messages %}|{{ message.role }}"
        "{% for call in message.tool_calls %} {{ call.function.arguments | tojson }}{% endfor %}"
        "{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}{% endfor %}"
    )
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    written = ['{"city": "Oslo"}', {"city": "Rome"}, "[1]", '{"city"', "", None, "[" * 5000]
    calls = [{"function": {"name": "f", "arguments": one}} for one in written]
    prompt = chat(
        ("user", "hi"),
        ("assistant", ""),
        ("tool", "cold"),
        tools='[{"type": "function", "function": {"name": "weather"}}]',
    )
    prompt.messages[1].fields = json.dumps({"tool_calls": [*calls, {"function": 5}, 6]})
    prompt.messages[2].fields = '{"tool_call_id": "call-1"}'
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        tokenizer.render(prompt)
    prompt.messages[1].fields = json.dumps({"tool_calls": calls})
    shown = '{"city": "Oslo"} {"city": "Rome"}' + 5 * " {}"
    assert tokenizer.render(prompt) == f"weather|user|assistant {shown}|tool call-1"
    tokenizer.close()


TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
WITH_TOOLS = "{# 'developer' #}{{ tools[0].function.name }}|" + ROLES


@pytest.mark.parametrize("as_files", [False, True])
def test_chats_with_tools_are_rendered_with_the_template_for_tools(fresh_model_dir, as_files):
    """Both in tokenizer_config.json and in the files of newer models; as in transformers."""
    named = {"default": ROLES, "tool_use": WITH_TOOLS, "rag": "{{ no template"}
    if as_files:
        (fresh_model_dir / "chat_template.jinja").write_text(named.pop("default"))
        (fresh_model_dir / "additional_chat_templates").mkdir()
        for name, source in named.items():
            (fresh_model_dir / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    else:
        listed = [{"name": name, "template": source} for name, source in named.items()]
        set_settings(fresh_model_dir, chat_template=listed)
    tokenizer = Tokenizer(str(fresh_model_dir))
    turns = [("user", "hi"), ("developer", "Be brief.")]
    # Each template has its own answer to whether it knows the role `developer`.
    assert tokenizer.render(chat(*turns)) == "system:Be brief.|user:hi|"
    with_tools = tokenizer.render(chat(*turns, tools=TOOLS))
    assert with_tools == "weather|user:hi|developer:Be brief.|"
    assert tokenizer.info()["chat_template"] == ROLES
    tokenizer.close()


def test_a_further_default_replaces_the_tokenizers_template_but_not_the_processors(
    fresh_model_dir,
):
    """As in transformers, whose tokenizers and processors have different rules."""
    directory = fresh_model_dir
    (directory / "chat_template.jinja").write_text(ROLES)
    (directory / "additional_chat_templates").mkdir()
    further = "further {{ tools is not none }} " + ROLES
    (directory / "additional_chat_templates" / "default.jinja").write_text(further)
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.render(chat(("user", "hi"))) == "further False user:hi|"
    assert tokenizer.render(chat(("user", "hi"), tools=TOOLS)) == "further True user:hi|"
    tokenizer.close()
    (directory / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.render(chat(("user", "hi"))) == "user:hi|"
    assert tokenizer.render(chat(("user", "hi"), tools=TOOLS)) == "further True user:hi|"
    tokenizer.close()


def test_a_default_template_also_renders_tools(fresh_model_dir):
    listed = [{"name": "default", "template": WITH_TOOLS}, {"name": "rag", "template": ROLES}]
    set_settings(fresh_model_dir, chat_template=listed)
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"), tools=TOOLS)) == "weather|user:hi|"
    tokenizer.close()


def test_only_chats_with_tools_take_the_tokenizers_template_beside_a_processors(fresh_model_dir):
    """As in vLLM; older models with images have a template in their processor's files."""
    set_settings(fresh_model_dir, chat_template="{{ tools[0].function.name }}")
    directory = fresh_model_dir
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    (directory / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.render(chat(("user", "hi"))) == "[user]hi"
    assert tokenizer.render(chat(("user", "hi"), tools=TOOLS)) == "weather"
    tokenizer.close()
    (directory / "processor_config.json").write_text(json.dumps({"chat_template": ROLES}))
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.render(chat(("user", "hi"))) == "user:hi|"
    tokenizer.close()
    set_settings(directory, chat_template=None)
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.render(chat(("user", "hi"), tools=TOOLS)) == "user:hi|"
    tokenizer.close()


def test_a_model_for_texts_keeps_its_tokenizers_template(fresh_model_dir):
    """Its directory may have the template of a model for images that it was made from."""
    set_settings(fresh_model_dir, chat_template=ROLES)
    (fresh_model_dir / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"))) == "user:hi|"
    tokenizer.close()


def test_a_template_that_is_no_text_is_an_error_only_if_it_is_used(fresh_model_dir):
    further = fresh_model_dir / "additional_chat_templates"
    further.mkdir()
    (fresh_model_dir / "chat_template.jinja").write_text(ROLES)
    (further / "._tool_use.jinja").write_bytes(b"\xff\x00")
    tokenizer = Tokenizer(str(fresh_model_dir))
    assert tokenizer.render(chat(("user", "hi"))) == "user:hi|"
    tokenizer.close()
    (further / "tool_use.jinja").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match=r"tool_use\.jinja, that cannot be read"):
        Tokenizer(str(fresh_model_dir))


def test_long_tools_leave_the_event_loop(tokenizer):
    short = inference_pb2.GenerateRequest(chat=chat(("user", "x"), tools="[{}]"))
    assert tokenizer.is_short(short)
    long = json.dumps([{"name": "x" * 10_000}])
    assert not tokenizer.is_short(
        inference_pb2.GenerateRequest(chat=chat(("user", "x"), tools=long))
    )
    short.chat.messages[0].fields = json.dumps({"reasoning": "x" * 10_000})
    assert not tokenizer.is_short(short)
    many = inference_pb2.ChatMessage(role="user", parts=[{"text": ""}] * 1000)
    chat_of_many = inference_pb2.ChatPrompt(messages=[many])
    assert not tokenizer.is_short(inference_pb2.GenerateRequest(chat=chat_of_many))


def test_the_texts_of_parts_count_as_a_messages_text(tokenizer):
    text = "the quick brown fox " * 500
    whole = inference_pb2.GenerateRequest(chat=chat(("user", text)))
    message = inference_pb2.ChatMessage(role="user", parts=[{"text": text}])
    parts = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=[message]))
    assert tokenizer.min_tokens(parts) == tokenizer.min_tokens(whole) > 0


def test_no_template(fresh_model_dir):
    set_settings(fresh_model_dir, chat_template=None)
    tokenizer = Tokenizer(str(fresh_model_dir))
    with pytest.raises(InvalidArgument, match="no chat template"):
        tokenizer.render(chat(("user", "hi")))
    tokenizer.close()


def test_template_cannot_reach_out(fresh_model_dir):
    source = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    set_settings(fresh_model_dir, chat_template=source)
    tokenizer = Tokenizer(str(fresh_model_dir))
    with pytest.raises(InvalidArgument):
        tokenizer.render(chat(("user", "hi")))
    tokenizer.close()


def test_limits_come_from_the_model(tokenizer):
    assert (tokenizer.max_model_len, tokenizer.vocab_size) == (1024, 512)


async def test_long_texts_give_the_same_tokens(tokenizer):
    text = "the quick brown fox jumps " * 400
    request = inference_pb2.GenerateRequest(text=text)
    assert await tokenizer.prompt_token_ids(request) == tokenizer.encode_text(text)
    assert tokenizer.min_tokens(request) <= len(tokenizer.encode_text(text))


@pytest.mark.parametrize(
    "messages", [[("r" * 100_000, "x")], [("user", "")] * 1000], ids=["role", "many"]
)
def test_long_chats_leave_the_event_loop_whatever_is_long(tokenizer, messages):
    assert not tokenizer.is_short(inference_pb2.GenerateRequest(chat=chat(*messages)))
    assert tokenizer.is_short(inference_pb2.GenerateRequest(chat=chat(("user", "x"))))


def test_text_added_by_the_template_counts(tokenizer):
    long = chat(("user", "x"), template_kwargs=json.dumps({"bos_token": 10_000 * "x"}))
    assert len(tokenizer.render(long)) > 10_000
    assert not tokenizer.is_short(inference_pb2.GenerateRequest(chat=long))


def test_missing_models_are_said_clearly(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        Tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer(str(tmp_path))
