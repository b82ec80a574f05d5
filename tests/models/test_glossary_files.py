"""Files of the toy model, checked without running it."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.models import files
from baton.models.corpus import load
from baton.runtime import demo_model
from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.errors import InvalidArgument
from baton.runtime.prompts.tokenization import Tokenizer
from baton.v1 import inference_pb2

MAX_BYTES = 8 * 10**6
SPECIALS = (files.BOS, files.EOS, files.USER, files.ASSISTANT)


@pytest.fixture(scope="module")
def directory():
    return demo_model.ensure(BatonConfig().model)


@pytest.fixture(scope="module")
def tokenizer(directory):
    made = Tokenizer(directory)
    yield made
    made.close()


@pytest.fixture(scope="module")
def corpus():
    return load()


def chat(*turns):
    messages = [inference_pb2.ChatMessage(role=role, content=text) for role, text in turns]
    return inference_pb2.ChatPrompt(messages=messages)


def test_the_files_are_made_from_the_glossary(corpus, tmp_path):
    files.write_files(tmp_path, files.make_tokenizer(corpus))
    made = sorted(tmp_path.iterdir())
    assert len(made) == 4
    for file in made:
        assert (files.DIRECTORY / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_weights_are_small_and_complete():
    data = (files.DIRECTORY / "model.safetensors").read_bytes()
    assert len(data) <= MAX_BYTES
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert 2e6 <= sum(math.prod(tensor["shape"]) for tensor in header.values()) <= 6e6


@given(st.text().filter(lambda text: not any(special in text for special in SPECIALS)))
def test_every_text_is_restored_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_text(text), skip_special_tokens=True) == text


def test_a_chat_renders_as_its_last_question(tokenizer):
    asked = chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Why?"))
    assert tokenizer.render(asked) == "<s><|user|>Why?<|assistant|>"
    asked.messages.add(role="assistant", content="Look.")
    asked.messages.add(role="tool", content="4 C")
    assert tokenizer.render(asked) == "<s><|user|>4 C<|assistant|>"
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        tokenizer.render(chat(("system", "Be brief.")))


def test_the_glossary_is_large_and_its_answers_are_short(corpus):
    assert len(corpus.entries) >= 300
    answers = [entry.answer for entry in corpus.entries]
    assert len(set(answers)) == len(answers)
    for answer in [*answers, corpus.off_topic_answer]:
        assert answer.isascii()
        assert answer.endswith((".", "?"))
        assert len(re.findall(r"[.?!](?: |$)", answer)) <= 3, answer
        assert len(answer) <= 200, answer


def test_two_answers_to_one_question_are_refused(tmp_path):
    file = tmp_path / "glossary.toml"
    term = '[[term]]\nnames = ["SLO"]\nanswer = "{}"'
    question = '[[question]]\nask = ["Why?"]\nanswer = "So."'
    file.write_text("\n".join([term.format("One."), term.format("Two."), question]))
    with pytest.raises(ValueError, match="'what is slo\\?' has two answers"):
        load(file)


def test_an_installation_without_the_model_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "_SHIPPED", tmp_path)
    with pytest.raises(ConfigError, match=r"glossary should be in .* config\.json.* another"):
        demo_model.ensure("glossary")
