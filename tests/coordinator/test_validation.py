"""Validation of requests: errors name the invalid field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from baton.coordinator.server.validation import ModelLimits, check_lengths, check_request
from baton.runtime.config import CoordinatorConfig
from baton.runtime.errors import InvalidArgument, NotFound
from baton.v1 import common_pb2, inference_pb2

CONFIG = CoordinatorConfig()
MODEL = ModelLimits("demo", 1024, 512)
NAN, INF = float("nan"), float("inf")


def request(sampling=None, **fields) -> inference_pb2.GenerateRequest:
    if not {"text", "chat", "tokens"} & fields.keys():
        fields["text"] = "hello"
    return inference_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(**(sampling or {})), **fields
    )


def templated(kwargs: str) -> dict:
    return {"chat": {"messages": [{"role": "user"}], "template_kwargs": kwargs}}


def with_tools(tools: str) -> dict:
    return {"chat": {"messages": [{"role": "user"}], "tools": tools}}


def with_fields(fields: str) -> dict:
    return {"chat": {"messages": [{"role": "user"}, {"role": "tool", "fields": fields}]}}


def continued(*turns: tuple[str, str], **fields) -> dict:
    messages = [{"role": role, "content": content} for role, content in turns]
    given = {"add_generation_prompt": False, "continue_final_message": True, **fields}
    return {"chat": {"messages": messages, **given}}


def continued_parts(*parts: dict) -> dict:
    found = continued(("user", "hi"))
    found["chat"]["messages"].append({"role": "assistant", "parts": parts})
    return found


def continued_call() -> dict:
    found = continued(("user", "hi"), ("assistant", "It"))
    found["chat"]["messages"][1]["fields"] = '{"tool_calls": [{"id": "c1"}]}'
    return found


def structured(**fields) -> dict:
    return {"structured_output": common_pb2.StructuredOutput(**fields)}


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "sampling.min_tokens"),
        *(({"temperature": bad}, "sampling.temperature") for bad in (NAN, INF, -0.1, 2.1)),
        *(({"top_p": bad}, "sampling.top_p") for bad in (NAN, 0.0, -1.0, 1.1)),
        ({"top_k": -2}, "sampling.top_k"),
        *(({"min_p": bad}, "sampling.min_p") for bad in (NAN, -0.1, 1.1)),
        *(({"presence_penalty": bad}, "sampling.presence_penalty") for bad in (NAN, -2.1, 2.1)),
        *(({"frequency_penalty": bad}, "sampling.frequency_penalty") for bad in (INF, -2.1)),
        *(({"repetition_penalty": bad}, "sampling.repetition_penalty") for bad in (0.0, NAN, 2.1)),
        ({"stop": ["s"] * 10_000}, "sampling.stop"),
        ({"stop": ["ok", ""]}, "sampling.stop[1]"),
        ({"stop": ["s" * 257]}, "sampling.stop[0]"),
        ({"bad_words": [""]}, "sampling.bad_words[0]"),
        ({"bad_words": ["w"] * 1000}, "sampling.bad_words"),
        ({"stop_token_ids": [1, 512]}, "sampling.stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 1000}, "sampling.stop_token_ids"),
        ({"allowed_token_ids": [512]}, "sampling.allowed_token_ids[0]"),
        ({"logit_bias": {512: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5]"),
        ({"logprobs": 21}, "sampling.logprobs"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        (structured(), "sampling.structured_output"),
        (structured(json_schema="{not json"), "sampling.structured_output.json_schema"),
        (structured(json_schema="[1]"), "sampling.structured_output.json_schema"),
        (structured(json_schema="[" * 5000), "sampling.structured_output.json_schema"),
        (structured(json_object=False), "sampling.structured_output.json_object"),
        (structured(regex=""), "sampling.structured_output.regex"),
        (structured(grammar="x" * 70_000), "sampling.structured_output.grammar"),
        (structured(structural_tag="{"), "sampling.structured_output.structural_tag"),
        (structured(structural_tag="[]"), "sampling.structured_output.structural_tag"),
        (structured(choice=common_pb2.Choices()), "sampling.structured_output.choice.values"),
    ],
)
def test_sampling(sampling, field):
    with pytest.raises(InvalidArgument) as caught:
        check_request(request(sampling), CONFIG, MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "text"),
        ({"text": "x" * (4 * 2**20 + 1)}, "text"),
        ({"tokens": {"ids": []}}, "tokens.ids"),
        ({"tokens": {"ids": [1, 512]}}, "tokens.ids[1]"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "", "content": "x"}]}}, "chat.messages[0].role"),
        (
            {"chat": {"messages": [{"role": "user", "parts": [{"text": ""}] * 8193}] * 2}},
            "chat.messages",
        ),
        (templated("{"), "chat.template_kwargs"),
        (templated("[" * 5000), "chat.template_kwargs"),
        (templated("[1]"), "chat.template_kwargs"),
        (templated('{"messages": []}'), "chat.template_kwargs"),
        (templated('{"chat_template": "{{ messages }}"}'), "chat.template_kwargs"),
        (templated('{"tokenize": false}'), "chat.template_kwargs"),
        (templated(r'{"name": ["\ud800"]}'), "chat.template_kwargs"),
        (with_tools("{"), "chat.tools"),
        (with_tools("{}"), "chat.tools"),
        (with_tools("[1]"), "chat.tools"),
        (with_tools(json.dumps([{"name": "x" * 5 * 2**20}])), "chat"),
        (with_fields("[]"), "chat.messages[1].fields"),
        (with_fields('{"content": "x"}'), "chat.messages[1].fields"),
        (with_fields("{"), "chat.messages[1].fields"),
        (continued(("user", "hi")), "chat.messages[0].role"),
        (continued(("assistant", "It"), ("tool", "1")), "chat.messages[1].role"),
        (continued(("user", "hi"), ("assistant", "")), "chat.messages[1].content"),
        (continued_parts({"text": "It"}, {"image": b"x"}), "chat.messages[1].parts[1]"),
        (continued_parts({"text": ""}), "chat.messages[1].parts[0]"),
        (continued_call(), "chat.messages[1]"),
        *(
            (
                continued(("assistant", "It"), add_generation_prompt=add),
                "chat.continue_final_message",
            )
            for add in (True, None)
        ),
        ({"lane": 9}, "lane"),
        ({"lane": -1}, "lane"),
        ({"request_id": "has space"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "ü"}, "request_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"route": "/v1/messages?a=b"}, "route"),
        ({"route": "/" * 65}, "route"),
        ({"timeout": {}}, "timeout"),
        ({"timeout": {"seconds": -1}}, "timeout"),
        ({"resume": {"token_ids": [512]}}, "resume.token_ids[0]"),
        ({"resume": {"token_ids": [1, 2]}, "sampling": {"max_tokens": 1}}, "resume.token_ids"),
        ({"resume": {"num_text_chars": 1}}, "resume.num_text_chars"),
        ({"resume": {"prompt_token_ids": [600]}}, "resume.prompt_token_ids[0]"),
        ({"resume": {"revision": "r" * 65}}, "resume.revision"),
    ],
)
def test_request(fields, field):
    with pytest.raises(InvalidArgument) as caught:
        check_request(request(**fields), CONFIG, MODEL)
    assert caught.value.field == field


def test_good_edges_pass():
    sampling = {
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 2.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": -2.0,
        "repetition_penalty": 0.1,
        "stop": ["s" * 256] * 16,
        "logprobs": 20,
        "stop_token_ids": [511],
        **structured(json_schema='{"type": "object"}'),
    }
    good = request(sampling, request_id="a.b:c-D_9", timeout={"nanos": 1}, model="demo", lane=2)
    check_request(good, CONFIG, MODEL)


@pytest.mark.parametrize(
    "fields",
    [
        continued(("user", "hi"), ("assistant", "It")),
        continued(("assistant", " ")),
        continued_parts({"image": b"x"}, {"text": "It"}),
        {"chat": {"messages": [{"role": "user"}], "add_generation_prompt": False}},
    ],
)
def test_good_chats_pass(fields):
    check_request(request(**fields), CONFIG, MODEL)


def test_another_model():
    with pytest.raises(NotFound, match="'demo'"):
        check_request(request(model="other"), CONFIG, MODEL)
    tuned = replace(MODEL, adapters=frozenset({"b", "a"}))
    check_request(request(model="a"), CONFIG, tuned)
    with pytest.raises(NotFound, match="serves 'demo' and 'a' and 'b'"):
        check_request(request(model="other"), CONFIG, tuned)


def test_errors_quote_no_more_than_trailing_metadata_can_carry():
    with pytest.raises(NotFound) as caught:
        check_request(request(model="m" * 2**20), CONFIG, MODEL)
    assert len(str(caught.value)) < 200


def test_choices_count_as_one_grammar():
    choices = common_pb2.Choices(values=["c" * 1024] * 65)
    with pytest.raises(InvalidArgument, match="66560 bytes"):
        check_request(request(structured(choice=choices)), CONFIG, MODEL)


def test_lengths():
    check_lengths(request({"max_tokens": 1}), 1023, MODEL)
    check_lengths(request(), 1023, MODEL)
    for sampling, num_prompt, field in (
        ({}, 0, "text"),
        ({}, 1024, "text"),
        ({"max_tokens": 25}, 1000, "sampling.max_tokens"),
        ({"min_tokens": 25}, 1000, "sampling.min_tokens"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_lengths(request(sampling), num_prompt, MODEL)
        assert caught.value.field == field
    many = ModelLimits("demo", None, None)
    with pytest.raises(InvalidArgument, match="prompt_logprobs"):
        check_lengths(request({"prompt_logprobs": 20}), 100_000, many)


def test_unknown_limits_are_not_checked():
    unknown = ModelLimits("demo", None, None)
    check_request(request(tokens={"ids": [10**6]}), CONFIG, unknown)
    check_lengths(request({"max_tokens": 10**6}), 10**6, unknown)
